"""Tests of ejecting and reinstating workers, against a plain model of the rules."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.facts import Failure, Finish, Probed, Tick, WorkerChange
from router.core.contract.actions import Action, Dispatch, Ejected, Probe, Reinstated
from tests.effort import examples
from tests.router.core.core_world import World

RECOVER_S = 2.0
WINDOW_S = 5.0
RULES = {
    "ejection_failures": 3,
    "ejection_requests": 6,
    "ejection_rate": 0.5,
    "ejection_window_s": WINDOW_S,
    "ejection_max_share": 0.5,
    "recover_s": RECOVER_S,
    "retries_per_s": 1e9,
    "max_attempts": 1,
}


class ModelWorker:
    """One worker in the plain model of the rules. Lifetime: test."""

    def __init__(self) -> None:
        self.state = "ready"
        self.health = "healthy"
        self.row: list[bool] = []  # what came of its requests since it was last taken in
        self.recent: list[tuple[float, bool]] = []
        self.ejections = 0
        self.since_s = -1.0
        self.until_s = -1.0
        self.trial: int | None = None

    def reset(self) -> None:
        self.health, self.ejections, self.trial = "healthy", 0, None
        self.row, self.recent = [], []

    def bad_enough(self, now_s: float) -> bool:
        if self.row[-3:] == [False] * 3:
            return True
        oldest = now_s // (WINDOW_S / 10) - 9
        recent = [well for at_s, well in self.recent if at_s // (WINDOW_S / 10) >= oldest]
        return len(recent) >= 6 and recent.count(False) >= 0.5 * len(recent)


class Breakers(RuleBasedStateMachine):
    """Random histories of four workers, with random outcomes of requests and probes."""

    @initialize()
    def start(self) -> None:
        self.world = World(4, policy="round_robin", **RULES)
        self.model = {worker_id: ModelWorker() for worker_id in range(4)}
        self.at: dict[int, tuple[int, float]] = {}  # request -> (worker, when it was sent)
        self.probed: set[int] = set()
        self.withheld = 0

    @rule(times=st.integers(1, 8))
    def arrive(self, times: int) -> None:
        for _ in range(times):
            self.arrive_one()

    def arrive_one(self) -> None:
        arrival = self.world.arrival([1])
        (action,) = self.world.core.on_arrival(arrival)
        able = [i for i, one in self.model.items() if one.state == "ready"]
        free = [i for i in able if self.takes(i)]
        if not able:
            assert not isinstance(action, Dispatch)
            return
        assert isinstance(action, Dispatch)
        assert action.worker_id in (free or able)
        model = self.model[action.worker_id]
        if model.health == "trial" and model.trial is None:
            model.trial = arrival.request_id
        self.at[arrival.request_id] = (action.worker_id, self.world.now_s)

    @rule(
        which=st.integers(0, 30),
        how=st.sampled_from(["well", "bad", "bad", "bad", "refused", "busy", "left"]),
    )
    def end(self, which: int, how: str) -> None:
        if not self.at:
            return
        request_id = sorted(self.at)[which % len(self.at)]
        worker_id, sent_s = self.at.pop(request_id)
        model, now_s = self.model[worker_id], self.world.now_s
        if model.trial == request_id:
            model.trial = None
        if how in ("well", "refused"):
            fact = Finish(now_s, request_id, refused=how == "refused")
            actions = self.world.core.on_finish(fact)
        else:
            blame = {"bad": "worker", "busy": "busy", "left": "client"}[how]
            failure = Failure(now_s, request_id, blame, False, "status_5xx")
            actions = self.world.core.on_failure(failure)
        expected: list[Action] = []
        if how == "well":
            expected = self.answered(worker_id, sent_s)
        elif how == "bad":
            expected = self.failed(worker_id, sent_s)
        assert actions == expected

    @rule(worker_id=st.integers(0, 3))
    def fail_three(self, worker_id: int) -> None:
        """Let the newest three requests of one worker fail; its older ones continue."""
        there = [r for r, (at, _) in sorted(self.at.items()) if at == worker_id]
        for request_id in there[-3:]:
            self.end(sorted(self.at).index(request_id), "bad")

    @rule(worker_id=st.integers(0, 3))
    def bring_to_trial(self, worker_id: int) -> None:
        """Let the worker's ejection end, and let it answer the probe that follows."""
        if self.model[worker_id].health == "ejected" and self.model[worker_id].state == "ready":
            self.wait(max(self.model[worker_id].until_s - self.world.now_s, 0.0))
            while worker_id in self.probed:
                self.answer(True)

    def answered(self, worker_id: int, sent_s: float) -> list[Action]:
        model, now_s = self.model[worker_id], self.world.now_s
        if model.health == "healthy":
            model.row.append(True)
            model.recent.append((now_s, True))
            if now_s >= model.until_s:
                model.ejections = 0
            return []
        return [] if sent_s < model.since_s else [self.reinstated(worker_id)]

    def reinstated(self, worker_id: int) -> Reinstated:
        model = self.model[worker_id]
        ejections = model.ejections
        model.reset()
        model.ejections, model.until_s = ejections, self.world.now_s + WINDOW_S
        return Reinstated(worker_id)

    def failed(self, worker_id: int, sent_s: float) -> list[Action]:
        model, now_s = self.model[worker_id], self.world.now_s
        if model.health == "trial" and sent_s >= model.since_s:
            return [self.ejected(worker_id, "status_5xx")]
        if model.health != "healthy":
            return []
        model.row.append(False)
        model.recent.append((now_s, False))
        if not model.bad_enough(now_s):
            return []
        ready = [i for i, one in self.model.items() if one.state == "ready"]
        away = sum(self.model[i].health != "healthy" for i in ready if i != worker_id)
        if away + 1 > max(int(0.5 * len(ready)), 1) or away + 1 >= len(ready):
            self.withheld += 1
            return []
        return [self.ejected(worker_id, "status_5xx")]

    def ejected(self, worker_id: int, cause: str) -> Ejected:
        model, now_s = self.model[worker_id], self.world.now_s
        for_s = RECOVER_S * min(2**model.ejections, 16)
        ejections = model.ejections + 1
        model.reset()
        model.health, model.ejections = "ejected", ejections
        model.since_s, model.until_s = now_s, now_s + for_s
        return Ejected(worker_id, for_s, cause)

    def takes(self, worker_id: int) -> bool:
        model = self.model[worker_id]
        return model.health == "healthy" or (model.health == "trial" and model.trial is None)

    @rule(elapsed_s=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0]))
    def wait(self, elapsed_s: float) -> None:
        self.world.now_s += elapsed_s
        now_s = self.world.now_s
        expected: list[Action] = []
        for worker_id, model in self.model.items():
            if model.state != "ready" or now_s < model.until_s:
                continue
            if model.health == "trial" and model.trial is None:
                expected.append(self.reinstated(worker_id))
            elif model.health in ("ejected", "probed"):
                model.health, model.until_s = "probed", now_s + 5.0
                self.probed.add(worker_id)
                expected.append(Probe(worker_id))
        assert self.world.core.on_tick(Tick(now_s)) == expected

    @rule(well=st.booleans())
    def answer(self, well: bool) -> None:
        """Let a worker answer a probe, perhaps late, when its state has already changed."""
        if not self.probed:
            return
        worker_id = min(self.probed)
        self.probed.discard(worker_id)
        model = self.model[worker_id]
        expected: list[Action] = []
        if model.state == "ready" and model.health == "probed":
            if well:
                model.health, model.until_s = "trial", self.world.now_s + RECOVER_S
            else:
                expected.append(self.ejected(worker_id, "probe"))
        probed = Probed(self.world.now_s, worker_id, well)
        assert self.world.core.on_probed(probed) == expected

    @rule(worker_id=st.integers(0, 3), state=st.sampled_from(["ready", "ready", "down"]))
    def change(self, worker_id: int, state: str) -> None:
        self.world.core.on_worker(WorkerChange(self.world.now_s, worker_id, state))
        model = self.model[worker_id]
        if model.state == "down" and state == "ready":
            model.reset()
        model.state = state

    @invariant()
    def the_core_agrees_with_the_model(self) -> None:
        for worker_id, model in self.model.items():
            worker = self.world.core.workers.get(worker_id)
            assert worker.health.state == model.health
            assert worker.health.trial == model.trial
            assert worker.takes_requests == (model.state == "ready" and self.takes(worker_id))
        assert self.world.core.counters.ejections_withheld == self.withheld

    def teardown(self) -> None:
        for request_id in list(self.at):
            self.world.core.on_failure(Failure(self.world.now_s, request_id, "client"))
        assert self.world.core.inflight_requests == len(self.world.core.ledger) == 0


TestBreakers = Breakers.TestCase
TestBreakers.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
