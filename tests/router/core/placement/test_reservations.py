"""Tests of reservations: a large request does not wait forever behind small ones, because a worker
is kept free for it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Failure, Finish, Tick, WorkerChange
from router.core.contract.actions import Action, Dispatch, Reject
from router.core.placement.choice import Withheld
from router.core.placement.hold_queue import PASSED_S
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World
from tests.router.property_support import patient

LARGE = list(range(100, 116))  # blocks of a prompt that wants a worker to itself
LARGE_TOKENS = len(LARGE) * BLOCK
ROOMY, NARROW = 10.0 * LARGE_TOKENS, LARGE_TOKENS - 1.0  # tokens of KV


def room(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Choose the worker with the fewest requests (at most three small ones; a large one only at an
    idle worker): a policy for tests.
    """
    most = 1 if request.prompt_tokens >= LARGE_TOKENS else 3
    fits = (fleet.kv_capacity_tokens >= request.prompt_tokens) & (fleet.requests < most)
    return np.where(fits, fleet.requests.astype(float), np.inf)


def nowhere(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Exclude every worker for a large request, even an idle one: a policy for tests."""
    if request.prompt_tokens >= LARGE_TOKENS:
        return np.full(len(fleet), np.inf)
    return room(request, fleet, state)


class Crowd(World):
    """A world with an endless stream of small requests. Lifetime: test."""

    def __init__(self, capacities: list[float], policy: str = "room", **bounds: Any) -> None:
        super().__init__(workers=0, policy=f"{__name__}:{policy}", **bounds)
        for worker_id, tokens in enumerate(capacities):
            self.join(worker_id, kv_capacity_tokens=tokens)
        self.running: dict[int, tuple[float, int]] = {}  # request -> when it ends, its worker
        self.sent_s: dict[int, float] = {}
        self.sent_to: dict[int, int] = {}

    def take(self, actions: list[Action], lasts_s: float = 1.0) -> list[Action]:
        for action in actions:
            assert not isinstance(action, Reject), action
            if isinstance(action, Dispatch):
                self.running[action.request_id] = (self.now_s + lasts_s, action.worker_id)
                self.sent_s[action.request_id] = self.now_s
                self.sent_to[action.request_id] = action.worker_id
        return actions

    def come(self, blocks: list[int], lasts_s: float = 1.0, **fields: Any) -> int:
        arrival = self.arrival(blocks, **fields)
        self.take(self.core.on_arrival(arrival), lasts_s)
        return arrival.request_id

    def end(self) -> None:
        """End the requests whose time is over, and let held ones use the free room at once."""
        for request_id, (end_s, _) in sorted(self.running.items()):
            if end_s <= self.now_s:
                del self.running[request_id]
                self.take(self.core.on_finish(Finish(self.now_s, request_id)))

    def crowd(self, seconds: float, count: int = 4, rng: random.Random | None = None) -> None:
        """Let small requests arrive for `seconds` seconds, `count` of them at the end of each
        request.
        """
        rng = rng or random.Random(0)
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.5
            # One comes before each end as well: room is never left for the large one.
            self.end()
            for _ in range(count):
                self.come([rng.randrange(90)], rng.choice((1.0, 1.5, 2.0)))
            self.take(self.core.on_tick(Tick(self.now_s)))


def crowded(capacities: list[float], policy: str = "room") -> tuple[Crowd, int]:
    world = Crowd(capacities, policy, hold_s=1e6, hold_requests=100_000)
    for _ in range(3 * len(capacities)):
        world.come([1], 0.7)
    return world, world.come(LARGE)


def test_a_long_overtaken_request_gets_a_reserved_worker() -> None:
    world, large = crowded([ROOMY, NARROW, NARROW])
    world.crowd(PASSED_S - 1.0)
    assert large not in world.sent_s
    assert not world.core.chooser.reservations.models
    world.crowd(6.0)
    assert world.sent_to[large] == 0  # the only one that is large enough
    assert not world.core.chooser.reservations.models
    assert world.core.chooser.reservations.begun == 1


def test_other_requests_do_not_see_a_reserved_worker() -> None:
    world, large = crowded([ROOMY, NARROW])
    kept = world.core.chooser.reservations
    while not kept.models:
        world.crowd(0.5)
        assert world.now_s < PASSED_S + 5.0
    before = set(world.running)
    explained = world.core.explain(world.arrival([1]))
    if not isinstance(explained, Withheld):
        assert explained.worker.worker_id == 1
    world.crowd(0.5)
    if large not in world.sent_s:
        new = set(world.running) - before
        assert {world.sent_to[request_id] for request_id in new} <= {1}
    urgent = world.arrival([1], priority=-1)  # more important ones are ahead of it all the same
    for request_id in [r for r, (_, worker_id) in world.running.items() if worker_id == 0]:
        del world.running[request_id]
        world.core.on_failure(Failure(world.now_s, request_id, "client"))
        break
    if kept.models:
        (action,) = world.core.on_arrival(urgent)
        assert isinstance(action, Dispatch)
        assert action.worker_id == 0


def test_the_reservation_of_an_unused_idle_worker_ends() -> None:
    world, large = crowded([ROOMY, ROOMY], "nowhere")
    world.crowd(PASSED_S + 20.0)
    kept = world.core.chooser.reservations
    assert large not in world.sent_s
    assert kept.begun == 2
    assert not kept.models
    world.now_s += 5.0
    world.end()
    assert world.come([3]) in world.sent_s


@pytest.mark.parametrize("how", ["client", "worker"])
def test_a_reservation_ends_if_its_client_or_its_worker_leaves(how: str) -> None:
    world, large = crowded([ROOMY, NARROW])
    kept = world.core.chooser.reservations
    while not kept.models:
        world.crowd(0.5)
        assert world.now_s < PASSED_S + 5.0
    if how == "client":
        world.core.on_failure(Failure(world.now_s, large, "client"))
        assert not kept.models
    else:
        world.core.on_worker(WorkerChange(world.now_s, 0, "draining"))
        world.join(2, kv_capacity_tokens=ROOMY)
        charge = world.core.ledger.get(large)
        assert charge is not None
        assert charge.worker_id == 2
        assert not kept.models


def test_a_request_that_was_hardly_overtaken_reserves_no_worker() -> None:
    world, large = crowded([ROOMY])
    for request_id in list(world.running):
        world.running[request_id] = (1e6, 0)
    for _ in range(60):
        world.now_s += 1.0
        world.take(world.core.on_tick(Tick(world.now_s)))
    assert not world.core.chooser.reservations.models
    assert large not in world.sent_s


@settings(patient, max_examples=examples(12))
@given(
    capacities=st.lists(st.sampled_from((ROOMY, NARROW)), min_size=1, max_size=4).filter(
        lambda tokens: ROOMY in tokens
    ),
    large_at_s=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    count=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_every_request_is_dispatched_in_bounded_time(
    capacities: list[float], large_at_s: list[int], count: int, seed: int
) -> None:
    """Every request is dispatched in bounded time, whatever arrives meanwhile: a worker that is
    kept free is idle after its longest request.
    """
    world = Crowd(capacities, hold_s=1e6, hold_requests=100_000)
    rng = random.Random(seed)
    larges: list[int] = []
    for at_s in range(21):
        larges += [world.come(LARGE, 2.0) for when_s in large_at_s if when_s == at_s]
        world.crowd(1.0, count, rng)
    for request_id in larges:
        # Those that came before it are sent before it; two leave a roomy worker in a second.
        while not set(range(1, request_id)) <= world.sent_s.keys():
            world.crowd(1.0, count, rng)
            assert world.now_s < 200.0 + (PASSED_S + 12.0) * len(larges)
        world.crowd(PASSED_S + 12.0, count, rng)
        assert request_id in world.sent_s
        assert capacities[world.sent_to[request_id]] == ROOMY
