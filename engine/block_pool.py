"""The blocks of the paged KV cache: which are held, which are cached, and which is evicted first.

A block is *free* (no content worth keeping), *held* (at least one reference) or *idle* (no
reference, but its content is cached under a chain hash). Evicted blocks may be kept in host memory,
as a lower tier. Pure: no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from math import inf
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.cache_groups import CacheGroup, GroupBlocks, Kept, check_room

MAX_PRIORITY = 100
DEFAULT_PRIORITY = 35
MAX_RANGES = 64
MAX_DURATION_MS = 2_592_000_000  # thirty days


class BlockRetention(NamedTuple):
    """The priority with which the pool keeps a cached block, and the time for which it counts.
    If two requests share the block, the pool takes the larger tuple.
    """

    priority: int  # 0..100; the lowest goes first
    duration_s: float = inf  # of lying idle, after which it is worth as much as others


DEFAULT_RETENTION = BlockRetention(DEFAULT_PRIORITY)


class InvalidRetention(ValueError):  # noqa: N818 - an answer to a client
    """Raised for an invalid retention config; the text names the field."""


def _block_retention(priority: int, duration_ms: float | None, where: str) -> BlockRetention:
    """Return the worth of a block with this priority for this duration. `where` names the field in
    the text of an error. Raises InvalidRetention if a value is out of range.
    """
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRetention(f"{where} must be 0..{MAX_PRIORITY}, got {priority}")
    if duration_ms is None:
        return BlockRetention(priority)
    if not 0 <= duration_ms <= MAX_DURATION_MS:
        raise InvalidRetention(
            f"duration_ms beside {where} must be 0..{MAX_DURATION_MS}, got {duration_ms}"
        )
    # A default that ends is a default that stays.
    return (
        DEFAULT_RETENTION
        if priority == DEFAULT_PRIORITY
        else BlockRetention(priority, duration_ms / 1e3)
    )


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A range of a prompt's tokens, from `start` on and before `end` (None: to the prompt's end),
    whose blocks get a worth. Lifetime: request.
    """

    start: int
    end: int | None
    retention: BlockRetention

    @classmethod
    def of(
        cls, start: int, end: int | None, priority: int, duration_ms: float | None
    ) -> TokenRange:
        """Return a range of tokens after checking its values. Raises InvalidRetention if a value is
        invalid.
        """
        if start < 0 or (end is not None and end <= start):
            raise InvalidRetention(
                f"token_start must be 0 or more and below token_end, got {start} and {end}"
            )
        return cls(start, end, _block_retention(priority, duration_ms, "priority"))


@dataclass(frozen=True, slots=True)
class Retention:
    """The worths that a request gives to its blocks: those of its prompt by `ranges`, and those of
    its answer by `decode`. `ranges` are in order, without overlap. Lifetime: request.
    """

    ranges: tuple[TokenRange, ...] = ()
    decode: BlockRetention = DEFAULT_RETENTION

    @classmethod
    def of(
        cls,
        ranges: list[TokenRange],
        decode_priority: int = DEFAULT_PRIORITY,
        decode_duration_ms: float | None = None,
    ) -> Retention:
        """Return a retention after checking its values. Raises InvalidRetention for ranges that
        overlap, too many ranges, or a priority out of range.
        """
        if len(ranges) > MAX_RANGES:
            raise InvalidRetention(f"{len(ranges)} token ranges; at most {MAX_RANGES}")
        ordered = sorted(ranges, key=lambda one: one.start)
        for one, following in pairwise(ordered):
            if one.end is None or one.end > following.start:
                raise InvalidRetention(
                    f"token ranges overlap: one ends at {one.end or 'the end of the prompt'}, "
                    f"another starts at {following.start}"
                )
        decode = _block_retention(decode_priority, decode_duration_ms, "decode_retention_priority")
        return cls(tuple(ordered), decode)

    def block_retentions(
        self, start: int, stop: int, block_size: int, prompt_tokens: int
    ) -> list[BlockRetention]:
        """Return the worth of each block of a request from number `start` on and before `stop`."""
        return [self._of_token(at * block_size, prompt_tokens) for at in range(start, stop)]

    def _of_token(self, token: int, prompt_tokens: int) -> BlockRetention:
        if token >= prompt_tokens:
            return self.decode
        for one in self.ranges:
            if one.start <= token and (one.end is None or token < one.end):
                return one.retention
        return DEFAULT_RETENTION


