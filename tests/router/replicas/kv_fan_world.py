"""A test world of router replicas and one engine whose KV events can be read only once, so that one
replica reads them for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch
from kvkernels import EventBatch
from policies.facts import KvEvents, ReplayEnd
from router.core.contract.actions import Resync
from router.core.workers.kv_events import WireEvents
from router.replicas.kv_events import ElectionClaim
from router.replicas.lease import Leases
from router.replicas.membership import Keys
from tests.router.core.core_world import BLOCK, chain_of, names_of, tokens_of
from tests.router.replicas.lease_support import LEASE_S, Server, Timers
from tests.router.replicas.replica_world import Replica, Replicas

ADDRESS = "http://engine/kv_cache_events"


@dataclass
class Engine:
    """An engine with the blocks that it holds and the events that no replica has read. Lifetime:
    test.
    """

    holds: dict[int, int] = field(default_factory=dict)  # its name of a block -> chain hash
    unread: list[tuple[int, bytes]] = field(default_factory=list)
    number: int = 0
    lives: int = 0

    def emit(self, *events: Event) -> None:
        self.unread.append((self.number, encode_batch(0.0, events)))
        self.number += 1

    def store(self, blocks: list[int]) -> None:
        names, chain = names_of(blocks), chain_of(blocks).tolist()
        after = next((n for n, name in enumerate(names) if name not in self.holds), len(names))
        if after == len(names):
            return
        self.holds.update(zip(names[after:], chain[after:], strict=True))
        tokens = tuple(tokens_of(blocks[after:]).tolist())
        parent = names[after - 1] if after else None
        self.emit(BlockStored(names[after:], parent=parent, tokens=tokens, block_size=BLOCK))

    def remove(self, which: int) -> None:
        if self.holds:
            name = sorted(self.holds)[which % len(self.holds)]
            del self.holds[name]
            self.emit(BlockRemoved((name,)))

    def clear(self) -> None:
        self.holds.clear()
        self.emit(AllBlocksCleared())

    def restart(self) -> None:
        """Restart the engine with an empty cache and lower event numbers. The new numbers never
        reach those of an earlier life, because numbers then could not show which events of both
        lives were missed.
        """
        self.lives += 1
        self.unread.clear()
        self.number = (100 - self.lives) * 1_000
        self.clear()

    def drop_oldest(self) -> None:
        """Drop the oldest unread event, as an engine does when its buffer is full."""
        del self.unread[:1]


@dataclass
class Sharer:
    """One replica, which may hold the claim to read the engine's events. Lifetime: test."""

    replica: Replica
    claim: ElectionClaim
    leases: Leases
    timers: Timers
    reads: bool = False
    gap: bool = False

    def on_claim_change(self) -> None:
        """Tell the claim that a replay is unanswered when this replica begins to read, as a new
        event feed does.
        """
        if self.claim.reads and not self.reads:
            self.claim.report_fact(ReplayEnd(self.timers.now_s, 0, answered=False))
        self.reads = self.claim.reads

    def read(self, engine: Engine) -> None:
        """Read all unread events of the engine in one poll."""
        taken, engine.unread = engine.unread, []
        for number, payload in taken:
            if not self.claim.reads:
                return  # reading ended with the first gap; later events of this poll are lost
            events = WireEvents(EventBatch(payload), "m", len(payload), payload)
            self.claim.report_fact(KvEvents(self.timers.now_s, 0, number, events, "live"))
            if self.gap:
                self.gap = False
                self.claim.report_fact(ReplayEnd(self.timers.now_s, 0, answered=False))

    def renew_lease(self, server: Server) -> None:
        asked, commands = self.leases.commands()
        replies = [server.run(command) for command in commands]
        self.leases.read_replies(asked, replies, self.timers.now_s)
        self.on_claim_change()

    @property
    def kv(self):
        return self.replica.world.core.workers.get(0).kv

    def chains(self) -> list[int]:
        return sorted(self.kv.chains(0).tolist())

    def indexed(self) -> list[int]:
        """Return the worker's chain hashes, after checking that the core's prefix index has exactly
        these.
        """
        core = self.replica.world.core
        slot, chains = core.workers.get(0).slot, np.unique(self.kv.chains(0))
        assert core.caches.index.contains(slot, chains, 0) == core.caches.index.held(slot, 0)
        return chains.tolist()


class KvReplicas(Replicas):
    """Several replicas, one engine, and a Redis stand-in that grants leases. Lifetime: test."""

    def __init__(self, count: int) -> None:
        self.engine, self.server = Engine(), Server()
        self.engine.restart()
        self.sharers: dict[str, Sharer] = {}
        super().__init__(count, workers=1)

    def start(self) -> Replica:
        replica = super().start()
        timers = Timers()
        timers.now_s = self.now_s
        leases = Leases(Keys("f"), replica.name, LEASE_S, lambda: timers.now_s, timers.call_at)
        replica.sharing.kv.set_leases(leases, LEASE_S)
        claim = replica.sharing.kv.claim(0, ADDRESS)
        sharer = self.sharers[replica.name] = Sharer(replica, claim, leases, timers)
        done = replica.done

        def record_resync(actions: list) -> None:
            done(actions)
            if any(isinstance(one, Resync) for one in actions):
                sharer.gap = claim.missing()

        replica.done = record_resync  # type: ignore[method-assign]
        replica.sharing.present(set(self.replicas) - {replica.name}, self.now_s)
        claim.open(sharer.on_claim_change)
        return replica

    def kill(self, replica: Replica) -> None:
        super().kill(replica)
        del self.sharers[replica.name]

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.server.now_s += seconds
        for sharer in list(self.sharers.values()):
            sharer.timers.pass_s(seconds)

    def update_peers(self, replica: Replica) -> None:
        """Tell a replica which peers are present, as the registry in Redis would."""
        replica.sharing.present(set(self.replicas) - {replica.name}, self.now_s)

    def settle(self) -> None:
        """Connect all replicas, deliver all messages and let the lease find a holder. The engine
        sends one more event, which shows any replica that it has missed earlier ones.
        """
        self.engine.emit()
        for sharer in self.sharers.values():
            if not sharer.replica.sharing.connected:
                sharer.renew_lease(self.server)
                sharer.replica.sharing.joined(self.now_s)
        for _ in range(24):
            self.advance(0.4)
            for sharer in self.sharers.values():
                self.update_peers(sharer.replica)
                sharer.renew_lease(self.server)
                if sharer.claim.reads:
                    sharer.read(self.engine)
            for replica in self.replicas.values():
                self.flush(replica)
            for replica in self.replicas.values():
                self.deliver(replica)
