"""Property tests of events that one replica reads for all: after any history all replicas know the
same blocks, which are the engine's.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.effort import examples
from tests.router.replicas.kv_fan_world import KvReplicas, Sharer

PREFIX = st.lists(st.integers(0, 2), min_size=1, max_size=4)


class KvFanMachine(RuleBasedStateMachine):
    """Random histories: the engine sends any events; messages are late, lost, repeated or garbage;
    replicas die.
    """

    @initialize()
    def start(self) -> None:
        self.all = KvReplicas(3)

    def _any_replica(self, data: st.DataObject) -> Sharer:
        return self.all.sharers[data.draw(st.sampled_from(sorted(self.all.sharers)))]

    @rule(blocks=PREFIX)
    def store(self, blocks: list[int]) -> None:
        self.all.engine.store(blocks)

    @rule(which=st.integers(0, 20))
    def remove(self, which: int) -> None:
        self.all.engine.remove(which)

    @rule(how=st.sampled_from(["clear", "restart", "drop_oldest"]))
    def change_engine(self, how: str) -> None:
        getattr(self.all.engine, how)()

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        sharer = self._any_replica(data)
        if sharer.claim.reads:
            sharer.read(self.all.engine)

    @rule(data=st.data())
    def renew_lease(self, data: st.DataObject) -> None:
        sharer = self._any_replica(data)
        if sharer.replica.sharing.connected:
            self.all.update_peers(sharer.replica)
            sharer.renew_lease(self.all.server)

    @rule()
    def redis_forgets(self) -> None:
        self.all.server.held.clear()

    @rule(data=st.data(), lose=st.sampled_from([False, False, False, True]))
    def flush(self, data: st.DataObject, lose: bool) -> None:
        self.all.flush(self._any_replica(data).replica, lose)

    @rule(data=st.data(), most=st.integers(0, 3))
    def deliver(self, data: st.DataObject, most: int) -> None:
        self.all.deliver(self._any_replica(data).replica, most)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        for queue in self._any_replica(data).replica.inbox.values():
            if queue:
                queue.append(queue[0])

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        for queue in self._any_replica(data).replica.inbox.values():
            queue.rotate(1)

    @rule(data=st.data())
    def cut_link(self, data: st.DataObject) -> None:
        self.all.cut_link(self._any_replica(data).replica)

    @rule(data=st.data())
    def restore_link(self, data: st.DataObject) -> None:
        sharer = self._any_replica(data)
        if not sharer.replica.sharing.connected:
            sharer.renew_lease(self.all.server)
            sharer.replica.sharing.joined(self.all.now_s)

    @rule(data=st.data())
    def kill_replica(self, data: st.DataObject) -> None:
        if len(self.all.replicas) > 1:
            self.all.kill(self._any_replica(data).replica)

    @rule()
    def start_replica(self) -> None:
        if len(self.all.replicas) < 4:
            self.all.start()

    @rule(seconds=st.floats(0.01, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.all.advance(seconds)

    @rule()
    def check_settled(self) -> None:
        """Check, after all messages are delivered, that one replica reads, the others follow it,
        and each replica that claims to know the cache knows it exactly.
        """
        self.all.settle()
        truth = sorted(self.all.engine.holds.values())
        sharers = self.all.sharers.values()
        assert sum(sharer.claim.reads for sharer in sharers) == 1
        (reader,) = (sharer for sharer in sharers if sharer.claim.reads)
        for sharer in sharers:
            assert sharer.claim.knows, sharer.claim.source
            assert sharer.kv.known == reader.kv.known
            assert sharer.chains() == sharer.indexed() == reader.chains()
            if sharer.kv.known:
                assert sharer.chains() == truth

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        self.check_settled()
        self.all.engine.clear()
        self.all.engine.store([0, 1, 2])
        self.check_settled()
        assert all(sharer.kv.exact for sharer in self.all.sharers.values())


TestKvFan = KvFanMachine.TestCase
TestKvFan.settings = settings(max_examples=examples(20), stateful_step_count=40, deadline=None)
