"""The plain-Python oracle of the native `Mirror`, which models the caches of workers that publish
no events.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from tests.oracles.index import Hits, PrefixIndex, _buffer, _integer

if TYPE_CHECKING:
    from typing_extensions import Buffer

Touch = tuple[int, int, list[tuple[int, int]]]
_RUNS = 32  # most runs that one touch reports
_BLOCKS_MAX = 1 << 31  # blocks are numbered in 32 bits


class _Recency:
    """One worker's blocks by last use, coldest first. Lifetime: until the worker is cleared."""

    def __init__(self) -> None:
        self.most_resident = 0
        self.most_remembered = 0
        self.resident = 0  # this many of the warmest blocks
        self.stamps: OrderedDict[int, int] = OrderedDict()

    def warmest(self, count: int) -> list[int]:
        """Return the `count` warmest blocks, coldest first."""
        return list(self.stamps)[len(self.stamps) - count :]


class Mirror:
    """LRU caches of workers that publish no events. Lifetime: process.

    Each of the `workers` slots keeps its blocks by last use (R. Mattson et al., "Evaluation
    Techniques for Storage Hierarchies", 1970). The warmest blocks are *resident*: the worker is
    believed to hold them. Colder blocks are only remembered, so that the border between the two can
    be found wrong, and moved. At most `max_blocks` are remembered for all workers together.

    A touch puts a chain's first block on top and its last one deepest, as engines free a request's
    blocks from the tail (vLLM's free queue; `engine.block_pool`). So evictions go from the leaves
    to the root, and a block is never resident without those before it in its chain.

    Two things are not modelled. Running requests pin their blocks, so while an answer takes longer
    than the rest of the cache takes to turn over, its blocks are believed gone although they are
    there. And blocks of answers take room of which the mirror does not know. Hashes are buffers as
    in `PrefixIndex`; methods raise the same errors as its methods.
    """

    def __init__(self, workers: int, max_blocks: int = 1 << 20) -> None:
        workers, max_blocks = _integer(workers, "workers"), _integer(max_blocks, "max_blocks")
        if not 1 <= max_blocks <= _BLOCKS_MAX:
            raise ValueError(f"max_blocks must be 1..{_BLOCKS_MAX}, got {max_blocks}")
        self._index = PrefixIndex(workers, max_blocks)
        self.workers = workers
        self.max_blocks = max_blocks
        self._stamp = 0
        self._recency = [_Recency() for _ in range(self.workers)]

    def resize(self, worker: int, resident: int, remembered: int) -> int:
        """Set a worker's bounds; return how many blocks are no longer resident.

        `resident` bounds the resident blocks and `remembered` all blocks; both are 0 at first.
        Raises ValueError unless 0 <= resident <= remembered and `max_blocks` suffices for what all
        workers may remember.
        """
        worker, resident = _integer(worker, "worker"), _integer(resident, "resident")
        remembered = _integer(remembered, "remembered")
        blocks = self._of(worker)
        if resident < 0 or remembered < resident:
            raise ValueError(f"resident must be 0..remembered, got {resident} of {remembered}")
        left = self.max_blocks + blocks.most_remembered
        left -= sum(each.most_remembered for each in self._recency)
        if remembered > left:
            raise ValueError(
                f"remembered must be at most {left}, what other workers leave of max_blocks, "
                f"got {remembered}"
            )
        blocks.most_resident, blocks.most_remembered = resident, remembered
        return self._trim(worker)

    def touch(self, worker: int, chain: Buffer) -> Touch:
        """Make a chain the warmest of a worker; return (leading blocks that were resident, stamp,
        runs).

        If the chain is longer than what may be resident, only its leading part counts. The stamp,
        from 1 up, numbers the touch. `runs` says when the leading blocks were last used: (depth
        after a run's last block, stamp of that touch, or 0 if unknown), at most 32 of them.
        """
        named = _buffer(chain, "chain", "uint64").tolist()
        blocks = self._of(_integer(worker, "worker"))
        hashes: list[int] = named[: blocks.most_resident]
        self._stamp += 1
        resident, hit_blocks = set(blocks.warmest(blocks.resident)), 0
        while hit_blocks < len(hashes) and hashes[hit_blocks] in resident:
            hit_blocks += 1
        runs: list[tuple[int, int]] = []
        for depth, stamp in enumerate(blocks.stamps.get(each, 0) for each in hashes):
            if runs and runs[-1][1] == stamp:
                runs.pop()
            elif len(runs) == _RUNS:
                break
            runs.append((depth + 1, stamp))
        if runs and not runs[-1][1]:
            runs.pop()
        distinct = dict.fromkeys(hashes)
        for each in reversed(distinct):
            blocks.stamps[each] = self._stamp
            blocks.stamps.move_to_end(each)
        blocks.resident += len(distinct.keys() - resident)
        self._trim(worker)
        self._index.store(worker, _array(hashes))
        return hit_blocks, self._stamp, runs

    def forget(self, worker: int, chain: Buffer, stamp: int) -> int:
        """Take back a touch for the blocks that no later touch used; return how many
        blocks left.
        """
        hashes: list[int] = _buffer(chain, "chain", "uint64").tolist()
        blocks, stamp = self._of(_integer(worker, "worker")), _uint64(stamp)
        gone = [each for each in dict.fromkeys(hashes) if blocks.stamps.get(each) == stamp]
        for each in gone:
            del blocks.stamps[each]
        left = self._index.remove(worker, _array(gone))
        blocks.resident -= left
        return left

    def drop_colder(self, worker: int, stamp: int) -> int:
        """Make blocks last used at `stamp` or before no longer resident; return how many."""
        blocks, stamp = self._of(_integer(worker, "worker")), _uint64(stamp)
        warmer = sum(each > stamp for each in blocks.stamps.values())
        return self._demote(worker, min(blocks.resident, warmer))

    def revive_warmer(self, worker: int, stamp: int) -> int:
        """Make blocks last used after `stamp` resident again; return how many."""
        blocks, stamp = self._of(_integer(worker, "worker")), _uint64(stamp)
        warmer = sum(each > stamp for each in blocks.stamps.values())
        before = blocks.resident
        blocks.resident = max(before, min(warmer, blocks.most_resident))
        self._index.store(worker, _array(blocks.warmest(blocks.resident)))
        return blocks.resident - before

    def clear_worker(self, worker: int) -> int:
        """Forget all blocks of `worker` but keep its bounds; return how many blocks it held."""
        blocks = self._of(_integer(worker, "worker"))
        blocks.stamps.clear()
        blocks.resident = 0
        return self._index.clear_worker(worker)

    def longest_prefix(self, chain: Buffer) -> Hits:
        """Return int32[workers]: how many leading blocks of the chain are resident on
        each worker.
        """
        return self._index.longest_prefix(chain)

    def raise_prefix(self, chain: Buffer, hits: Hits) -> None:
        """Raise each element of `hits`, int32[workers], to the result of `longest_prefix` if that
        is greater.
        """
        self._index.raise_prefix(chain, hits)

    def held(self, worker: int) -> int:
        """Return the number of blocks resident on `worker`."""
        return self._of(_integer(worker, "worker")).resident

    def remembered(self, worker: int) -> int:
        """Return the number of blocks remembered for `worker`, including the resident ones."""
        return len(self._of(_integer(worker, "worker")).stamps)

    def __len__(self) -> int:
        """Return the number of distinct blocks resident on at least one worker."""
        return len(self._index)

    @property
    def memory_bytes(self) -> int:
        """The bytes in use: a rough estimate here, exact in the native class."""
        return self._index.memory_bytes + sum(160 * len(each.stamps) for each in self._recency)

    def _of(self, worker: int) -> _Recency:
        if not 0 <= worker < self.workers:
            raise IndexError(f"worker must be 0..{self.workers - 1}, got {worker}")
        return self._recency[worker]

    def _demote(self, worker: int, resident: int) -> int:
        blocks = self._recency[worker]
        gone = blocks.resident - resident
        self._index.remove(worker, _array(blocks.warmest(blocks.resident)[:gone]))
        blocks.resident = resident
        return gone

    def _trim(self, worker: int) -> int:
        blocks = self._recency[worker]
        gone = self._demote(worker, min(blocks.resident, blocks.most_resident))
        while len(blocks.stamps) > blocks.most_remembered:
            blocks.stamps.popitem(last=False)
        return gone


def _array(hashes: list[int]) -> array[int]:
    return array("Q", hashes)


def _uint64(stamp: int) -> int:
    stamp = _integer(stamp, "stamp")
    if not 0 <= stamp < 1 << 64:
        raise ValueError(f"stamp must be a uint64, got {stamp}")
    return stamp
