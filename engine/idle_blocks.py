"""Which idle block goes first: the least worth, then the longest idle, children before parents.

While no request says what its blocks are worth, this is one queue, oldest first: whoever holds a
block holds its prefix and lets it go deepest block first, so the queue lists every child before
its parent. A block to which a worth was given, and all before it in its chain, are *marked* and
stand beside the queue in a heap of leaves: a parent comes into it when its last child is gone, and
so outlives whatever of its children is worth most. What is in the queue has no marked descendants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from engine.retention import DEFAULT_PRIORITY, STANDARD, Worth

_Entry = tuple[float, int, int]  # what it is sorted by, stamp, block
_SPARE = 64  # entries of a heap beyond twice the marked blocks before it is swept


class IdleBlocks:
    """The idle blocks of one pool in the order of their eviction; lifetime: worker."""

    def __init__(self, blocks: int) -> None:
        self.now_s = 0.0
        self._parent: list[int | None] = [None] * blocks  # of visible blocks
        self._children = [0] * blocks  # visible blocks right after each
        self._plain: OrderedDict[int, int] = OrderedDict()  # stamp by block, oldest first
        self._kept: dict[int, int] = {}  # stamp by marked block that is idle
        self._worth: dict[int, Worth] = {}  # of visible blocks that are not STANDARD
        self._marked: set[int] = set()  # visible blocks, held ones too
        self._leaves: list[_Entry] = []  # by priority; some outdated
        self._ends: list[_Entry] = []  # by the time when a worth ends; some outdated
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._kept)

    def __contains__(self, block: int) -> bool:
        return block in self._plain or block in self._kept

    def __iter__(self) -> Iterator[int]:
        yield from self._plain
        yield from self._kept

    @property
    def has_worths(self) -> bool:
        """Some visible block is worth more or less than others."""
        return bool(self._worth)

    def worth(self, block: int) -> Worth:
        """Of a visible block."""
        return self._worth.get(block, STANDARD)

    def show(self, block: int, parent: int | None) -> None:
        """`block` became visible; `parent` is the one before it in its chain."""
        self._parent[block] = parent
        if parent is not None:
            self._children[parent] += 1

    def rate(self, block: int, worth: Worth, is_fresh: bool) -> None:
        """A request that holds visible `block` says what it is worth.

        A fresh block is worth that; one that others used, too, what the more demanding said.
        """
        best = worth if is_fresh else max(worth, self.worth(block))
        if best == STANDARD:
            self._worth.pop(block, None)
            return
        self._worth[block] = best
        at: int | None = block
        while at is not None and at not in self._marked:
            self._marked.add(at)
            at = self._parent[at]

    def add(self, block: int) -> None:
        """Nobody holds `block` any more; those after it in its chain were added before."""
        self._stamp += 1
        if block not in self._marked:
            self._plain[block] = self._stamp
            return
        self._kept[block] = self._stamp
        self._offer(block)
        duration_s = self.worth(block).duration_s
        if duration_s != STANDARD.duration_s:
            self._push(self._ends, (self.now_s + duration_s, self._stamp, block))

    def remove(self, block: int) -> None:
        """Somebody holds `block` again. Raises KeyError for one that is not idle."""
        if self._plain.pop(block, None) is None:
            del self._kept[block]

    def pop(self) -> int:
        """Take out the one that goes first. Raises KeyError where none is idle."""
        leaf = self._first_leaf() if self._kept else None
        if leaf is None or (self._plain and self._head() < leaf):
            block, _ = self._plain.popitem(last=False)
            return block
        heappop(self._leaves)
        block = leaf[2]
        del self._kept[block]
        return block

    def forget(self, block: int) -> None:
        """`block` is not visible any more, and has no children."""
        self._worth.pop(block, None)
        self._marked.discard(block)
        parent = self._parent[block]
        if parent is not None:
            self._parent[block] = None
            self._children[parent] -= 1
            if parent in self._kept:
                self._offer(parent)

    def clear(self) -> None:
        """No block is idle nor visible."""
        for part in (self._plain, self._kept, self._worth, self._marked):
            part.clear()
        self._leaves.clear()
        self._ends.clear()
        self._children = [0] * len(self._children)
        self._parent = [None] * len(self._parent)

    def advance(self, now_s: float) -> None:
        """Time has come to `now_s`: what was worth something until then is as others are."""
        self.now_s = max(now_s, self.now_s)
        while self._ends and self._ends[0][0] <= now_s:
            _, stamp, block = heappop(self._ends)
            if self._kept.get(block) == stamp:
                del self._worth[block]
                self._offer(block)

    def check(self, parents: dict[int, int]) -> None:
        """Raise AssertionError unless the order holds; `parents`: block to block, visible ones."""
        counted = [0] * len(self._children)
        for block, parent in parents.items():
            assert self._parent[block] == parent, "a block has another parent"
            counted[parent] += 1
            assert block not in self._marked or parent in self._marked, "a mark ends in a chain"
            if block in self._plain and parent in self._plain:
                assert self._plain[block] < self._plain[parent], "a parent would go first"
        assert counted == self._children, "children are counted wrongly"
        assert self._marked.isdisjoint(self._plain), "a marked block stands in the queue"
        assert self._marked.issuperset(self._kept), "a block without a mark stands in the heap"
        assert self._marked.issuperset(self._worth), "a block with a worth has no mark"
        offered = {entry for entry in self._leaves if self._is_current(entry)}
        leaves = {block for block in self._kept if not counted[block]}
        assert {block for _, _, block in offered} == leaves, "a leaf was lost"

    def _offer(self, block: int) -> None:
        if not self._children[block]:
            self._push(self._leaves, (self.worth(block).priority, self._kept[block], block))

    def _first_leaf(self) -> _Entry | None:
        leaves = self._leaves
        while leaves and not self._is_current(leaves[0]):
            heappop(leaves)
        return leaves[0] if leaves else None

    def _is_current(self, entry: _Entry) -> bool:
        priority, stamp, block = entry
        return self._kept.get(block) == stamp and self.worth(block).priority == priority

    def _head(self) -> _Entry:
        block, stamp = next(iter(self._plain.items()))
        return DEFAULT_PRIORITY, stamp, block

    def _push(self, heap: list[_Entry], entry: _Entry) -> None:
        """Outdated entries go before they are more than those that count."""
        if len(heap) > 2 * len(self._kept) + _SPARE:
            heap[:] = [one for one in heap if self._kept.get(one[2]) == one[1]]
            heapify(heap)
        heappush(heap, entry)
