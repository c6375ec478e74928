"""Stored blocks whose parent has not been seen, kept until it comes or they are evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_PARKED_TOKENS = 1 << 24  # of one worker: 64 MiB

Name = tuple[int, int]  # an engine's name of a block, and its tier


@dataclass(slots=True)
class Run:
    """Blocks stored in a row, by their chain hashes or by what is hashed."""

    names: list[int]
    parent: int | None
    tier: int
    chain: npt.NDArray[np.uint64] | None = None
    tokens: npt.NDArray[np.int32] | None = None
    extras: tuple[bytes, ...] = ()

    @property
    def cost_tokens(self) -> int:
        """What it takes while it is parked; a chain hash counts as two tokens, and so do names."""
        size = 2 * len(self.names)
        size += 2 * len(self.chain) if self.chain is not None else 0
        size += len(self.tokens) if self.tokens is not None else 0
        return size + sum(len(extra) for extra in self.extras) // 4


class ParkedBlocks:
    """Orphans of one worker, at most `limit` blocks. Lifetime: worker."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.runs: dict[int, list[Run]] = {}  # by the parent they wait for
        self.dead: set[Name] = set()  # parked, and evicted before their parent came
        self._blocks = 0
        self._tokens = 0
        self._seen_dead = 0  # that the last burial left behind
        self._names: Counter[Name] = Counter()  # a name may be parked twice

    def __len__(self) -> int:
        return self._blocks

    def park(self, run: Run) -> bool:
        """Keep a run until its parent is stored; False where there is no room for it."""
        assert run.parent is not None
        if not self._has_room(run):
            self._bury()
        if not self._has_room(run):
            return False
        self._blocks += len(run.names)
        self._tokens += run.cost_tokens
        self._names.update((name, run.tier) for name in run.names)
        self.runs.setdefault(run.parent, []).append(run)
        return True

    def revive(self, names: Sequence[int], tier: int) -> None:
        """These blocks are stored anew: an eviction before says nothing of them any more."""
        self.dead.difference_update((name, tier) for name in names)

    def evict(self, names: Sequence[int], tier: int) -> None:
        """Those of these blocks that are parked must not come to life with their parent."""
        self.dead.update((name, tier) for name in names if (name, tier) in self._names)

    def wake(self, parents: Sequence[int]) -> list[Run]:
        """The runs that waited for these parents; parked no longer."""
        woken = [run for parent in parents for run in self.runs.pop(parent, ())]
        for run in woken:
            self._unpark(run)
        return woken

    def take_dead(self, names: Sequence[int], tier: int) -> list[int]:
        """Those of these blocks that were evicted while they were parked; forgotten here."""
        dead = [name for name in names if (name, tier) in self.dead]
        self.revive(dead, tier)
        return dead

    def clear(self) -> None:
        """Nothing is parked any more."""
        self.runs.clear()
        self.dead.clear()
        self._names.clear()
        self._blocks = self._tokens = self._seen_dead = 0

    def _has_room(self, run: Run) -> bool:
        return (
            self._blocks + len(run.names) <= self.limit
            and self._tokens + run.cost_tokens <= MAX_PARKED_TOKENS
        )

    def _bury(self) -> None:
        """Make room: park no longer what was evicted whole, for its parent may never come.

        Worth a look at everything parked only where a good part of it died since the last look.
        """
        self._seen_dead = min(self._seen_dead, len(self.dead))
        if (len(self.dead) - self._seen_dead) * 8 < self._blocks:
            return
        for parent, runs in list(self.runs.items()):
            kept = []
            for run in runs:
                if self.dead.issuperset((name, run.tier) for name in run.names):
                    self._unpark(run)
                else:
                    kept.append(run)
            if kept:
                self.runs[parent] = kept
            else:
                del self.runs[parent]
        self.dead.intersection_update(self._names)
        self._seen_dead = len(self.dead)

    def _unpark(self, run: Run) -> None:
        self._blocks -= len(run.names)
        self._tokens -= run.cost_tokens
        for name in run.names:
            self._names[name, run.tier] -= 1
            if not self._names[name, run.tier]:
                del self._names[name, run.tier]
