"""Token ids out of KV events: chain hashes in, by the names that engines give their blocks.

A chain hash needs the hash of the block before it, which an event names and does not tell. The
decision core finds it among the blocks that the worker holds now. Events come to a recording
earlier than that, some before their parent, so it keeps names of its own: what a name stands for
does not change when its block is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvkernels import chain_hashes
from policies.contract import Hashes
from policies.facts import KvEvent, KvEvents, Stored, WorkerChange
from router.core.parked import BlockName, names_of

# The chain of blocks whose parent has not come.
NOT_KNOWN: Hashes = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Late:
    """Event number `event` of fact number `fact` has this chain. Lifetime: until written."""

    fact: int
    event: int
    chain: Hashes


@dataclass(frozen=True, slots=True)
class _Orphan:
    """Its parent was not known when it came. Lifetime: until that comes, or room is needed."""

    fact: int
    event: int
    stored: Stored


class ChainNames:
    """Names of blocks of all workers. Lifetime: recording.

    At most `names_max` are remembered, those longest without use forgotten first within a worker;
    at most `waiting_max` blocks wait for their parents.
    """

    def __init__(self, names_max: int, waiting_max: int) -> None:
        self.unresolved = 0  # stored blocks without a chain, those that may still get one too
        self._names_max = names_max
        self._waiting_max = waiting_max
        self._names = 0
        self._waiting = 0
        self._chain_of: dict[int, dict[BlockName, int]] = {}  # by worker
        self._orphans: dict[int, dict[BlockName, list[_Orphan]]] = {}  # by worker and parent

    def translate(self, number: int, fact: KvEvents) -> tuple[KvEvents, list[Late]]:
        """Fact number `number` with chains for tokens, and the chains of earlier ones."""
        late: list[Late] = []
        events: list[KvEvent] = []
        for position, event in enumerate(fact.events):
            if isinstance(event, Stored):
                event, found = self._stored(fact.worker_id, number, position, event)
                late += found
            events.append(event)
        return replace(fact, events=tuple(events)), late

    def worker_changed(self, fact: WorkerChange) -> None:
        """A worker that is gone takes its names along."""
        if fact.state == "gone":
            self._names -= len(self._chain_of.pop(fact.worker_id, ()))
            for orphans in self._orphans.pop(fact.worker_id, {}).values():
                self._waiting -= sum(len(orphan.stored.hashes) for orphan in orphans)

    def _stored(
        self, worker_id: int, number: int, position: int, event: Stored
    ) -> tuple[Stored, list[Late]]:
        if not _whole(event):  # no core takes it, with its tokens or without
            return replace(event, tokens=()), []
        chain = event.chain
        if chain is None:
            seed = self._seed(worker_id, event)
            if seed is None:
                self._wait(worker_id, _Orphan(number, position, event))
                return replace(event, tokens=(), chain=NOT_KNOWN), []
            chain = _chain(event, seed)
        self._learn(worker_id, event, chain)
        return replace(event, tokens=(), chain=chain), list(self._wake(worker_id, event, chain))

    def _seed(self, worker_id: int, event: Stored) -> int | None:
        if event.parent is None:
            return event.seed
        names = self._chain_of.get(worker_id, {})
        seed = names.pop(event.parent, None)
        if seed is not None:
            names[event.parent] = seed  # used last, forgotten last
        return seed

    def _learn(self, worker_id: int, event: Stored, chain: Hashes) -> None:
        names = self._chain_of.setdefault(worker_id, {})
        before = len(names)
        for name, hash_ in zip(names_of(event.hashes), chain.tolist(), strict=True):
            names.pop(name, None)
            names[name] = hash_
        self._names += len(names) - before
        while self._names > self._names_max and names:
            del names[next(iter(names))]
            self._names -= 1

    def _wait(self, worker_id: int, orphan: _Orphan) -> None:
        blocks, parent = len(orphan.stored.hashes), orphan.stored.parent
        self.unresolved += blocks
        if parent is None or self._waiting + blocks > self._waiting_max:
            return
        self._waiting += blocks
        self._orphans.setdefault(worker_id, {}).setdefault(parent, []).append(orphan)

    def _wake(self, worker_id: int, event: Stored, chain: Hashes) -> Iterator[Late]:
        """Those that waited for a block of `event`, and those that waited for them."""
        orphans = self._orphans.get(worker_id)
        if not orphans:
            return
        known = [(event, chain)]
        while known:
            parent, chain = known.pop()
            for name, seed in zip(names_of(parent.hashes), chain.tolist(), strict=True):
                for orphan in orphans.pop(name, ()):
                    stored = orphan.stored
                    self._waiting -= len(stored.hashes)
                    self.unresolved -= len(stored.hashes)
                    known.append((stored, _chain(stored, seed)))
                    self._learn(worker_id, *known[-1])
                    yield Late(orphan.fact, orphan.event, known[-1][1])


def _whole(event: Stored) -> bool:
    """Whether it tells of all of its blocks what it must."""
    if event.chain is not None:
        return len(event.chain) == len(event.hashes)
    blocks = len(event.hashes)
    return event.block_size > 0 and len(event.tokens) == blocks * event.block_size


def _chain(event: Stored, seed: int) -> Hashes:
    return chain_hashes(np.array(event.tokens, dtype=np.int32), event.block_size, seed)
