"""A test world of router replicas that each subscribe to an engine which never repeats an event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from kvkernels import EventBatch
from policies.facts import CacheSnapshot, KvCopied, KvEvents, ReplayEnd
from router.core.contract.actions import Resync
from router.core.core import take
from router.core.workers.kv_events import WireEvents
from router.replicas.snapshots import Loan
from tests.router.replicas.kv_fan_world import Engine
from tests.router.replicas.replica_world import Replica, Replicas

DIGESTS = 1 << 40  # of a batch: its life and its number


@dataclass
class Subscriber:
    """One replica and its event feed, which asks peers for a copy of the cache state that it lacks.
    Lifetime: test.
    """

    replica: Replica
    life: Callable[[], int]  # of the engine
    heard: int = 0
    queue: deque[tuple[int, bytes, int]] = field(default_factory=deque)  # on its way to us
    loan: Loan | None = None
    tries: int = 0  # for this question
    lent: int = 0

    def __post_init__(self) -> None:
        done = self.replica.done

        def record_resync(actions: list) -> None:
            done(actions)
            if any(isinstance(one, Resync) for one in actions):
                self.request_copy()

        self.replica.done = record_resync  # type: ignore[method-assign]

    @property
    def kv(self):
        return self.replica.world.core.workers.get(0).kv

    @property
    def now_s(self) -> float:
        return self.replica.world.now_s

    def request_copy(self) -> None:
        if self.loan is None and self.replica.sharing.connected:
            name = self.replica.world.core.workers.get(0).facts.name
            self.loan = self.replica.sharing.kv.borrower.request(name, self.on_copy)
        elif self.loan is None:
            self.on_copy(None)

    def on_copy(self, copy: CacheSnapshot | None) -> None:
        self.loan = None
        if copy is None or self.kv.exact:
            self.give_up()
        elif self.may_be_outdated(copy) or not self.kv.can_continue_from(
            copy.next_seq, copy.digest
        ):
            self.tries += 1
            if self.tries < 3:
                self.request_copy()
            else:
                self.give_up()
        else:
            self.use_copy(copy)

    def may_be_outdated(self, copy: CacheSnapshot) -> bool:
        """Return whether a copy from an earlier life of the engine could be mistaken for a current
        one. Before the first live event nothing confirms a copy, and if a restarted engine has
        reached the same event number, nothing shows the difference.
        """
        return self.heard == 0 and copy.digest // DIGESTS != self.life()

    def give_up(self) -> None:
        self.tries = 0
        self.take_fact(ReplayEnd(self.now_s, 0, answered=False))

    def use_copy(self, copy: CacheSnapshot) -> None:
        self.tries = 0
        self.lent += 1
        self.take_fact(KvCopied(self.now_s, 0, replace(copy, live_seq=copy.next_seq - 1)))

    def receive(self, most: int = 1_000) -> None:
        for _ in range(min(most, len(self.queue))):
            number, payload, digest = self.queue.popleft()
            self.heard += 1
            events = WireEvents(EventBatch(payload), "m", len(payload), payload)
            self.take_fact(KvEvents(self.now_s, 0, number, events, "live", digest))

    def take_fact(self, fact) -> None:
        self.replica.done(take(self.replica.world.core, fact))

    def indexed(self) -> list[int]:
        """Return the worker's chain hashes, after checking that the core's prefix index has exactly
        these.
        """
        core = self.replica.world.core
        slot, chains = core.workers.get(0).slot, np.unique(self.kv.chains(0))
        assert core.caches.index.contains(slot, chains, 0) == core.caches.index.held(slot, 0)
        return chains.tolist()


class LentReplicas(Replicas):
    """Several replicas and one engine. Lifetime: test."""

    def __init__(self, count: int) -> None:
        self.engine = Engine()
        self.restart_engine()
        self.subscribers: dict[str, Subscriber] = {}
        super().__init__(count, workers=1)

    def start(self) -> Replica:
        replica = super().start()
        replica.sharing.present(set(self.replicas) - {replica.name}, self.now_s)
        subscriber = self.subscribers[replica.name] = Subscriber(replica, lambda: self.engine.lives)
        subscriber.request_copy()
        return replica

    def kill(self, replica: Replica) -> None:
        super().kill(replica)
        del self.subscribers[replica.name]

    def restart_engine(self) -> None:
        """Restart the engine with an empty cache and event numbers from 0, as engines do."""
        self.engine.lives += 1
        self.engine.number = 0
        self.engine.clear()

    def publish(self) -> None:
        """Put the engine's unread events into the queue of every subscriber."""
        said, self.engine.unread = self.engine.unread, []
        for number, payload in said:
            digest = self.engine.lives * DIGESTS + number + 1
            for subscriber in self.subscribers.values():
                subscriber.queue.append((number, payload, digest))

    def exchange(self) -> None:
        for replica in self.replicas.values():
            replica.sharing.present(set(self.replicas) - {replica.name}, self.now_s)
            self.flush(replica)
        for replica in self.replicas.values():
            self.deliver(replica)

    def settle(self) -> None:
        """Connect all replicas, deliver all messages, and let the engine send one more event."""
        for replica in self.replicas.values():
            if not replica.sharing.connected:
                replica.sharing.joined(self.now_s)
        self.engine.emit()
        self.publish()
        for subscriber in self.subscribers.values():
            subscriber.receive()
        for _ in range(2):  # some replicas become exact only after others have given up
            for subscriber in self.subscribers.values():
                if not subscriber.kv.exact:
                    subscriber.request_copy()
            for _ in range(80):
                self.advance(0.2)
                self.exchange()