Tokens = npt.NDArray[np.int32]


PoolTier = Literal["gpu", "host"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Event: consecutive blocks became visible to requests.

    `tokens` is int32[len(block_hashes) * block_size]. Blocks that are stored in host memory while
    the GPU still has them come without tokens, and need not be consecutive. `group` is 0 for full
    attention and counts up from 1 for the model's other cache groups; None if the model has only
    one group.
    """

    block_hashes: list[int]
    parent_hash: int | None  # chain hash before the first block; None at the start of a prompt
    tokens: Tokens
    tier: PoolTier = "gpu"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Event: blocks were evicted from a tier, in this order (children before parents)."""

    block_hashes: list[int]
    tier: PoolTier = "gpu"
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Event: the cache was cleared, and no block that was computed so far is visible any more."""


PoolEvent = Stored | Removed | Cleared


class Changes:
    """Collects events until they are taken by `drain`; lifetime: worker. Raises RuntimeError once
    more than `most` changed blocks wait, because then nobody takes them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._events: list[PoolEvent] = []
        self._pending = 0

    def note(self, event: PoolEvent, changes: int) -> None:
        """Add an event about `changes` blocks."""
        self._pending += changes
        if self._pending > self.most:
            raise RuntimeError(
                f"{self._pending} block changes were never drained: call drain_events() "
                "after each step, or make the pool with record_events=False"
            )
        self._events.append(event)

    def drain(self) -> list[PoolEvent]:
        """Return all events since the last call, in order."""
        events, self._events = self._events, []
        self._pending = 0
        return events


_Entry = tuple[float, int, int]  # sort key, stamp, block
_SPARE = 64  # entries of a heap beyond twice the marked blocks before it is swept


class IdleBlocks:
    """The idle blocks of one pool in the order of their eviction; lifetime: worker."""

    def __init__(self, blocks: int) -> None:
        self.now_s = 0.0
        self._parent: list[int | None] = [None] * blocks  # of visible blocks
        self._children = [0] * blocks  # visible blocks right after each
        self._plain: OrderedDict[int, int] = OrderedDict()  # stamp by block, oldest first
        self._kept: dict[int, int] = {}  # stamp by marked block that is idle
        self._retention: dict[int, BlockRetention] = {}  # of visible blocks that are not STANDARD
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

    def stamp(self) -> int:
        """Return the stamp of a use that is later than all uses before it."""
        self._stamp += 1
        return self._stamp

    def would_evict_before(self, stamp: int) -> bool:
        """Return whether some idle block would be evicted before a block with that stamp and the
        default worth.
        """
        leaf = self._first_leaf() if self._kept else None
        firsts = [leaf] if leaf is not None else []
        if self._plain:
            firsts.append(self._head())
        return bool(firsts) and min(firsts) < (DEFAULT_PRIORITY, stamp, 0)

    @property
    def has_retentions(self) -> bool:
        """True if some visible block has another worth than the default."""
        return bool(self._retention)

    def retention_of(self, block: int) -> BlockRetention:
        """Return the worth of a visible block."""
        return self._retention.get(block, DEFAULT_RETENTION)

    def show(self, block: int, parent: int | None) -> None:
        """Note that `block` became visible; `parent` is the block before it in its chain."""
        self._parent[block] = parent
        if parent is not None:
            self._children[parent] += 1

    def rate(self, block: int, retention: BlockRetention, is_fresh: bool) -> None:
        """Set the worth that a request gives to a visible `block`. A fresh block gets this worth; a
        block that other requests used, too, keeps the larger worth.
        """
        best = retention if is_fresh else max(retention, self.retention_of(block))
        if best == DEFAULT_RETENTION:
            self._retention.pop(block, None)
            return
        self._retention[block] = best
        at: int | None = block
        while at is not None and at not in self._marked:
            self._marked.add(at)
            at = self._parent[at]

    def add(self, block: int) -> None:
        """Add a block that nobody holds any more; the blocks after it in its chain were added
        before.
        """
        self._stamp += 1
        if block not in self._marked:
            self._plain[block] = self._stamp
            return
        self._kept[block] = self._stamp
        self._offer(block)
        duration_s = self.retention_of(block).duration_s
        if duration_s != DEFAULT_RETENTION.duration_s:
            self._push(self._ends, (self.now_s + duration_s, self._stamp, block))

    def remove(self, block: int) -> None:
        """Remove a block that is held again. Raises KeyError for one that is not idle."""
        if self._plain.pop(block, None) is None:
            del self._kept[block]

    def pop(self) -> int:
        """Remove and return the block that is evicted first. Raises KeyError if none is idle."""
        leaf = self._first_leaf() if self._kept else None
        if leaf is None or (self._plain and self._head() < leaf):
            block, _ = self._plain.popitem(last=False)
            return block
        heappop(self._leaves)
        block = leaf[2]
        del self._kept[block]
        return block

    def forget(self, block: int) -> None:
        """Forget a block that is no longer visible and has no children."""
        self._retention.pop(block, None)
        self._marked.discard(block)
        parent = self._parent[block]
        if parent is not None:
            self._parent[block] = None
            self._children[parent] -= 1
            if parent in self._kept:
                self._offer(parent)

    def clear(self) -> None:
        """Forget all idle and visible blocks."""
        for part in (self._plain, self._kept, self._retention, self._marked):
            part.clear()
        self._leaves.clear()
        self._ends.clear()
        self._children = [0] * len(self._children)
        self._parent = [None] * len(self._parent)

    def advance(self, now_s: float) -> None:
        """Advance time to `now_s`: worths that end by then become the default."""
        self.now_s = max(now_s, self.now_s)
        while self._ends and self._ends[0][0] <= now_s:
            _, stamp, block = heappop(self._ends)
            if self._kept.get(block) == stamp:
                del self._retention[block]
                self._offer(block)

    def _offer(self, block: int) -> None:
        if not self._children[block]:
            self._push(self._leaves, (self.retention_of(block).priority, self._kept[block], block))

    def _first_leaf(self) -> _Entry | None:
        leaves = self._leaves
        while leaves and not self._is_current(leaves[0]):
            heappop(leaves)
        return leaves[0] if leaves else None

    def _is_current(self, entry: _Entry) -> bool:
        priority, stamp, block = entry
        return self._kept.get(block) == stamp and self.retention_of(block).priority == priority

    def _head(self) -> _Entry:
        block, stamp = next(iter(self._plain.items()))
        return DEFAULT_PRIORITY, stamp, block

    def _push(self, heap: list[_Entry], entry: _Entry) -> None:
        """Push an entry; outdated entries are removed before they outnumber valid ones."""
        if len(heap) > 2 * len(self._kept) + _SPARE:
            heap[:] = [one for one in heap if self._kept.get(one[2]) == one[1]]
            heapify(heap)
        heappush(heap, entry)


_NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)


