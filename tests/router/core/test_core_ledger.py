"""Tests of the ledger of charged requests under any sequence of facts."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.facts import Failure, Finish, FirstToken, Progress, Tick, WorkerChange
from router.core.contract.actions import Reject
from tests.effort import examples
from tests.router.core.core_world import World


class LedgerMachine(RuleBasedStateMachine):
    """Gives the ledger random sequences of facts: its sums equal those of the open requests, and
    are zero when all have ended.
    """

    @initialize()
    def start(self) -> None:
        self.world = World(workers=3, hold_requests=4, inflight_requests=12, ejection_failures=2)
        self.open: set[int] = set()

    def _tell(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, Reject):
                self.open.discard(action.request_id)

    @rule(blocks=st.lists(st.integers(0, 3), min_size=1, max_size=6), stream=st.booleans())
    def arrive(self, blocks: list[int], stream: bool) -> None:
        arrival = self.world.arrival(blocks, stream=stream)
        self.open.add(arrival.request_id)
        self._tell(self.world.core.on_arrival(arrival))

    @rule(data=st.data(), tokens=st.integers(1, 50))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        if self.open:
            request_id = data.draw(st.sampled_from(sorted(self.open)))
            self.world.core.on_first_token(FirstToken(self.world.now_s, request_id))
            self.world.core.on_progress(Progress(self.world.now_s, request_id, tokens))

    @rule(data=st.data(), how=st.sampled_from(["finish", "client", "worker", "retry", "busy"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if not self.open:
            return
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        core, now_s = self.world.core, self.world.now_s
        if how == "finish":
            self.open.discard(request_id)
            self._tell(core.on_finish(Finish(now_s, request_id)))
            self._tell(core.on_finish(Finish(now_s, request_id)))  # told twice: released once
            return
        blame = "worker" if how == "retry" else how
        if how != "retry":
            self.open.discard(request_id)
        self._tell(core.on_failure(Failure(now_s, request_id, blame, retry=how == "retry")))

    @rule(worker_id=st.integers(0, 2), state=st.sampled_from(["down", "ready", "draining", "gone"]))
    def change(self, worker_id: int, state: str) -> None:
        self._tell(self.world.core.on_worker(WorkerChange(self.world.now_s, worker_id, state)))
        if self.world.core.workers.get(worker_id) is None:
            self.world.join(worker_id)

    @rule(elapsed_s=st.floats(0.0, 3.0))
    def wait(self, elapsed_s: float) -> None:
        self.world.now_s += elapsed_s
        self._tell(self.world.core.on_tick(Tick(self.world.now_s)))

    @invariant()
    def sums_agree(self) -> None:
        core, columns = self.world.core, self.world.core.columns
        assert core.inflight_requests == len(self.open)
        assert columns.requests.sum() == len(core.ledger)
        assert (columns.waiting >= 0).all()
        assert (columns.waiting <= columns.requests).all()
        assert (columns.context_tokens >= 0).all()
        for slot in range(len(columns.waiting)):
            charges = core.ledger.on_worker(columns.worker_id[slot])
            prompts = [c.prompt_tokens for c in charges if c.waiting and not c.room_tokens]
            assert columns.waiting_prompt_tokens[slot] == sum(prompts)
        assert (columns.drained_work <= columns.charged_work + 1e-6).all()

    def teardown(self) -> None:
        for request_id in sorted(self.open):
            self.world.core.on_failure(Failure(self.world.now_s, request_id, "client"))
        core, columns = self.world.core, self.world.core.columns
        assert core.inflight_requests == core.held_requests == len(core.ledger) == 0
        assert not columns.requests.any()
        assert not columns.waiting.any()
        assert not columns.waiting_prompt_tokens.any()
        assert not columns.context_tokens.any()
        np.testing.assert_allclose(columns.charged_work, columns.drained_work)


LedgerMachine.TestCase.settings = settings(max_examples=examples(60), deadline=None)
TestLedger = LedgerMachine.TestCase
