"""Property tests of replicas under random histories: whatever is lost, all replicas know the same
once messages arrive again.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.effort import examples
from tests.router.replicas.replica_world import Replica, Replicas

HOW = st.sampled_from(["finish", "worker", "retry"])


class ReplicasMachine(RuleBasedStateMachine):
    """Random histories: requests come and go at any replica; messages are late, lost, repeated or
    garbage; replicas die.
    """

    @initialize()
    def start(self) -> None:
        self.all = Replicas(3)

    def _any_replica(self, data: st.DataObject) -> Replica:
        return self.all.replicas[data.draw(st.sampled_from(sorted(self.all.replicas)))]

    @rule(
        data=st.data(),
        blocks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        stream=st.booleans(),
    )
    def arrive(self, data: st.DataObject, blocks: list[int], stream: bool) -> None:
        self._any_replica(data).arrive(
            blocks, stream=stream, session=data.draw(st.sampled_from("ab"))
        )

    @rule(data=st.data(), tokens=st.integers(1, 500))
    def begin(self, data: st.DataObject, tokens: int) -> None:
        replica = self._any_replica(data)
        if replica.open:
            replica.begin(data.draw(st.sampled_from(sorted(replica.open))), tokens)

    @rule(data=st.data(), how=HOW)
    def end(self, data: st.DataObject, how: str) -> None:
        replica = self._any_replica(data)
        if replica.open:
            replica.end(data.draw(st.sampled_from(sorted(replica.open))), how)

    @rule(data=st.data(), lose=st.sampled_from([False, False, False, True]))
    def flush(self, data: st.DataObject, lose: bool) -> None:
        self.all.flush(self._any_replica(data), lose)

    @rule(data=st.data(), most=st.integers(0, 3))
    def deliver(self, data: st.DataObject, most: int) -> None:
        self.all.deliver(self._any_replica(data), most)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        for queue in self._any_replica(data).inbox.values():
            if queue:
                queue.append(queue[0])

    @rule(data=st.data(), garbage=st.binary(max_size=40))
    def garble(self, data: st.DataObject, garbage: bytes) -> None:
        replica = self._any_replica(data)
        for peer in replica.inbox:
            replica.sharing.incoming(peer, garbage, self.all.now_s)

    @rule(data=st.data())
    def cut_link(self, data: st.DataObject) -> None:
        self.all.cut_link(self._any_replica(data))

    @rule(data=st.data())
    def restore_link(self, data: st.DataObject) -> None:
        replica = self._any_replica(data)
        if not replica.sharing.connected:
            replica.sharing.joined(self.all.now_s)

    @rule(data=st.data())
    def kill_replica(self, data: st.DataObject) -> None:
        if len(self.all.replicas) > 1:
            self.all.kill(self._any_replica(data))

    @rule()
    def start_replica(self) -> None:
        if len(self.all.replicas) < 4:
            self.all.start()

    @rule(seconds=st.floats(0.01, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.all.advance(seconds)

    @rule()
    def check_settled(self) -> None:
        """Check that each replica knows every open request exactly once, and no request that has
        ended.
        """
        self.all.settle()
        self._all_know_the_same()

    def _all_know_the_same(self) -> None:
        replicas = self.all.replicas.values()
        views = {replica.name: _view(replica) for replica in replicas}
        own = {name: _own(replica) for name, replica in self.all.replicas.items()}
        total = [
            tuple(map(sum, zip(*cells, strict=True))) for cells in zip(*own.values(), strict=True)
        ]
        for name, view in views.items():
            assert view == total, (name, view, total, own)
        for replica in replicas:
            assert all(row.in_sync for row in replica.sharing.rows(self.all.now_s))

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        for replica in self.all.replicas.values():
            while replica.open:
                replica.end(next(iter(replica.open)), "finish")
        self.all.settle()
        self._all_know_the_same()
        for replica in self.all.replicas.values():
            core = replica.world.core
            assert len(core.peer_requests) == len(core.ledger) == 0
            assert not core.columns.requests.any()
            assert not core.columns.context_tokens.any()
            assert not core.columns.waiting.any()
            assert core.admission.drain.queued_tokens == 0


def _view(replica: Replica) -> list[tuple[int, int]]:
    """Return (requests, prompt tokens) charged to each worker by the replica's ledger."""
    ledger = replica.world.core.ledger
    return [_sums(ledger.on_worker(worker_id)) for worker_id in range(3)]


def _own(replica: Replica) -> list[tuple[int, int]]:
    ledger = replica.world.core.ledger
    charges = [ledger.on_worker(worker_id) for worker_id in range(3)]
    return [_sums([c for c in some if c.request_id >= 0]) for some in charges]


def _sums(charges: list) -> tuple[int, int]:
    return len(charges), sum(charge.prompt_tokens for charge in charges)


TestReplicas = ReplicasMachine.TestCase
TestReplicas.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
