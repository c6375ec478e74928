"""Property tests of cache copies among replicas that each subscribe to the engine: a wrong copy is
never used.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.effort import examples
from tests.router.replicas.kv_lent_world import LentReplicas, Subscriber

PREFIX = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def is_exact(one: Subscriber, all_: LentReplicas) -> bool:
    """Return whether the replica counts its cache state as exact, after checking that an exact
    state is the true one.
    """
    truth = sorted(set(all_.engine.holds.values()))
    if one.kv.exact:
        assert one.indexed() == truth
    return bool(one.kv.exact)


class LentMachine(RuleBasedStateMachine):
    """Random histories: batches are lost or late for single replicas; replicas and the engine
    restart.
    """

    @initialize()
    def start(self) -> None:
        self.all = LentReplicas(3)

    def _any_replica(self, data: st.DataObject) -> Subscriber:
        return self.all.subscribers[data.draw(st.sampled_from(sorted(self.all.subscribers)))]

    @rule(blocks=PREFIX)
    def store(self, blocks: list[int]) -> None:
        self.all.engine.store(blocks)
        self.all.publish()

    @rule(which=st.integers(0, 20))
    def remove(self, which: int) -> None:
        self.all.engine.remove(which)
        self.all.publish()

    @rule(how=st.sampled_from(["clear", "restart"]))
    def change_engine(self, how: str) -> None:
        {"clear": self.all.engine.clear, "restart": self.all.restart_engine}[how]()
        self.all.publish()

    @rule(data=st.data(), most=st.integers(1, 4))
    def receive(self, data: st.DataObject, most: int) -> None:
        self._any_replica(data).receive(most)

    @rule(data=st.data())
    def lose_batch(self, data: st.DataObject) -> None:
        """Lose one batch of a replica. The first batch of an engine's life is never lost, because
        without it the next life could continue the numbers of the last one unseen.
        """
        queue = self._any_replica(data).queue
        if queue and queue[0][0] > 0:
            queue.popleft()

    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    def flush(self, data: st.DataObject, lost: bool) -> None:
        self.all.flush(self._any_replica(data).replica, lost)

    @rule(data=st.data(), most=st.integers(0, 3))
    def deliver(self, data: st.DataObject, most: int) -> None:
        self.all.deliver(self._any_replica(data).replica, most)

    @rule(times=st.integers(1, 6))
    def exchange(self, times: int) -> None:
        """Answer all replicas that wait for a copy, while batches are still on their way."""
        for _ in range(times):
            self.all.advance(0.05)
            self.all.exchange()

    @rule(
        data=st.data(),
        restarts=st.booleans(),
        emitted=st.integers(0, 3),
        received=st.integers(0, 3),
        times=st.integers(0, 4),
    )
    def join(
        self, data: st.DataObject, restarts: bool, emitted: int, received: int, times: int
    ) -> None:
        """Replace a replica by a new one that receives few events before its peers answer it; the
        peers receive nothing of what happened meanwhile.
        """
        self.all.kill(self._any_replica(data).replica)
        if restarts:
            self.all.restart_engine()
            self.all.publish()
        one = self.all.subscribers[self.all.start().name]
        for _ in range(emitted):
            self.all.engine.emit()
        self.all.publish()
        one.receive(received)
        self.exchange(times)

    @rule(data=st.data())
    def cut_link(self, data: st.DataObject) -> None:
        self.all.cut_link(self._any_replica(data).replica)

    @rule(data=st.data())
    def restore_link(self, data: st.DataObject) -> None:
        one = self._any_replica(data)
        if not one.replica.sharing.connected:
            one.replica.sharing.joined(self.all.now_s)

    @rule(seconds=st.sampled_from([0.05, 0.6, 3.0]))
    def wait(self, seconds: float) -> None:
        self.all.advance(seconds)

    @rule()
    def settle(self) -> None:
        """Check that every replica with an exact state is right, and that it has given its state to
        all others.
        """
        self.all.settle()
        sure = [is_exact(one, self.all) for one in self.all.subscribers.values()]
        waits = [one.loan is not None for one in self.all.subscribers.values()]
        assert not any(waits)
        assert all(sure) or not any(sure)

    def teardown(self) -> None:
        if hasattr(self, "all"):
            self.settle()


TestLentMachine = LentMachine.TestCase
TestLentMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)


def test_a_new_replica_gets_the_cache_state_of_an_old_one() -> None:
    all_ = LentReplicas(1)
    (old,) = all_.subscribers.values()
    for blocks in ([1, 2, 3], [1, 4], [5]):
        all_.engine.store(blocks)
    all_.settle()
    assert old.kv.exact
    new = all_.subscribers[all_.start().name]
    all_.engine.store([6])
    all_.publish()
    all_.settle()
    assert (new.kv.exact, new.lent) == (True, 1)
    assert new.indexed() == old.indexed() == sorted(all_.engine.holds.values())


def test_a_replica_that_missed_a_batch_gets_a_copy_from_a_peer() -> None:
    all_ = LentReplicas(3)
    all_.engine.store([1, 2, 3])
    all_.settle()
    one, *others = all_.subscribers.values()
    assert all(is_exact(x, all_) for x in (one, *others))

    def copies() -> int:
        lenders = [x.replica.sharing.kv.lender for x in (one, *others)]
        return sum(lender.snapshots for lender in lenders)

    before = copies()
    all_.engine.remove(0)
    all_.publish()
    one.queue.popleft()
    all_.engine.store([7])
    all_.settle()
    assert (one.kv.exact, one.lent) == (True, 1)
    assert copies() == before + 1, "only the one that was asked"
    assert one.indexed() == sorted(all_.engine.holds.values())


def test_without_any_complete_copy_each_replica_keeps_its_own_state() -> None:
    all_ = LentReplicas(2)
    for block in range(5):
        all_.engine.store([block])
    all_.engine.unread.clear()  # before any replica listened
    all_.engine.store([6])
    all_.settle()
    for one in all_.subscribers.values():
        assert not one.kv.known
        assert not one.kv.resyncing
        assert len(one.indexed()) == 1


def test_a_copy_from_before_the_engines_restart_is_not_used() -> None:
    all_ = LentReplicas(2)
    all_.engine.store([1, 2, 3])
    all_.settle()
    old = all_.subscribers["r@2"]
    assert is_exact(old, all_)
    all_.restart_engine()
    all_.publish()
    all_.kill(all_.replicas["r@1"])
    new = all_.subscribers[all_.start().name]
    while all_.engine.number <= old.kv.next_seq:
        all_.engine.emit()
    all_.publish()
    new.receive()
    for _ in range(10):
        all_.advance(0.05)
        all_.exchange()
    assert new.lent == 0
    assert not new.kv.exact
    old.receive()
    all_.settle()
    assert is_exact(new, all_)
