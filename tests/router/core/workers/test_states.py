"""Tests of worker states: no fact leads out of the tables of states, and every row of
them is used.
"""

from __future__ import annotations

import random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Failure, Finish, FirstToken, Probed, Progress, Silence, Tick
from router.core.contract.actions import Dispatch
from router.core.workers import table
from router.core.workers.states import HEALTH_STATES, WORKER_STATES
from tests.effort import examples
from tests.router.core.core_world import WorkerChange, WorkerFacts, World
from tests.router.state_recorder import StateRecorder

WORKERS = 4
WORLDS_MAX = 200


class RandomFacts:
    """Random facts about a few workers and their requests. Lifetime: test."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(
            WORKERS, "round_robin", ejection_failures=1, ejection_max_share=1.0, panic_share=1.0
        )
        self.core = self.world.core
        self.now_s = 0.0
        self.open: list[int] = []

    def step(self) -> None:
        """Let a random time pass and give the core one more random fact."""
        self.now_s += self.rng.choice((0.0, 0.0, 0.1, 0.6, 2.5))
        self.world.now_s = self.now_s
        kind, worker_id = self.rng.random(), self.rng.randrange(WORKERS)
        if kind < 0.3:
            self.arrive()
        elif kind < 0.6:
            self.answer()
        elif kind < 0.75:
            self.core.on_tick(Tick(self.now_s))
        elif kind < 0.85:
            self.core.on_probed(Probed(self.now_s, worker_id, self.rng.random() < 0.6))
        elif kind < 0.93:
            self.core.on_silence(Silence(self.now_s, worker_id, self.rng.randrange(3)))
        else:
            state = self.rng.choice(("ready", "ready", "draining", "down", "gone"))
            facts = WorkerFacts(name=f"w{worker_id}", models=("m",), block_size=4)
            spec = facts if state != "gone" and self.rng.random() < 0.8 else None
            self.core.on_worker(WorkerChange(self.now_s, worker_id, state, spec))

    def arrive(self) -> None:
        arrival = self.world.arrival([1, 2, self.rng.randrange(9)])
        sent = [a for a in self.core.on_arrival(arrival) if isinstance(a, Dispatch)]
        self.open += [action.request_id for action in sent]

    def answer(self) -> None:
        if not self.open:
            return
        request_id, kind = self.rng.choice(self.open), self.rng.randrange(5)
        if kind < 2:
            self.core.on_first_token(FirstToken(self.now_s, request_id))
            return
        if kind == 2:
            self.core.on_progress(Progress(self.now_s, request_id, self.rng.randrange(1, 50)))
            return
        self.open.remove(request_id)
        if kind == 3:
            self.core.on_finish(Finish(self.now_s, request_id))
        else:
            self.core.on_failure(Failure(self.now_s, request_id, "worker", reason="reset"))


def play(seed: int, steps: int, health: StateRecorder, life: StateRecorder) -> None:
    facts = RandomFacts(seed)
    with patch.object(table, "HEALTH_STATES", health), patch.object(table, "WORKER_STATES", life):
        for _ in range(steps):
            facts.step()


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_no_fact_causes_a_transition_outside_the_tables(seed: int, steps: int) -> None:
    health, life = StateRecorder(HEALTH_STATES), StateRecorder(WORKER_STATES)
    play(seed, steps, health, life)
    assert health.missed == life.missed == set()


def test_every_transition_of_the_tables_is_reached() -> None:
    health, life = StateRecorder(HEALTH_STATES), StateRecorder(WORKER_STATES)
    for seed in range(WORLDS_MAX):
        play(seed, 200, health, life)
        if not health.unused and not life.unused:
            break
    assert health.unused == life.unused == set()
