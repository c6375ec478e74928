"""Token ids out of KV events: chain hashes in, by the names that engines give their blocks.

A chain hash needs the hash of the block before it, which an event names and does not tell. The
decision core finds it among the blocks that the worker holds now. Events come to a recording
earlier than that, some before their parent, so it keeps names of its own: what a name stands for
does not change when its block is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from policies.contract import Hashes
from policies.facts import KvEvent, KvEvents, Removed, Stored, WorkerChange
from router.core.apply_events import block_name, block_names, chain_of

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


@dataclass(slots=True)
class _Told:
    """What one worker's events told. Lifetime: worker."""

    chain_of: dict[int, int] = field(default_factory=dict)  # those used last stand last
    orphans: dict[int, list[_Orphan]] = field(default_factory=dict)  # by parent
    group: int = 0  # of a hybrid model's cache groups the one that counts
    full_attention: bool = False  # it was told to be one of full attention


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
        self._workers: dict[int, _Told] = {}

    def translate(self, number: int, fact: KvEvents) -> tuple[KvEvents, list[Late]]:
        """Fact number `number` with chains for tokens, and the chains of earlier ones.

        What no core takes is left out: blocks that tell too little, groups that do not count.
        """
        late: list[Late] = []
        events: list[KvEvent] = []
        told = self._workers.setdefault(fact.worker_id, _Told())
        for event in fact.events:
            if isinstance(event, Stored):
                events += self._switch_group(told, event)
                if not _counts(told, event) or not _whole(event):
                    continue
                event, found = self._stored(told, number, len(events), event)
                late += found
            elif isinstance(event, Removed):
                if not _counts(told, event):
                    continue
                event = replace(event, group=None)
            events.append(event)
        return replace(fact, events=tuple(events)), late

    def worker_changed(self, fact: WorkerChange) -> None:
        """A worker that is gone takes its names along."""
        if fact.state == "gone" and (told := self._workers.pop(fact.worker_id, None)):
            self._names -= len(told.chain_of)
            for orphans in told.orphans.values():
                self._waiting -= sum(len(orphan.stored.hashes) for orphan in orphans)

    def _switch_group(self, told: _Told, event: Stored) -> Sequence[KvEvent]:
        """The first group of full attention is the one that counts; others' blocks are gone."""
        if not event.full_attention or told.full_attention:
            return ()
        told.full_attention = True
        if (event.group or 0) == told.group:
            return ()
        told.group = event.group or 0
        held = tuple(told.chain_of)
        return [Removed(held, tier) for tier in ("gpu", "host", "disk")] if held else ()

    def _stored(
        self, told: _Told, number: int, position: int, event: Stored
    ) -> tuple[Stored, list[Late]]:
        nameless = replace(event, tokens=(), extras=(), group=None, full_attention=False)
        chain = event.chain
        if chain is None and not len(event.tokens):
            return nameless, []  # it only names blocks that are known
        if chain is None:
            seed = _seed(told, event)
            if seed is None:
                self._wait(told, _Orphan(number, position, event))
                return replace(nameless, chain=NOT_KNOWN), []
            chain = chain_of(event, seed)
        self._learn(told, event, chain)
        return replace(nameless, chain=chain), list(self._wake(told, event, chain))

    def _learn(self, told: _Told, event: Stored, chain: Hashes) -> None:
        names = told.chain_of
        before = len(names)
        for name, hash_ in zip(_names(event), chain.tolist(), strict=True):
            names.pop(name, None)
            names[name] = hash_
        self._names += len(names) - before
        while self._names > self._names_max and names:
            del names[next(iter(names))]
            self._names -= 1

    def _wait(self, told: _Told, orphan: _Orphan) -> None:
        blocks, parent = len(orphan.stored.hashes), orphan.stored.parent
        self.unresolved += blocks
        if parent is None or self._waiting + blocks > self._waiting_max:
            return
        self._waiting += blocks
        told.orphans.setdefault(block_name(parent), []).append(orphan)

    def _wake(self, told: _Told, event: Stored, chain: Hashes) -> Iterator[Late]:
        """Those that waited for a block of `event`, and those that waited for them."""
        if not told.orphans:
            return
        known = [(event, chain)]
        while known:
            parent, chain = known.pop()
            for name, seed in zip(_names(parent), chain.tolist(), strict=True):
                for orphan in told.orphans.pop(name, ()):
                    stored = orphan.stored
                    self._waiting -= len(stored.hashes)
                    self.unresolved -= len(stored.hashes)
                    known.append((stored, chain_of(stored, seed)))
                    self._learn(told, *known[-1])
                    yield Late(orphan.fact, orphan.event, known[-1][1])


def _seed(told: _Told, event: Stored) -> int | None:
    if event.parent is None:
        return event.seed
    parent = block_name(event.parent)
    seed = told.chain_of.pop(parent, None)
    if seed is not None:
        told.chain_of[parent] = seed  # used last, forgotten last
    return seed


def _names(event: Stored) -> list[int]:
    names: list[int] = block_names(event.hashes).tolist()
    return names


def _counts(told: _Told, event: Stored | Removed) -> bool:
    return event.group in (None, told.group)


def _whole(event: Stored) -> bool:
    """Whether it tells of all of its blocks what it must."""
    blocks = len(event.hashes)
    if event.chain is not None:
        return len(event.chain) == blocks
    if len(event.extras) not in (0, blocks):
        return False
    return event.block_size > 0 and len(event.tokens) in (0, blocks * event.block_size)
