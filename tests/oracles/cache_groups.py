"""The plain-Python oracle of a hybrid model's cache groups: what each holds, how long a hit may be.

A hybrid model has, beside full attention, layers whose cache keeps less of a prompt: a sliding
window needs the blocks of its last W tokens, a state-space layer one state. vLLM keeps each kind in
a cache group of its own, and a prefix of L tokens is reused only where every group can go on at L.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_GROUPS = 16
MOST_HELD = 1 << 20  # blocks of all groups together


@dataclass(slots=True)
class Group:
    """`kind` "window" or "state", `window` in tokens (0: state), `held` how often by name."""

    kind: str
    window: int
    block_size: int
    held: Counter[int] = field(default_factory=Counter)


class CacheGroups:
    """The groups of one worker with windows or states, by number, in the order of their coming.

    A group that comes with another kind, window or block size has lost what it held.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def store(self, number: int, group: Group, names: Sequence[int], counts_copies: bool) -> bool:
        """False where there was no room for all of it."""
        known = self.groups.get(number)
        if known is None and len(self.groups) == MOST_GROUPS:
            return False
        terms = group.kind, group.window, group.block_size
        if known is None or terms != (known.kind, known.window, known.block_size):
            known = self.groups[number] = group
        for name in names:
            if name in known.held:
                known.held[name] += counts_copies
            elif sum(len(one.held) for one in self.groups.values()) < MOST_HELD:
                known.held[name] = 1
            else:
                return False
        return True

    def remove(self, number: int, names: Sequence[int]) -> None:
        """One copy less of each; unknown ones change nothing."""
        if number in self.groups:
            held = self.groups[number].held
            for name in names:
                held.subtract([name] if name in held else [])
                if not held[name]:
                    del held[name]

    def forget(self) -> None:
        """Nothing is held any more; the groups are those that they were."""
        for group in self.groups.values():
            group.held.clear()

    def judge(self, block_size: int) -> bool:
        """One of them can judge hits in blocks of this size."""
        return any(_needed(group) for group in self._asked(block_size))

    def _asked(self, block_size: int) -> list[Group]:
        groups = self.groups.values()
        return [g for g in groups if g.block_size and not g.block_size % block_size]

    def longest(
        self, chain: Sequence[int], blocks: int, block_size: int, names: Mapping[int, int]
    ) -> int:
        """The greatest number of the chain's leading blocks that every group lets the engine reuse.

        `blocks`: how many of them full attention has. `names` by chain hash. Every end is tried,
        and every block that it needs looked up. A group whose block size is no multiple of
        `block_size` is not asked.
        """
        asked = self._asked(block_size)
        for end in range(min(blocks, len(chain)), 0, -1):
            if all(_goes_on(group, chain, end, block_size, names) for group in asked):
                return end
        return 0


def _needed(group: Group) -> int:
    """How many of its blocks a hit needs at its end."""
    return 1 if group.kind == "state" else -(-(group.window - 1) // group.block_size)


def _goes_on(
    group: Group, chain: Sequence[int], end: int, block_size: int, names: Mapping[int, int]
) -> bool:
    """Whether the group can go on behind the first `end` blocks."""
    step = group.block_size // block_size
    needed = _needed(group)
    if not needed:
        return True
    if end % step:
        return False
    lasts = range(end, 0, -step)[:needed]
    return all(names.get(chain[last - 1]) in group.held for last in lasts)
