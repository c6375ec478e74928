"""Stored blocks whose parent has not been seen, kept until it comes or they are evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policies.facts import BlockNames, Stored

BlockName = int | bytes  # an engine's own, opaque hash of a block


def names_of(hashes: BlockNames) -> Sequence[BlockName]:
    """Names as plain ints or bytes: numpy's own numbers are slow as keys."""
    if isinstance(hashes, tuple):
        return hashes
    names: list[BlockName] = hashes.tolist()
    return names


class ParkedBlocks:
    """Orphans of one worker, at most `limit` blocks. Lifetime: worker."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: dict[BlockName, list[Stored]] = {}  # by the parent they wait for
        self._blocks = 0
        self._names: Counter[BlockName] = Counter()  # a name may be parked twice
        self._dead: set[BlockName] = set()  # parked, and evicted before their parent came

    def __len__(self) -> int:
        return self._blocks

    def __bool__(self) -> bool:
        """Whether there is anything to be asked: nearly always there is not."""
        return bool(self._events or self._dead)

    def park(self, event: Stored) -> bool:
        """Keep an event until its parent is stored; False where there is no room for it."""
        assert event.parent is not None
        if self._blocks + len(event.hashes) > self._limit:
            self._bury()
        if self._blocks + len(event.hashes) > self._limit:
            return False
        self._blocks += len(event.hashes)
        self._names.update(names_of(event.hashes))
        self._events.setdefault(event.parent, []).append(event)
        return True

    def revive(self, names: Sequence[BlockName]) -> None:
        """These blocks are stored anew: an eviction before says nothing of them any more."""
        self._dead.difference_update(names)

    def evict(self, names: Sequence[BlockName]) -> None:
        """Those of these blocks that are parked must not come to life with their parent."""
        self._dead.update(name for name in names if name in self._names)

    def wake(self, parents: Sequence[BlockName]) -> list[Stored]:
        """The events that waited for these parents; parked no longer."""
        woken = [event for parent in parents for event in self._events.pop(parent, ())]
        for event in woken:
            self._unpark(event)
        return woken

    def take_dead(self, names: Sequence[BlockName]) -> list[BlockName]:
        """Those of these blocks that were evicted while they were parked; forgotten here."""
        dead = [name for name in names if name in self._dead]
        self._dead.difference_update(dead)
        return dead

    def clear(self) -> None:
        """Nothing is parked any more."""
        self._events.clear()
        self._blocks = 0
        self._names.clear()
        self._dead.clear()

    def _bury(self) -> None:
        """Make room: park no longer what was evicted whole, for its parent may never come.

        Worth a look at everything parked only where a good part of it is dead.
        """
        if len(self._dead) * 8 < self._limit:
            return
        for parent, events in list(self._events.items()):
            kept = []
            for event in events:
                if self._dead.issuperset(names_of(event.hashes)):
                    self._unpark(event)
                else:
                    kept.append(event)
            if kept:
                self._events[parent] = kept
            else:
                del self._events[parent]
        self._dead.intersection_update(self._names)

    def _unpark(self, event: Stored) -> None:
        self._blocks -= len(event.hashes)
        for name in names_of(event.hashes):
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]
