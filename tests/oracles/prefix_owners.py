"""The plain-Python oracle of the native `PrefixOwners`, which knows which blocks several owners
use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.oracles.index import _buffer, _integer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SHARED = -1
_ONCE, _AGAIN = 0, 3  # passes of the clock's hand that a block survives
_LOOKS, _LOOKS_EACH = 16384, 64  # steps of the hand for one claim, and more for each of its blocks
_PIVOTS = 8
_ENTRIES_MAX = 1 << 28
_OWNER_MAX = (1 << 61) - 1


class PrefixOwners:
    """Remembers which blocks one owner uses and which several owners use. Lifetime: process.

    An owner is anything that claims chains: a session, a tenant. An owner that uses a block also
    uses those before it. So along a chain the blocks that several use come first, then those of one
    owner, then unknown ones. Both borders are found by bisection, so a claim of a conversation's
    next turn visits only its new blocks.

    At most `max_entries` blocks are known. A clock with counters (GCLOCK: A. Smith, "Sequentiality
    and Prefetching in Database Systems", 1978) makes room: a block that was claimed once goes when
    the clock's hand comes by, and one that was claimed again survives three passes. A claim warms
    all blocks of its chain again if the hand has come by.

    While nothing has been evicted, every answer is exact. After that, "used by" means "as far as is
    remembered": a block that left from the middle of a chain can make `shared` and `owner` report
    less than the truth, never more. The next claim of the chain fills the holes that it meets.

    Hashes are C-contiguous 1-D buffers of uint64. Methods raise TypeError for anything else and
    ValueError for values out of range. Any thread may call; the native class releases the GIL.
    """

    def __init__(self, max_entries: int = 1 << 20) -> None:
        max_entries = _integer(max_entries, "max_entries")
        if not 1 <= max_entries <= _ENTRIES_MAX:
            raise ValueError(f"max_entries must be 1..{_ENTRIES_MAX}, got {max_entries}")
        self.max_entries = max_entries
        self.evicted = 0
        self._users: dict[int, int] = {}  # block -> its owner, or _SHARED
        self._warmth: dict[int, int] = {}
        self._clock: list[int] = []  # blocks by place; a new one takes an evicted one's place
        self._hand = 0
        self._looks = 1  # steps that the hand may still take in this claim

    def claim(self, chain: Buffer, owner: int) -> int:
        """Mark the chain as used by `owner`, 0..2^61-1; return how many leading blocks several
        owners use, this claim included.
        """
        blocks: list[int] = _buffer(chain, "chain", "uint64").tolist()
        owner = _integer(owner, "owner")
        if not 0 <= owner <= _OWNER_MAX:
            raise ValueError(f"owner must be 0..{_OWNER_MAX}, got {owner}")
        shared, known = self._ends(blocks)
        of_other = shared < known and self._users[blocks[known - 1]] != owner
        tail_cooled = shared < known and self._cooled(blocks[shared])
        head_cooled = shared > 0 and self._cooled(blocks[shared - 1])
        self._looks = _LOOKS + _LOOKS_EACH * len(blocks)
        users, end = self._settle(blocks, known, len(blocks), owner)
        if of_other or tail_cooled or users != owner:
            end = max(end, self._settle(blocks, shared, known, users)[1])
        if head_cooled:
            self._settle(blocks, 0, shared, _SHARED)
        return max(shared, end)

    def shared(self, chain: Buffer) -> int:
        """Return how many leading blocks two or more owners have claimed."""
        return self._ends(_buffer(chain, "chain", "uint64").tolist())[0]

    def owner(self, chain: Buffer) -> tuple[int, int]:
        """Return (owner of the deepest known block, its depth in blocks).

        The owner is -1 if several use that block, and if no block is known; then the depth is 0.
        """
        blocks: list[int] = _buffer(chain, "chain", "uint64").tolist()
        known = self._ends(blocks)[1]
        return (self._users[blocks[known - 1]], known) if known else (_SHARED, 0)

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._users)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the native class, which takes all of them when it is made."""
        return self.max_entries * (16 + 2 * 8)

    def _ends(self, blocks: list[int]) -> tuple[int, int]:
        """Return (end of the blocks that several use, end of the known blocks)."""
        known = _first_without(blocks, len(blocks), lambda block: block in self._users)
        shared = _first_without(blocks, known, lambda block: self._users.get(block) == _SHARED)
        return shared, known

    def _cooled(self, block: int) -> bool:
        return self._warmth.get(block, 0) < _AGAIN

    def _settle(self, blocks: list[int], first: int, end: int, users: int) -> tuple[int, int]:
        """Claim the blocks from the last to the first; towards the first block, the number of users
        can only grow.

        Returns (users of the first block, end of the blocks that several use).
        """
        shared = 0
        for i in range(end - 1, first - 1, -1):
            block = blocks[i]
            if self._users.get(block, users) != users:
                users = _SHARED
            if users == _SHARED:
                shared = max(shared, i + 1)
            if block in self._users:
                self._warmth[block] = _AGAIN
            else:
                self._make_room(block)
                self._warmth[block] = _ONCE
            self._users[block] = users
        return users, shared

    def _make_room(self, block: int) -> None:
        """Give the new block a place on the clock, which is the coldest block's place if no other
        is left.
        """
        if len(self._clock) < self.max_entries:
            self._clock.append(block)
            return
        victim, least = self._hand, _AGAIN + 1
        while True:
            seen = self._clock[self._hand]
            warmth = self._warmth[seen]
            if warmth < least:
                victim, least = self._hand, warmth
            self._hand = (self._hand + 1) % self.max_entries
            if not warmth:
                break
            self._warmth[seen] -= 1
            self._looks -= 1
            if not self._looks:
                self._looks = 1
                break
        gone = self._clock[victim]
        del self._users[gone], self._warmth[gone]
        self._clock[victim] = block
        self.evicted += 1


def _first_without(blocks: list[int], end: int, holds: Callable[[int], bool]) -> int:
    """Return the end of the leading blocks for which `holds` is true, by bisection; it must be
    false for all blocks behind them.
    """
    first = 0
    while first < end:
        for at in range(first, end, -(-(end - first) // _PIVOTS)):
            if not holds(blocks[at]):
                end = at
                break
            first = at + 1
    return end