class HostBlock(NamedTuple):
    parent_hash: int | None
    tokens: Tokens


class HostTier:
    """The blocks that the GPU evicted and that are kept in host memory; lifetime: worker.

    There are at most `blocks` of them; beyond that, the block that was stored or loaded longest ago
    is dropped. Children are stored before their parents and are loaded with them, so the parent of
    each block is in host memory or on the GPU. Blocks that are being loaded are pinned. Each block
    has an id, 0..blocks-1, which is its place in host memory.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 0:
            raise ValueError(f"host blocks must be 0 or more, got {blocks}")
        self.blocks = blocks
        self.evicted_total = 0
        self._held: OrderedDict[int, HostBlock] = OrderedDict()  # by chain hash, oldest first
        self._ids: dict[int, int] = {}  # by chain hash
        self._free: list[int] = []  # ids that some block had
        self._pins: dict[int, int] = {}  # loads under way, by chain hash

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._held

    def hit(self, chain: Sequence[int], start: int, limit: int) -> int:
        """Return how many consecutive blocks of `chain`, from `start` on and before `limit`, are in
        host memory. O(log n). The caller knows that the GPU has the blocks before `start`, and not
        the one at `start`.
        """
        stop = min(len(chain), limit)
        if start >= stop or not self._held:
            return 0
        held, depths = self._held, range(start, stop)
        return bisect_left(depths, True, key=lambda depth: chain[depth] not in held)

    def ids(self, hashes: Sequence[int]) -> list[int]:
        """Return the ids of these blocks in host memory. Raises KeyError for a block that is not
        there.
        """
        return [self._ids[block_hash] for block_hash in hashes]

    def pin(self, hashes: Sequence[int]) -> None:
        """Pin consecutive blocks that are being loaded, and mark them as used last, so that they
        are dropped last.
        """
        for block_hash in reversed(hashes):
            self._held.move_to_end(block_hash)
            self._pins[block_hash] = self._pins.get(block_hash, 0) + 1

    def unpin(self, hashes: Sequence[int]) -> None:
        """Unpin the blocks of a load that has ended. Do not call it if `clear` was called since the
        load began.
        """
        for block_hash in hashes:
            left = self._pins[block_hash] - 1
            if left:
                self._pins[block_hash] = left
            else:
                del self._pins[block_hash]

    def keep(self, evicted: Sequence[tuple[int, HostBlock]]) -> tuple[list[int], list[int]]:
        """Store blocks that the GPU evicts, children before parents. Return the hashes that host
        memory did not have before, and the hashes of the blocks that were dropped to make room.
        """
        held = self._held
        fresh: dict[int, None] = {}
        for block_hash, block in evicted:
            if block_hash in held:
                held.move_to_end(block_hash)
            else:
                held[block_hash] = block
                fresh[block_hash] = None
        excess = max(0, len(held) - self.blocks)
        gone = list(islice((one for one in held if one not in self._pins), excess))
        for block_hash in gone:
            del held[block_hash]
        left = [block_hash for block_hash in fresh if block_hash in held]
        lost = [block_hash for block_hash in gone if block_hash not in fresh]
        self._free += [self._ids.pop(block_hash) for block_hash in lost]
        for block_hash in left:
            self._ids[block_hash] = self._free.pop() if self._free else len(self._ids)
        self.evicted_total += len(lost)
        return left, lost

    def clear(self) -> None:
        """Forget all blocks in host memory and all pins."""
        for part in (self._held, self._ids, self._free, self._pins):
            part.clear()

    def snapshot(self) -> list[Stored]:
        """Return the blocks in host memory as events, with parents before children if both are in
        host memory.
        """
        return [
            Stored([block_hash], block.parent_hash, block.tokens, "host")
            for block_hash, block in reversed(self._held.items())
        ]


__all__ = ["BlockPool", "Cleared", "HostTier", "PoolEvent", "PoolTier", "Removed", "Stored"]


class BlockPool:
    """The blocks of one worker's KV cache; lifetime: worker.

    Block ids are 0..blocks-1, each of `block_size` tokens. With `record_events` every change of the
    visible contents is kept, in order, until `drain_events` returns it, and the tokens of visible
    blocks are kept for `snapshot`. One step changes each block at most twice, so more than 4 x
    blocks + 1024 pending changes show that `drain_events` is never called, and raise RuntimeError.
    Evicted blocks go to `host`, which keeps `host_blocks` of them (a write-back cache).

    `groups` are the windows and states that the model caches besides full attention, in the same
    memory. A prefix is then reused only if all of them allow it (`reusable`). Raises ValueError for
    groups and a host together, and for a pool that has no room besides one request's groups.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        record_events: bool = True,
        host_blocks: int = 0,
        groups: Sequence[CacheGroup] = (),
    ) -> None:
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self.epoch = 0  # counts `clear`; blocks computed in an earlier epoch stay private
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
        self.host = HostTier(host_blocks)
        self._saves: dict[int, int] = {}  # evicted block by its id in the host
        self.groups = GroupBlocks(groups, block_size) if groups else None
        self._full_group = 0 if groups else None  # its number in events
        if groups and host_blocks:
            raise ValueError(
                "windows and states are not kept in host memory: host blocks must be 0"
            )
        check_room(groups, block_size, blocks)
        # An eviction may bring a block to the host and push another one out of it.
        self._changes = Changes((12 if host_blocks else 4) * blocks + 1024)
        for event in self._empty_groups():
            self._note(event, 1)

    @property
    def available_blocks(self) -> int:
        """Number of blocks that `allocate` could return: free and idle ones."""
        available = len(self._free) + len(self._idle)
        return available if self.groups is None else available + self.groups.blocks

    @property
    def used_blocks(self) -> int:
        """Number of blocks held by at least one request, pin or export."""
        return self.blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Number of visible blocks, held or idle."""
        return len(self._by_hash)

    def holds(self, block_hash: int) -> bool:
        """Return whether a block is visible on the GPU, or kept in the host."""
        return block_hash in self._by_hash or block_hash in self.host

    def hit(self, chain: Sequence[int], limit: int | None = None) -> int:
        """Return how many leading blocks of `chain` (at most `limit`) are visible. O(log n)."""
        stop = len(chain) if limit is None else min(limit, len(chain))
        by_hash = self._by_hash
        return bisect_left(range(stop), True, key=lambda depth: chain[depth] not in by_hash)

    def reusable(self, chain: Sequence[int], limit: int) -> int:
        """Return how many leading blocks of `chain`, at most `limit`, a request can reuse."""
        hit = self.hit(chain, limit)
        return hit if self.groups is None else self.groups.longest(chain, hit)

    def keep_end(self, chain: Sequence[int], end: int, tokens: Tokens) -> None:
        """Store the windows and states after the first `end` blocks of `chain`, all of which are
        visible, if there is room. `tokens` are the tokens of these blocks, from the first block on.
        """
        if self.groups is None:
            return
        missing = self.touch_end(chain, end)
        ids = self.allocate(self.groups.cost(missing))
        if ids is None:
            return
        stamp, size, runs = self._idle.stamp(), self.block_size, list[list[int]]()
        for number, at in missing:
            cost = self.groups.groups[number - 1].cost
            own, ids = ids[:cost], ids[cost:]
            for block in own:
                self._references[block] = 0
            if self._record:
                self._tokens[own[0]] = tokens[at * size : (at + 1) * size]
            parent_hash = chain[at - 1] if at else None
            self.groups.keep((number, chain[at]), Kept(stamp, parent_hash, own))
            if runs and runs[-1][:2] == [number, at + 1]:
                runs[-1][1] = at
            else:
                runs.append([number, at, at + 1])
        for number, start, stop in runs:
            parent_hash, part = (
                chain[start - 1] if start else None,
                tokens[start * size : stop * size],
            )
            stored = Stored(list(chain[start:stop]), parent_hash, part, group=number)
            self._note(stored, stop - start)

    def touch_end(self, chain: Sequence[int], end: int) -> list[tuple[int, int]]:
        """Mark the windows and states after the first `end` blocks of `chain` as used now. Return
        the ones that are not cached as pairs of a group and a position in the chain.
        """
        return [] if self.groups is None else self.groups.touch(chain, end, self._idle.stamp())

    def available_beyond(self, chain: Sequence[int], hit: int) -> int:
        """Return how many blocks `allocate` could still return after `acquire(chain, hit)`. O(log
        n).
        """
        references, by_hash = self._references, self._by_hash
        # A request that holds a block holds its prefix: the idle ones are the tail of the hit.
        held = bisect_left(
            range(hit), True, key=lambda depth: not references[by_hash[chain[depth]]]
        )
        return self.available_blocks - (hit - held)

    def acquire(
        self, chain: Sequence[int], hit: int, retentions: Sequence[BlockRetention] | None = None
    ) -> list[int]:
        """Hold the first `hit` blocks of `chain`, and return their ids. `retentions` has the
        retention of each block to its new holder; None means the default. Raises KeyError unless
        all blocks are visible.
        """
        by_hash = self._by_hash
        ids = [by_hash[chain[depth]] for depth in range(hit)]
        for block in ids:
            self._hold(block)
        if retentions is not None or self._idle.has_retentions:
            self._rate(ids, retentions)
        return ids

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` private blocks, evicting the oldest idle ones; return None if there are
        fewer.
        """
        if count > self.available_blocks:
            return None
        evictions = count - len(self._free)
        if evictions > 0:
            if self.groups is None:
                self._evict(evictions)
            else:
                self._evict_by_age(evictions, self.groups)
        split = len(self._free) - count
        ids = self._free[split:]
        del self._free[split:]
        for block in ids:
            self._references[block] = 1
        return ids

    def hold(self, ids: Sequence[int]) -> None:
        """Hold blocks once more. Raises ValueError for blocks that nobody holds."""
        free = [block for block in ids if not self._references[block]]
        if free:
            raise ValueError(f"block {free[0]} is held by nobody")
        for block in ids:
            self._references[block] += 1

    def publish(
        self,
        ids: Sequence[int],
        hashes: Sequence[int],
        parent_hash: int | None,
        tokens: Tokens,
        retentions: Sequence[BlockRetention] | None = None,
    ) -> list[int]:
        """Make computed private blocks visible to other requests, and return the ids to hold from
        now on.

        `ids` are consecutive blocks of one chain whose earlier blocks the caller holds, `hashes`
        are their chain hashes, and `tokens` is int32[len(ids) * block_size]. If another block is
        already visible under the same hash, the caller's own block is freed and the caller holds
        the visible one instead: the memory is shared, and the prefix stays held without a gap.
        `retentions` has the retention of each block as in `acquire`. Raises ValueError if the
        parent is not visible or a block is not private.
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
        if retentions is not None or self._idle.has_retentions:
            self._rate(held, retentions, {held[position] for position in fresh})
        if self._record:
            self._record_stored(held, hashes, parent_hash, tokens, fresh)
        return held

    def release(self, ids: Sequence[int]) -> None:
        """Release the blocks of one chain, which are listed from the first block to the last."""
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
        """Make every visible block invisible. Blocks that a request holds become private and never
        become visible again.
        """
        for block in self._by_hash.values():
            self._hash[block] = self._parent[block] = None
        self._by_hash.clear()
        self._free.extend(self._idle)
        self._idle.clear()
        self.host.clear()
        self._saves.clear()
        if self.groups is not None:
            self._free.extend(self.groups.clear())
        self.epoch += 1
        self._note(Cleared(), 1)

    def advance(self, now_s: float) -> None:
        """Advance time to `now_s`: worths that end by then become the default."""
        self._idle.advance(now_s)

    def chain_to(self, block_hash: int) -> list[int]:
        """Return the chain hashes from a prompt's first block to the visible block `block_hash`.
        Raises KeyError if that block is not visible.
        """
        block = self._by_hash[block_hash]
        chain = [block_hash]
        while (parent_hash := self._parent[block]) is not None:
            chain.append(parent_hash)
            block = self._by_hash[parent_hash]
        return chain[::-1]

    def drain_events(self) -> list[PoolEvent]:
        """Return the changes of visible contents since the last call, in order."""
        return self._changes.drain()

    def take_saves(self) -> tuple[list[int], list[int]]:
        """Return the blocks that were stored in host memory since the last call, and their ids in
        host memory. A runner with real contents copies them before anything writes to the blocks
        again.
        """
        saves, self._saves = self._saves, {}
        return list(saves.values()), list(saves)

    def snapshot(self) -> list[Stored]:
        """Return the visible contents as events, parents before children; needs `record_events`."""
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
        return [self._stored(run) for run in runs] + self._kept() + self.host.snapshot()

    def _kept(self) -> list[Stored]:
        """Return the cached windows and states as events."""
        return self._empty_groups() + [
            Stored([block_hash], kept.parent_hash, self._tokens[kept.block_ids[0]], group=number)
            for (number, block_hash), kept in self.groups or ()
        ]

    def _empty_groups(self) -> list[Stored]:
        """Return an event for each group, which announces the group before it has any block."""
        groups = () if self.groups is None else self.groups.groups
        return [
            Stored([], None, _NO_TOKENS, group=number) for number, _ in enumerate(groups, start=1)
        ]

    def _evict_by_age(self, count: int, groups: GroupBlocks) -> None:
        """Free at least `count` blocks of all groups; those used longest ago are evicted first."""
        gone: list[tuple[int, list[int]]] = []  # group, hashes
        while count > 0:
            stamp = groups.oldest_stamp
            if stamp is None or self._idle.would_evict_before(stamp):
                number, block_hash, freed = 0, *self._drop_idle()
            else:
                (number, block_hash), kept = groups.pop()
                freed = kept.block_ids
            self._free.extend(freed)
            self.evicted_total += len(freed)
            count -= len(freed)
            if gone and gone[-1][0] == number:
                gone[-1][1].append(block_hash)
            else:
                gone.append((number, [block_hash]))
        for number, hashes in gone:
            self._note(Removed(hashes, group=number), len(hashes))

    def _drop_idle(self) -> tuple[int, list[int]]:
        """Make the idle block that is evicted first invisible; return its hash and id."""
        block = self._idle.pop()
        block_hash = self._hash[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._idle.forget(block)
        self._hash[block] = self._parent[block] = None
        return block_hash, [block]

    def _evict(self, count: int) -> None:
        gone: dict[int, int] = {}  # block by chain hash
        kept: list[tuple[int, HostBlock]] = []
        for _ in range(count):
            block = self._idle.pop()
            block_hash = self._hash[block]
            assert block_hash is not None
            if self.host.blocks:
                tokens = self._tokens[block].copy() if self._record else _NO_TOKENS
                kept.append((block_hash, HostBlock(self._parent[block], tokens)))
            del self._by_hash[block_hash]
            self._idle.forget(block)
            self._hash[block] = self._parent[block] = None
            self._free.append(block)
            gone[block_hash] = block
        self.evicted_total += count
        if kept:
            stored, lost = self.host.keep(kept)
            for block_hash, host_id in zip(stored, self.host.ids(stored), strict=True):
                self._saves[host_id] = gone[block_hash]
            # Before they leave the GPU, because their events on the GPU carried their tokens.
            if stored:
                self._note(Stored(stored, None, _NO_TOKENS, "host"), len(stored))
            if lost:
                self._note(Removed(lost, "host"), len(lost))
        self._note(Removed(list(gone)), count)

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            self._idle.remove(block)
        self._references[block] += 1

    def _rate(
        self,
        ids: Sequence[int],
        retentions: Sequence[BlockRetention] | None,
        fresh: Collection[int] = (),
    ) -> None:
        """Set the worths that a holder gives its blocks; None means the default."""
        given = [DEFAULT_RETENTION] * len(ids) if retentions is None else retentions
        for block, worth in zip(ids, given, strict=True):
            self._idle.rate(block, worth, block in fresh)

    def _record_stored(
        self,
        held: list[int],
        hashes: Sequence[int],
        parent_hash: int | None,
        tokens: Tokens,
        fresh: list[int],
    ) -> None:
        """Record the blocks at the positions `fresh` as stored, in runs of consecutive blocks."""
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
        tokens = self._tokens[run].reshape(-1)
        return Stored(hashes, self._parent[run[0]], tokens, group=self._full_group)

    def _note(self, event: PoolEvent, changes: int) -> None:
        if self._record:
            self._changes.note(event, changes)
