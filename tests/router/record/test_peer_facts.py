"""Tests of facts about peer routers' requests in a recording: read back, they have the same effect
on a core.
"""

from __future__ import annotations

import numpy as np

from policies.facts import (
    Fact,
    Finish,
    PeerDispatched,
    PeerEnded,
    PeerFirstToken,
    PeerProgress,
    WorkerChange,
)
from router.core.core import take
from router.record.facts import as_read, fact_of, plain
from tests.router.core.core_world import World

HISTORY = [1, 2, 3, 4]


def facts_of(world: World) -> list[Fact]:
    """Return the facts about two requests of a peer router, of which one is answered and one under
    way.
    """
    first = world.arrival(HISTORY, request_id=-1, session="s", tenant="t")
    other = world.arrival(HISTORY[:2], request_id=-2, chains={})
    return [
        PeerDispatched(0.0, first, 0, 16, "warm"),
        PeerDispatched(0.1, other, 1, 8),
        PeerFirstToken(0.2, -1),
        PeerProgress(0.3, -1, 70),
        PeerEnded(0.4, -1, Finish(0.4, -1, 16, 0, 80)),
        PeerFirstToken(0.5, -2),
    ]


def test_peer_facts_read_from_a_recording_have_the_same_effect() -> None:
    told, played = World(policy="warmset"), World(policy="warmset")
    for fact in facts_of(told):
        take(told.core, fact)
        kind, fields = as_read(plain(fact))
        take(played.core, fact_of(kind, fields))
    for world in (told, played):
        assert len(world.core.peer_requests) == 1
        assert world.core.inflight_requests == 0
    for name in ("requests", "waiting", "context_tokens", "charged_work", "drained_work"):
        ours, theirs = (getattr(world.core.columns, name) for world in (told, played))
        assert np.array_equal(ours, theirs), name
    assert told.core.columns.context_tokens[1] == 9


def test_a_peer_requests_blocks_are_expected_until_its_worker_is_gone() -> None:
    world = World(policy="warmset")
    for fact in facts_of(world)[:2]:
        take(world.core, fact)
    wanted = world.core.explain(world.arrival(HISTORY))
    best = wanted.decision.candidates  # type: ignore[union-attr]
    hits = {one.worker_id: one.hit_tokens for one in best}
    assert hits == {0: 15, 1: 0, 2: 0}
    world.core.on_worker(WorkerChange(1.0, 0, "gone"))
    assert len(world.core.peer_requests) == 1
    assert len(world.core.ledger) == 1
