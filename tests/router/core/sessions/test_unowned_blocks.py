"""Tests of blocks that caches held before the router followed any session: they count, lose weight,
and get an owner.
"""

from __future__ import annotations

import numpy as np
import pytest

from policies.facts import Cleared, Finish, FirstToken, KvEvents, ReplayEnd, Tick, WorkerChange
from policies.load import load
from router.core.sessions.return_hazard import ReturnHazard, UnownedBlocks
from tests.router.core.core_world import BLOCK, World, stored


def test_unowned_blocks_lose_weight_as_idle_sessions_do() -> None:
    unowned, hazard = UnownedBlocks(2), ReturnHazard()
    unowned.found(1, 1_000.0, 10.0)
    assert unowned.wanted_tokens.tolist() == [0.0, 1_000.0]
    wanted = []
    for now_s in (10.0, 40.0, 100.0, 400.0, 2_000.0):
        unowned.weigh(hazard, now_s)
        wanted.append(unowned.wanted_tokens[1])
    assert wanted == sorted(wanted, reverse=True)
    assert wanted[0] > 900.0
    assert wanted[-1] < 50.0
    unowned.weigh(hazard, 5.0)  # a clock that went back
    assert unowned.wanted_tokens[1] == wanted[0]


def test_blocks_that_get_an_owner_no_longer_count_as_unowned() -> None:
    unowned = UnownedBlocks(1)
    unowned.found(0, 1_000.0, 0.0)
    unowned.weigh(ReturnHazard(), 30.0)
    before = unowned.wanted_tokens[0]
    unowned.known(0, 250.0)
    assert unowned.wanted_tokens[0] == pytest.approx(0.75 * before)
    unowned.known(0, 5_000.0)
    assert unowned.wanted_tokens[0] == 0.0
    unowned.known(0, 1.0)
    assert unowned.wanted_tokens[0] == 0.0
    unowned.found(0, -5.0, 0.0)  # more is known to be at home than the cache is known to hold
    assert unowned.wanted_tokens[0] == 0.0


def holding(policy: str, blocks: int = 50) -> World:
    """Return a world in which one worker is known to hold `blocks` blocks at the first tick."""
    world = World(1, policy)
    held = stored(list(range(blocks)))
    world.core.on_kv_events(KvEvents(0.0, 0, 0, (held,), source="snapshot"))
    world.core.on_tick(Tick(0.1))
    return world


def wanted(world: World) -> float:
    return world.core.session_tracking.wanted_tokens(0)


def test_a_starting_router_counts_the_blocks_of_a_full_cache() -> None:
    world = holding("warmset")
    assert wanted(world) == pytest.approx(50 * BLOCK, rel=0.1)
    world.core.on_tick(Tick(3_000.0))
    assert wanted(world) < 0.1 * 50 * BLOCK


def test_unowned_blocks_count_if_session_tracking_starts_later() -> None:
    world = holding("hybrid")
    assert np.isnan(wanted(world))
    world.core.set_policy(load("warmset"))
    world.core.on_tick(Tick(0.2))
    assert wanted(world) == pytest.approx(50 * BLOCK, rel=0.1)


def test_the_blocks_of_a_returning_session_are_counted_once() -> None:
    world = holding("warmset")
    arrival = world.arrival(list(range(50)), session="ann")
    world.core.on_arrival(arrival)
    assert wanted(world) == pytest.approx(50 * BLOCK, rel=0.01)
    world.core.on_first_token(FirstToken(0.2, arrival.request_id))
    world.core.on_finish(Finish(0.3, arrival.request_id, output_tokens=BLOCK))
    world.core.on_tick(Tick(0.4))
    assert wanted(world) == pytest.approx(51 * BLOCK, rel=0.1)


def test_a_worker_that_restarts_empty_has_no_unowned_blocks() -> None:
    world = holding("warmset")
    world.core.on_worker(WorkerChange(0.2, 0, "down"))
    world.core.on_worker(WorkerChange(0.3, 0, "ready"))
    world.core.on_kv_events(KvEvents(0.4, 0, 0, (Cleared(),), source="snapshot"))
    world.core.on_tick(Tick(0.5))
    assert wanted(world) == 0.0


def test_a_worker_that_kept_its_cache_has_its_unowned_blocks_again() -> None:
    world = holding("warmset")
    world.core.on_worker(WorkerChange(0.2, 0, "down"))
    world.core.on_worker(WorkerChange(0.3, 0, "ready"))
    assert wanted(world) == 0.0
    held = stored(list(range(50)))
    world.core.on_kv_events(KvEvents(0.4, 0, 7, (held,), source="snapshot"))
    world.core.on_tick(Tick(0.5))
    assert wanted(world) == pytest.approx(50 * BLOCK, rel=0.1)


def test_blocks_stored_while_the_router_watched_are_not_unowned() -> None:
    """Blocks that were stored while the router watched do not count as unowned, even if the
    publisher has no replay or snapshot, so that the cache is known only once all of it was
    replaced.
    """
    world = World(0, "warmset")
    world.join(0, kv_capacity_tokens=10.0 * BLOCK)
    worker = world.core.workers.get(0)
    assert worker is not None
    world.core.on_kv_events(KvEvents(0.0, 0, 5, (stored([900]),)))
    world.core.on_replay_end(ReplayEnd(0.0, 0, answered=False))
    for n in range(12):
        world.core.on_kv_events(KvEvents(0.1, 0, 6 + n, (stored([1_000 + n]),)))
    assert worker.kv.known
    assert not worker.kv.exact
    world.core.on_tick(Tick(0.2))
    assert wanted(world) == 0.0
