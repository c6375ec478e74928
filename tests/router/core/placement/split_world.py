"""A decision core for tests that splits requests between prefill and decode workers."""

from __future__ import annotations

import numpy as np

from policies.facts import (
    Prefilled,
)
from router.core.contract.actions import Action, Dispatch
from tests.router.core.core_world import World

LONG = list(range(500))
SLOW = {"prefill_tokens_per_s": 1_000.0, "group": "g"}


def pool(*roles: str, **facts: object) -> World:
    """Return a world with one worker for each of the given roles."""
    world = World(workers=0)
    for worker_id, role in enumerate(roles):
        world.join(worker_id, role=role, **SLOW | facts)
    return world


def legs(actions: list[Action]) -> list[tuple[int, str]]:
    """Return the worker id and the role of each dispatch."""
    stages = [a.stages for a in actions if isinstance(a, Dispatch)]
    return [(stage.worker_id, stage.role) for (stage,) in stages]


def ask(world: World, blocks: list[int] = LONG, **fields: object) -> tuple[int, list[Action]]:
    arrival = world.arrival(blocks, splits=True, **fields)
    return arrival.request_id, world.core.on_arrival(arrival)


def prefilled(world: World, number: int) -> list[Action]:
    world.now_s += 1.0
    return world.core.on_prefilled(Prefilled(world.now_s, number, 0))


def assert_empty(world: World) -> None:
    columns = world.core.columns
    for name in ("requests", "waiting", "context_tokens", "decode_place_tokens"):
        assert not getattr(columns, name).any(), name
    assert np.array_equal(columns.charged_work, columns.drained_work)
    assert not world.core.inflight_requests
    assert all(not world.core.ledger.decode_places_at(w.slot) for w in world.core.workers)


ENDS = ("prefilled", "first", "finish", "fail", "leave", "gone", "join")
