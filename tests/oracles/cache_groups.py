"""The plain-Python oracle of a hybrid model's cache groups: the blocks that each group holds, and
the length of a hit that all allow.

Besides full attention, a hybrid model has layers whose cache keeps less of a prompt: a sliding
window needs the blocks of its last W tokens, and a state-space layer needs one state. vLLM keeps
each kind in a cache group of its own, and it reuses a prefix of L tokens only if every group can
continue at L.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_GROUPS = 16
MOST_HELD = 1 << 20  # blocks of all groups together


@dataclass(slots=True)
class Group:
    """A cache group: `kind` is "window" or "state", `window` counts tokens (0 for a state), and
    `held` counts the copies of each block by name.
    """

    kind: str
    window: int
    block_size: int
    held: Counter[int] = field(default_factory=Counter)


class CacheGroups:
    """One worker's groups with windows or states, by number, in the order in which they were first
    stored.

    If a group comes with another kind, window or block size, everything it held is dropped.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def store(self, number: int, group: Group, names: Sequence[int], counts_copies: bool) -> bool:
        """Store blocks in a group; return False if there was no room for all of them."""
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
        """Remove one copy of each block; unknown blocks change nothing."""
        if number in self.groups:
            held = self.groups[number].held
            for name in names:
                held.subtract([name] if name in held else [])
                if not held[name]:
                    del held[name]

    def forget(self) -> None:
        """Drop all blocks and keep the groups."""
        for group in self.groups.values():
            group.held.clear()

    def judge(self, block_size: int) -> bool:
        """Return whether at least one group can limit hits in blocks of this size."""
        return any(_needed(group) for group in self._asked(block_size))

    def _asked(self, block_size: int) -> list[Group]:
        groups = self.groups.values()
        return [g for g in groups if g.block_size and not g.block_size % block_size]

    def longest(
        self, chain: Sequence[int], blocks: int, block_size: int, names: Mapping[int, int]
    ) -> int:
        """Return the greatest number of the chain's leading blocks that every group lets the engine
        reuse.

        `blocks` is the number of them that full attention holds, and `names` gives names by chain
        hash. Every end is tried, and every block that it needs is looked up. Groups whose block
        size is no multiple of `block_size` do not count.
        """
        asked = self._asked(block_size)
        for end in range(min(blocks, len(chain)), 0, -1):
            if all(_goes_on(group, chain, end, block_size, names) for group in asked):
                return end
        return 0


def _needed(group: Group) -> int:
    """Return how many of the group's blocks a hit needs at its end."""
    return 1 if group.kind == "state" else -(-(group.window - 1) // group.block_size)


def _goes_on(
    group: Group, chain: Sequence[int], end: int, block_size: int, names: Mapping[int, int]
) -> bool:
    """Return whether the group has all that it needs to continue after the first `end` blocks."""
    step = group.block_size // block_size
    needed = _needed(group)
    if not needed:
        return True
    if end % step:
        return False
    lasts = range(end, 0, -step)[:needed]
    return all(names.get(chain[last - 1]) in group.held for last in lasts)
