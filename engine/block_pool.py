"""All state of the paged KV cache: who holds which block, what is cached, what goes first.

A block is *free* (no content worth keeping), *held* (at least one reference) or *idle* (no
reference, but its content is cached under a chain hash and may be hit). A held block is
*private* until its tokens are computed, then `publish` makes it visible to later requests.

Two rules keep the prefix cache free of holes without any tree:

* whoever holds a block holds its whole prefix, so a parent is never released before its child;
* `release` makes the deepest block idle first.

Hence the idle queue, oldest first, always lists children before their parents: evicting from
its head is LRU over the leaves of the prefix tree (`idle_blocks.py`, which also knows of blocks
that are worth more than others). Residency along a chain is monotone for the same reason (a
resident block has a resident parent), so `hit` bisects instead of walking.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

import numpy as np

from engine.block_events import Changes, Cleared, PoolEvent, Removed, Stored, Tokens
from engine.idle_blocks import IdleBlocks
from engine.retention import STANDARD, Worth

__all__ = ["BlockPool", "Cleared", "PoolEvent", "Removed", "Stored"]


class BlockPool:
    """The blocks of one worker's KV cache; lifetime: worker.

    Block ids are 0..blocks-1, each of `block_size` tokens. With `record_events` every change
    of the visible contents is kept, in order, until `drain_events` takes it, and the tokens of
    visible blocks are kept for `snapshot`. One step changes each block at most twice, so more
    than `max_pending_changes` (4 x blocks + 1024) means that nobody drains: RuntimeError.
    """

    def __init__(self, blocks: int, block_size: int, *, record_events: bool = True) -> None:
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self.epoch = 0  # counts `clear`; what was computed in an earlier epoch stays private
        self.evicted_total = 0
        self._references = [0] * blocks
        self._hash: list[int | None] = [None] * blocks
        self._parent: list[int | None] = [None] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle = IdleBlocks(blocks)
        self._by_hash: dict[int, int] = {}  # in order of publication: parents before children
        self._record = record_events
        kept = blocks if record_events else 0
        self._tokens: Tokens = np.zeros((kept, block_size), dtype=np.int32)
        self._changes = Changes(4 * blocks + 1024)

    @property
    def max_pending_changes(self) -> int:
        """Changes of blocks that nobody drained before that is an error."""
        return self._changes.most

    @property
    def available_blocks(self) -> int:
        """Blocks that `allocate` could give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks held by at least one request or pin."""
        return self.blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Visible blocks, held or idle."""
        return len(self._by_hash)

    def hit(self, chain: Sequence[int], limit: int | None = None) -> int:
        """How many leading blocks of `chain` (at most `limit`) are visible. O(log n)."""
        stop = len(chain) if limit is None else min(limit, len(chain))
        by_hash = self._by_hash
        return bisect_left(range(stop), True, key=lambda depth: chain[depth] not in by_hash)

    def available_beyond(self, chain: Sequence[int], hit: int) -> int:
        """Blocks that `allocate` could still give after `acquire(chain, hit)`. O(log n)."""
        references, by_hash = self._references, self._by_hash
        # Whoever holds a block holds its prefix: the idle ones are the tail of the hit.
        held = bisect_left(
            range(hit), True, key=lambda depth: not references[by_hash[chain[depth]]]
        )
        return self.available_blocks - (hit - held)

    def acquire(
        self, chain: Sequence[int], hit: int, worths: Sequence[Worth] | None = None
    ) -> list[int]:
        """Hold the first `hit` blocks of `chain`, all visible (else KeyError); their ids.

        `worths`: what each of them is worth to who holds it; None: nothing is said.
        """
        by_hash = self._by_hash
        ids = [by_hash[chain[depth]] for depth in range(hit)]
        for block in ids:
            self._hold(block)
        if worths is not None or self._idle.has_worths:
            self._rate(ids, worths)
        return ids

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` private blocks, evicting the oldest idle ones; None if there are fewer."""
        if count > self.available_blocks:
            return None
        evictions = count - len(self._free)
        if evictions > 0:
            self._evict(evictions)
        split = len(self._free) - count
        ids = self._free[split:]
        del self._free[split:]
        for block in ids:
            self._references[block] = 1
        return ids

    def publish(
        self,
        ids: Sequence[int],
        hashes: Sequence[int],
        parent_hash: int | None,
        tokens: Tokens,
        worths: Sequence[Worth] | None = None,
    ) -> list[int]:
        """Make computed private blocks visible; returns the ids to hold from now on.

        `ids` are consecutive blocks of one chain whose earlier blocks the caller holds,
        `hashes` their chain hashes, `tokens` int32[len(ids) * block_size]. Where another block
        is already visible under the same hash, the caller's own is freed and it holds the
        visible one instead: the memory is shared, and the prefix stays held without a gap.
        `worths` are those of `acquire`.
        Raises ValueError when the parent is not visible or a block is not private.
        """
        if parent_hash is not None and parent_hash not in self._by_hash:
            raise ValueError(f"parent {parent_hash:#018x} of the published blocks is not visible")
        held = list(ids)
        parent = None if parent_hash is None else self._by_hash[parent_hash]
        fresh: list[int] = []  # positions that became visible
        for position, (block, block_hash) in enumerate(zip(ids, hashes, strict=True)):
            if self._hash[block] is not None or self._references[block] != 1:
                raise ValueError(f"block {block} is not private to one request")
            twin = self._by_hash.get(block_hash)
            if twin is None:
                self._hash[block] = block_hash
                self._parent[block] = hashes[position - 1] if position else parent_hash
                self._by_hash[block_hash] = block
                fresh.append(position)
                self._idle.show(block, parent)
            else:
                held[position] = twin
                self._references[block] = 0
                self._free.append(block)
                self._hold(twin)
            parent = held[position]
        if worths is not None or self._idle.has_worths:
            self._rate(held, worths, {held[position] for position in fresh})
        if self._record:
            self._record_stored(held, hashes, parent_hash, tokens, fresh)
        return held

    def release(self, ids: Sequence[int]) -> None:
        """Let go of one chain's blocks, given first block first."""
        references = self._references
        for block in reversed(ids):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            references[block] = left
            if not left:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._idle.add(block)

    def clear(self) -> None:
        """Forget every visible block. Held ones turn private and never become visible again."""
        for block in self._by_hash.values():
            self._hash[block] = self._parent[block] = None
        self._by_hash.clear()
        self._free.extend(self._idle)
        self._idle.clear()
        self.epoch += 1
        self._note(Cleared(), 1)

    def advance(self, now_s: float) -> None:
        """Time has come to `now_s`: what was worth something until then is as others are."""
        self._idle.advance(now_s)

    def chain_to(self, block_hash: int) -> list[int]:
        """The chain hashes from a prompt's first block to this visible one, else KeyError."""
        block = self._by_hash[block_hash]
        chain = [block_hash]
        while (parent_hash := self._parent[block]) is not None:
            chain.append(parent_hash)
            block = self._by_hash[parent_hash]
        return chain[::-1]

    def drain_events(self) -> list[PoolEvent]:
        """Hand over, in order, the changes of visible contents since the last call."""
        return self._changes.drain()

    def snapshot(self) -> list[Stored]:
        """The visible contents as events, parents before children; needs `record_events`."""
        if not self._record:
            raise ValueError("a snapshot needs a pool made with record_events=True")
        runs: list[list[int]] = []
        previous: int | None = None
        for block_hash, block in self._by_hash.items():
            if runs and self._parent[block] == previous:
                runs[-1].append(block)
            else:
                runs.append([block])
            previous = block_hash
        return [self._stored(run) for run in runs]

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once. O(blocks)."""
        free, idle = set(self._free), set(self._idle)
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free.isdisjoint(idle), "a block is free and idle"
        assert held.isdisjoint(free | idle), "a held block can be given away"
        assert len(free) + len(idle) + len(held) == self.blocks, "a block was lost"
        assert all(self._by_hash[h] == b for b, h in enumerate(self._hash) if h is not None)
        assert len(self._by_hash) == sum(h is not None for h in self._hash), "a stale hash"
        assert all(self._hash[block] is not None for block in idle), "an idle block has no content"
        parents: dict[int, int] = {}
        for block in self._by_hash.values():
            parent_hash = self._parent[block]
            if parent_hash is not None:
                assert parent_hash in self._by_hash, f"block {block} outlived its parent"
                parents[block] = self._by_hash[parent_hash]
                assert parents[block] in held or block in idle, "a block is held without its prefix"
        self._idle.check(parents)

    def _evict(self, count: int) -> None:
        gone: list[int] = []
        for _ in range(count):
            block = self._idle.pop()
            block_hash = self._hash[block]
            assert block_hash is not None
            del self._by_hash[block_hash]
            self._idle.forget(block)
            self._hash[block] = self._parent[block] = None
            self._free.append(block)
            gone.append(block_hash)
        self.evicted_total += count
        self._note(Removed(gone), count)

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            self._idle.remove(block)
        self._references[block] += 1

    def _rate(
        self, ids: Sequence[int], worths: Sequence[Worth] | None, fresh: Collection[int] = ()
    ) -> None:
        """A holder says what its blocks are worth, or by its silence that they are as others."""
        said = [STANDARD] * len(ids) if worths is None else worths
        for block, worth in zip(ids, said, strict=True):
            self._idle.rate(block, worth, block in fresh)

    def _record_stored(
        self,
        held: list[int],
        hashes: Sequence[int],
        parent_hash: int | None,
        tokens: Tokens,
        fresh: list[int],
    ) -> None:
        """Note the positions of `fresh` as runs of consecutive blocks."""
        if not fresh:
            return
        rows = np.asarray(tokens, dtype=np.int32).reshape(len(held), self.block_size)
        self._tokens[[held[position] for position in fresh]] = rows[fresh]
        first = fresh[0]
        for position, following in zip(fresh, [*fresh[1:], -1], strict=True):
            if following != position + 1:
                self._note(self._stored(held[first : position + 1]), position + 1 - first)
                first = following

    def _stored(self, run: list[int]) -> Stored:
        hashes = [block_hash for block in run if (block_hash := self._hash[block]) is not None]
        return Stored(hashes, self._parent[run[0]], self._tokens[run].reshape(-1))

    def _note(self, event: PoolEvent, changes: int) -> None:
        if self._record:
            self._changes.note(event, changes)
