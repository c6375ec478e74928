"""The windows and states that a model caches beside its full attention.

A hybrid model (Gemma 3, gpt-oss, Qwen3-Next) has layers that need only a part of a prompt to
continue after it: a sliding window needs the last tokens, a state-space layer one state. A prefix
can be reused only if every group has what it needs there. Windows and states are not kept
everywhere, but at *ends*: where a prompt ends, and where it was seen to depart from the cached
blocks, as in vLLM (`--prefix-cache-retention-interval 0`). Pure: no clock, no I/O.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_GROUPS = 8
MAX_WINDOW = 1 << 24
MAX_COST = 1 << 16
_FORM = re.compile(r"(?:window:(?P<window>\d{1,9})|state)(?:\*(?P<cost>\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one kind that need only a part of a prompt to continue after it. One block of such
    layers takes `cost` blocks of the pool.
    """

    kind: Literal["window", "state"]
    window: int = 0  # tokens; 0: a state
    cost: int = 1

    def __post_init__(self) -> None:
        if self.kind == "window" and not 2 <= self.window <= MAX_WINDOW:
            raise ValueError(f"a window must have 2..{MAX_WINDOW} tokens, got {self.window}")
        if not 1 <= self.cost <= MAX_COST:
            raise ValueError(f"a group's block must take 1..{MAX_COST} blocks, got {self.cost}")

    def needed(self, end: int, block_size: int) -> int:
        """Return how many blocks at the end of a prefix of `end` blocks this group needs to
        continue after it.
        """
        if self.kind == "state":
            return min(1, end)
        return min(end, -(-(self.window - 1) // block_size))

    def working(self, blocks: int, block_size: int) -> int:
        """Return how many blocks of the pool this group takes for a running request of `blocks`."""
        own = 1 if self.kind == "state" else self.needed(blocks, block_size) + 1
        return self.cost * min(own, blocks)


def parse_groups(text: str) -> tuple[CacheGroup, ...]:
    """Return the cache groups that a text describes in the form
    `window:TOKENS[*COST]+state[*COST]`; "" means no group besides full attention. Raises
    ValueError, which says what is wrong and what to write.
    """
    groups: list[CacheGroup] = []
    for part in text.split("+") if text else ():
        found = _FORM.fullmatch(part)
        if found is None:
            raise ValueError(
                f"cache groups are window:TOKENS or state, each with *COST where one of its blocks "
                f"takes several, as in window:1024*5+state; got {part!r}"
            )
        window, cost = int(found["window"] or 0), int(found["cost"] or 1)
        groups.append(CacheGroup("window" if found["window"] else "state", window, cost))
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"at most {MAX_GROUPS} cache groups beside full attention")
    return tuple(groups)


def check_room(groups: Sequence[CacheGroup], block_size: int, blocks: int) -> None:
    """Raise ValueError if a pool of `blocks` blocks has no room for anything besides the groups of
    one request.
    """
    most = sum(group.working(MAX_WINDOW, block_size) for group in groups)
    if groups and most >= blocks:
        raise ValueError(
            f"windows and states of one request take {most} blocks of {block_size} tokens, and the "
            f"cache has {blocks}"
        )


class Kept(NamedTuple):
    """One kept block of a window, or one kept state."""

    stamp: int  # of its last use, on the pool's own count
    parent_hash: int | None
    block_ids: list[int]  # `cost` blocks of the pool


Place = tuple[int, int]  # group, counted from 1 as in events, and chain hash


class GroupBlocks:
    """The window blocks and states that one pool keeps, by chain hash. Lifetime: worker.

    No request holds these blocks, because a request works on blocks of its own. The one that was
    used longest ago is evicted first, whatever its group. `blocks` counts the blocks of the pool
    that they take.
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int) -> None:
        self.groups = tuple(groups)
        self.blocks = 0
        self._block_size = block_size
        self._kept: OrderedDict[Place, Kept] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[Place, Kept]]:
        return iter(self._kept.items())

    @property
    def working_blocks(self) -> int:
        """The most blocks of the pool that one running request takes for windows and states."""
        return self.working(MAX_WINDOW)

    def working(self, blocks: int) -> int:
        """Return how many blocks of the pool all groups take for a running request of `blocks`."""
        return sum(group.working(blocks, self._block_size) for group in self.groups)

    def longest(self, chain: Sequence[int], hit: int) -> int:
        """Return the greatest number of leading blocks, at most `hit`, that all groups allow to be
        reused.
        """
        kept = self._kept
        for end in range(hit, 0, -1):
            if all((number, chain[at]) in kept for number, at in self._tail(end)):
                return end
        return 0

    def touch(self, chain: Sequence[int], end: int, stamp: int) -> list[tuple[int, int]]:
        """Mark the blocks kept for a prefix of `end` blocks as used now. Return the blocks that are
        not kept as pairs of a group and a position in the chain.
        """
        missing: list[tuple[int, int]] = []
        for number, at in self._tail(end):
            place = number, chain[at]
            kept = self._kept.get(place)
            if kept is None:
                missing.append((number, at))
            else:
                self._kept[place] = kept._replace(stamp=stamp)
                self._kept.move_to_end(place)
        return missing

    def cost(self, missing: Sequence[tuple[int, int]]) -> int:
        """Return how many blocks of the pool the missing windows and states take."""
        return sum(self.groups[number - 1].cost for number, _ in missing)

    def _tail(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield the group and position of each block that a prefix of `end` blocks needs, the last
        position first."""
        for number, group in enumerate(self.groups, 1):
            for at in range(end - 1, end - 1 - group.needed(end, self._block_size), -1):
                yield number, at

    def keep(self, place: Place, kept: Kept) -> None:
        """Record a block of a window, or a state, that was not cached before."""
        self._kept[place] = kept
        self.blocks += len(kept.block_ids)

    @property
    def oldest_stamp(self) -> int | None:
        """The stamp of the block that is evicted first; None if nothing is kept."""
        return next(iter(self._kept.values())).stamp if self._kept else None

    def pop(self) -> tuple[Place, Kept]:
        """Remove and return the block that is evicted first. Raises KeyError if there is none."""
        place, kept = self._kept.popitem(last=False)
        self.blocks -= len(kept.block_ids)
        return place, kept

    def clear(self) -> list[int]:
        """Forget all windows and states, and return the ids of the pool's blocks that they took."""
        ids = [block for kept in self._kept.values() for block in kept.block_ids]
        self._kept.clear()
        self.blocks = 0
        return ids
