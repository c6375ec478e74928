"""Tests of ejection for streams that break off: a worker with few of them is never ejected, and one
with many is ejected soon.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, Probed, Tick
from router.core.contract.actions import Action, Dispatch, Ejected, Probe
from tests.effort import examples
from tests.router.core.core_world import World

Happening = Callable[[], list[Action]]


@dataclass
class Traffic:
    """Random streams on virtual time, some of which break off. Lifetime: test."""

    rng: random.Random
    shares: Mapping[int, float]  # by worker: of its streams, those that break off; others: of none
    breaks_s: float | None = None  # after the first token; None: at any moment of the stream
    workers: int = 4
    ejected: Counter[int] = field(default_factory=Counter)
    first_s: dict[int, float] = field(default_factory=dict)  # by worker: when it was ejected first
    sent: Counter[int] = field(default_factory=Counter)

    def run(self, streams: int, per_s: float, length_s: float) -> None:
        """Run `streams` streams, `per_s` of which begin each second, until the last one ends."""
        self.world = World(self.workers, policy="round_robin", stall_s=1e9, retries_per_s=1e9)
        self._coming: list[tuple[float, int, Happening]] = []
        self._order = 0
        at_s = 0.0
        for _ in range(streams):
            at_s += self.rng.expovariate(per_s)
            self._later(at_s, lambda: self._arrive(length_s))
        for tick in range(int(2 * (at_s + 2 * length_s))):
            self._later(tick / 2, lambda: self.world.core.on_tick(Tick(self.world.now_s)))
        while self._coming:
            self.world.now_s, _, happen = heappop(self._coming)
            for action in happen():
                self._note(action)

    def _later(self, at_s: float, happen: Happening) -> None:
        self._order += 1
        heappush(self._coming, (at_s, self._order, happen))

    def _note(self, action: Action) -> None:
        now_s = self.world.now_s
        if isinstance(action, Ejected):
            self.ejected[action.worker_id] += 1
            self.first_s.setdefault(action.worker_id, now_s)
        elif isinstance(action, Probe):
            answer = Probed(now_s, action.worker_id, True)
            self._later(now_s, lambda: self.world.core.on_probed(answer))

    def _arrive(self, length_s: float) -> list[Action]:
        world, rng = self.world, self.rng
        arrival = world.arrival([rng.randrange(1 << 30)])
        (*others, action) = world.core.on_arrival(arrival)
        assert isinstance(action, Dispatch)
        worker_id, request_id = action.worker_id, arrival.request_id
        self.sent[worker_id] += 1
        first_s = world.now_s + rng.uniform(0.05, 0.5)
        lasts_s = length_s * rng.uniform(0.75, 1.25)
        self._later(first_s, lambda: world.core.on_first_token(FirstToken(world.now_s, request_id)))
        if rng.random() < self.shares.get(worker_id, 0.0):
            after_s = rng.uniform(0.0, lasts_s) if self.breaks_s is None else self.breaks_s
            self._later(first_s + after_s, lambda: self._break(request_id))
        else:
            self._later(
                first_s + lasts_s, lambda: world.core.on_finish(Finish(world.now_s, request_id))
            )
        return others

    def _break(self, request_id: int) -> list[Action]:
        failure = Failure(self.world.now_s, request_id, "worker", False, "early_close")
        return self.world.core.on_failure(failure)


def same_share_at_all_workers(share: float) -> dict[int, float]:
    return dict.fromkeys(range(4), share)


FULL = pytest.mark.full
LONG_S = 32.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=FULL) for seed in range(1, 10))])
@pytest.mark.parametrize("per_s", [100.0, pytest.param(10.0, marks=FULL)])
def test_few_broken_streams_eject_no_worker(seed: int, per_s: float) -> None:
    traffic = Traffic(random.Random(seed), same_share_at_all_workers(0.02))
    traffic.run(3_000, per_s, LONG_S)
    assert traffic.ejected == {}


def test_five_broken_short_streams_of_a_hundred_eject_no_worker() -> None:
    traffic = Traffic(random.Random(1), same_share_at_all_workers(0.05))
    traffic.run(1_500, 200.0, 1.0)
    assert traffic.ejected == {}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=FULL) for seed in range(1, 10))])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("per_s", [100.0, pytest.param(4.0, marks=FULL)])
def test_only_the_worker_that_breaks_many_streams_is_ejected(
    seed: int, share: float, per_s: float
) -> None:
    traffic = Traffic(random.Random(seed), same_share_at_all_workers(0.02) | {2: share})
    traffic.run(3_000, per_s, LONG_S)
    assert set(traffic.ejected) == {2}


def test_a_client_disconnect_does_not_undo_the_success_of_its_first_token() -> None:
    world = World(2, policy="round_robin")

    def sent(begins: bool) -> int:
        while True:
            arrival = world.arrival([1])
            (action,) = world.core.on_arrival(arrival)
            assert isinstance(action, Dispatch)
            if action.worker_id == 0:
                if begins:
                    world.core.on_first_token(FirstToken(world.now_s, arrival.request_id))
                return arrival.request_id
            world.core.on_finish(Finish(world.now_s, arrival.request_id))

    def fail() -> list[Action]:
        failure = Failure(world.now_s, sent(begins=False), "worker", False, "status_5xx")
        return world.core.on_failure(failure)

    assert [fail(), fail()] == [[], []]
    running = sent(begins=True)
    assert world.core.workers.get(0).health.failures == 0
    world.core.on_failure(Failure(world.now_s, running, "client", False, "left"))
    assert world.core.workers.get(0).health.failures == 0
    assert [fail(), fail()] == [[], []]
    assert [type(action) for action in fail()] == [Ejected]


@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    per_s=st.sampled_from([2.0, 20.0, 100.0]),
    breaks_s=st.sampled_from([0.0, 0.01, 1.0, 5.0]),
)
def test_a_worker_that_breaks_every_stream_is_ejected_after_a_few(
    seed: int, per_s: float, breaks_s: float
) -> None:
    """A worker whose streams all break off is ejected after nine of them, however many others have
    begun meanwhile.
    """
    traffic = Traffic(random.Random(seed), {1: 1.0}, breaks_s)
    traffic.run(int(per_s * 2 * (breaks_s + 1)) + 64, per_s, 32.0)
    assert set(traffic.ejected) == {1}
    # Chance alone brings it fewer than four of ten for long; each takes half a second to begin.
    assert traffic.sent[1] >= 4
    assert traffic.first_s[1] <= (breaks_s + 1.0) + 4 * 24 / per_s
