"""The plain-Python oracle of the chain hashes and the prefix index, and the index as bytes."""

from __future__ import annotations

import operator
import struct
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


TIERS = 3  # gpu, host, disk
Holders = dict[tuple[int, int], set[int]]  # (tier, block) -> workers

_MAGIC = b"KVPI"
_VERSION = 1
_HEADER = struct.Struct("<4sI4Q3Q")
_SUM_BYTES = 8
_LEAST_ENTRY_BYTES = 12
_HOLDERS_MASK = 0x1FFF


class Header(NamedTuple):
    """The fields of a dump of the index that precede its entries."""

    workers: int
    max_entries: int
    max_bytes: int
    evicted: int


def write(header: Header, holders: Holders) -> bytes:
    """Return the dump as bytes. The order of entries within a tier is kept; it is that of their
    last use.
    """
    counts = [sum(tier == wanted for tier, _ in holders) for wanted in range(TIERS)]
    parts = [_HEADER.pack(_MAGIC, _VERSION, *header, *counts)]
    for (_, block), workers in sorted(holders.items(), key=lambda item: item[0][0]):
        parts.append(struct.pack(f"<QH{len(workers)}H", block, len(workers), *sorted(workers)))
    data = b"".join(parts)
    return data + xxhash.xxh3_64_intdigest(data).to_bytes(_SUM_BYTES, "little")


def read(frame: bytes) -> tuple[Header, Holders]:
    """Return what `write` was given. Raises ValueError for any other bytes, with the native code's
    text.
    """
    if len(frame) < _HEADER.size + _SUM_BYTES:
        raise _refusal(f"{len(frame)} bytes are too few")
    magic, version, *numbers = _HEADER.unpack_from(frame)
    header, counts = Header(*numbers[:4]), numbers[4:]
    if magic != _MAGIC:
        raise _refusal("it does not start with KVPI")
    if version != _VERSION:
        raise _refusal(f"version {version}, this program reads {_VERSION}")
    body = frame[:-_SUM_BYTES]
    if int.from_bytes(frame[-_SUM_BYTES:], "little") != xxhash.xxh3_64_intdigest(body):
        raise _refusal("its checksum is wrong")
    if not 1 <= header.workers <= 4096:
        raise _refusal("workers out of range")
    if not (1 <= header.max_entries < 1 << 63 and 1 <= header.max_bytes < 1 << 63):
        raise _refusal("a bound out of range")
    if sum(counts) > header.max_entries:
        raise _refusal("more entries than max_entries")
    if sum(counts) > (len(body) - _HEADER.size) // _LEAST_ENTRY_BYTES:
        raise _refusal("entries are missing")
    return header, _entries(body, header.workers, counts)


def _entries(body: bytes, workers: int, counts: list[int]) -> Holders:
    entries: Holders = {}
    at = _HEADER.size
    for tier, count in enumerate(counts):
        for _ in range(count):
            if len(body) - at < _LEAST_ENTRY_BYTES:
                raise _refusal("entries are missing")
            block, packed = struct.unpack_from("<QH", body, at)
            width, at = packed & _HOLDERS_MASK, at + 10
            if not 1 <= width <= workers:
                raise _refusal("an entry without a fit number of holders")
            if len(body) - at < 2 * width:
                raise _refusal("entries are missing")
            holders = list(struct.unpack_from(f"<{width}H", body, at))
            at += 2 * width
            if holders != sorted(set(holders)) or holders[-1] >= workers:
                raise _refusal("an entry whose holders are not ascending workers")
            if (tier, block) in entries:
                raise _refusal("an entry twice")
            entries[tier, block] = set(holders)
    if at != len(body):
        raise _refusal(f"{len(body) - at} bytes too many")
    return entries


def _refusal(what: str) -> ValueError:
    return ValueError(f"not a dump of a prefix index: {what}")


Hashes = npt.NDArray[np.uint64]
Hits = npt.NDArray[np.int32]
Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def chain_hashes(tokens: Buffer, block_size: int, seed: int = 0) -> Hashes:
    """Return the chain hashes of the full blocks of `tokens`, first block first.

    h_i = XXH3-64(h_{i-1} as 8 little-endian bytes + block i's tokens as int32 little-endian),
    h_{-1} = `seed` (uint64). The partial last block is not hashed. To continue from a known block,
    pass its hash as `seed`. `tokens` is a C-contiguous 1-D buffer of int32, read in place. Raises
    TypeError for another element type or for no buffer at all, ValueError for another shape or
    layout, a block_size below 1, or a seed outside uint64.
    """
    block_size, seed = _integer(block_size, "block_size"), _integer(seed, "seed")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be a uint64, got {seed}")
    data = _buffer(tokens, "tokens", "int32").tobytes()
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    step = 4 * block_size
    chain = np.empty(len(data) // step, dtype=np.uint64)
    for i in range(len(chain)):
        seed = xxhash.xxh3_64_intdigest(
            seed.to_bytes(8, "little") + data[i * step : (i + 1) * step]
        )
        chain[i] = seed
    return chain


def wide_chain_hashes(tokens: Buffer, block_size: int, seed: int = 0) -> Hashes:
    """Return the chain hashes of ids of 64 bits, which are a buffer of int64.

    A block with an id beyond int32 is hashed over its ids as 8 bytes each, and all other blocks as
    in `chain_hashes`.
    """
    block_size, seed = _integer(block_size, "block_size"), _integer(seed, "seed")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be a uint64, got {seed}")
    ids = _buffer(tokens, "tokens", "int64")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    chain = np.empty(len(ids) // block_size, dtype=np.uint64)
    for i in range(len(chain)):
        block = block_bytes(ids[i * block_size : (i + 1) * block_size])
        chain[i] = seed = xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + block)
    return chain


def block_bytes(ids: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> bytes:
    """Return the bytes that are hashed for one block's ids."""
    narrow = ids.astype(np.int32)
    return narrow.tobytes() if (narrow == ids).all() else ids.tobytes()


class PrefixIndex:
    """Knows exactly which worker holds which block in which tier. Lifetime: process.

    There are `workers` slots, numbered from 0, and the tiers 0 GPU, 1 host, 2 disk. An entry is a
    block in a tier. There are at most `max_entries` of them in at most `max_bytes`. Beyond that the
    coldest entry is dropped and counted in `evicted`; here it is the one whose last store or lookup
    is the oldest, and the native index comes close to it with a clock.

    Hashes are C-contiguous 1-D buffers of uint64; every value is a legal block, and a chain may
    repeat a hash. Methods raise TypeError and ValueError for hashes as `chain_hashes` does for
    tokens, IndexError for an unknown worker and ValueError for an unknown tier.
    """

    def __init__(self, workers: int, max_entries: int = 1 << 20, max_bytes: int = 1 << 62) -> None:
        workers, max_entries = _integer(workers, "workers"), _integer(max_entries, "max_entries")
        max_bytes = _integer(max_bytes, "max_bytes")
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        if not 1 <= workers <= 4096:
            raise ValueError(f"workers must be 1..4096, got {workers}")
        self.workers = workers
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.evicted = 0
        self._evicted_of = [0] * workers
        # (tier, block) -> workers; insertion order = age of last use
        self._holders: dict[tuple[int, int], set[int]] = {}
        self._held = [[0] * workers for _ in range(TIERS)]

    def store(self, worker: int, hashes: Buffer, tier: int = 0) -> int:
        """Record that `worker` holds these blocks; return how many it did not hold before."""
        blocks, worker, tier = self._arguments(worker, hashes, tier)
        before = self._held[tier][worker]
        for block in blocks:
            holders = self._holders.pop((tier, block), None)
            if holders is None:
                self._make_room()
                holders = set()
            self._held[tier][worker] += worker not in holders
            holders.add(worker)
            self._holders[tier, block] = holders
        return self._held[tier][worker] - before

    def remove(self, worker: int, hashes: Buffer, tier: int = 0) -> int:
        """Record that `worker` dropped these blocks; return how many it held."""
        blocks, worker, tier = self._arguments(worker, hashes, tier)
        return sum(self._drop(worker, (tier, block)) for block in blocks)

    def clear_worker(self, worker: int) -> int:
        """Forget all blocks of `worker` in all tiers; return how many it held."""
        worker = self._checked(worker)
        self._evicted_of[worker] = 0
        held = [entry for entry, holders in self._holders.items() if worker in holders]
        return sum(self._drop(worker, entry) for entry in held)

    def longest_prefix(self, hashes: Buffer) -> Hits:
        """Return int32[workers]: how many leading blocks of the chain each worker holds
        on the GPU.
        """
        blocks = _buffer(hashes, "hashes", "uint64").tolist()
        return self._depths([self._used(0, block) for block in blocks])

    def raise_prefix(self, hashes: Buffer, hits: Hits) -> None:
        """Raise each element of `hits`, int32[workers], to the result of `longest_prefix` if that
        is greater.

        `hits` is written in place while other threads run, so no other thread may use it meanwhile.
        Raises ValueError for a buffer of another size and for a read-only one.
        """
        _buffer(hashes, "hashes", "uint64")
        raised = _depths(hits, self.workers)
        np.maximum(raised, self.longest_prefix(hashes), out=raised)

    def longest_prefix_tiers(self, hashes: Buffer) -> Hits:
        """Return int32[3, workers]: how many leading blocks each worker holds; row t counts the
        tiers 0..t.
        """
        blocks = _buffer(hashes, "hashes", "uint64").tolist()
        held: list[set[int]] = [set() for _ in blocks]
        rows = []
        for tier in range(TIERS):
            held = [
                above | self._used(tier, block) for above, block in zip(held, blocks, strict=True)
            ]
            rows.append(self._depths(held))
        return np.stack(rows)

    def held(self, worker: int, tier: int = 0) -> int:
        """Return how many blocks `worker` holds in the tier."""
        return self._held[_tier(tier)][self._checked(worker)]

    def evicted_of(self, worker: int) -> int:
        """Return how many blocks of `worker` the bounds have evicted since it was last cleared."""
        return self._evicted_of[self._checked(worker)]

    def contains(self, worker: int, hashes: Buffer, tier: int = 0) -> int:
        """Return how many of these blocks `worker` holds in the tier."""
        blocks, worker, tier = self._arguments(worker, hashes, tier)
        return sum(worker in self._holders.get((tier, block), ()) for block in blocks)

    def dump(self) -> bytes:
        """Return the whole index in the format of `write`, for `load`."""
        header = Header(self.workers, self.max_entries, self.max_bytes, self.evicted)
        return write(header, self._holders)

    @staticmethod
    def load(data: Bytes) -> PrefixIndex:
        """Return the index that was dumped. Raises ValueError for anything but a complete dump."""
        header, holders = read(bytes(_buffer(data, "data", "uint8")))
        index = PrefixIndex(header.workers, header.max_entries, header.max_bytes)
        for (tier, block), workers in holders.items():
            for worker in sorted(workers):
                index.store(worker, array("Q", [block]), tier)
        index.evicted = header.evicted
        return index

    def __len__(self) -> int:
        """Return the number of distinct (block, tier) pairs that at least one worker holds."""
        return len(self._holders)

    @property
    def tiers(self) -> int:
        """The number of tiers in use: one more than the highest tier that holds a block, and at
        least 1.
        """
        return 1 + max((tier for tier in range(TIERS) if any(self._held[tier])), default=0)

    @property
    def memory_bytes(self) -> int:
        """The bytes in use: a rough estimate here, exact in the native index."""
        return 160 * len(self._holders) + 32 * sum(map(sum, self._held))

    def _make_room(self) -> None:
        full = len(self._holders) >= self.max_entries or self.memory_bytes > self.max_bytes
        if not full or not self._holders:
            return
        tier, block = next(iter(self._holders))
        for worker in self._holders.pop((tier, block)):
            self._held[tier][worker] -= 1
            self._evicted_of[worker] += 1
        self.evicted += 1

    def _used(self, tier: int, block: int) -> set[int]:
        holders = self._holders.pop((tier, block), None)
        if holders is None:
            return set()
        self._holders[tier, block] = holders
        return holders

    def _depths(self, held: list[set[int]]) -> Hits:
        hits = np.zeros(self.workers, dtype=np.int32)
        alive = set(range(self.workers))
        for depth, holders in enumerate(held):
            alive &= holders
            if not alive:
                break
            hits[list(alive)] = depth + 1
        return hits

    def _drop(self, worker: int, entry: tuple[int, int]) -> bool:
        holders = self._holders.get(entry)
        if holders is None or worker not in holders:
            return False
        holders.discard(worker)
        self._held[entry[0]][worker] -= 1
        if not holders:
            del self._holders[entry]
        return True

    def _arguments(self, worker: int, hashes: Buffer, tier: int) -> tuple[list[int], int, int]:
        blocks = _buffer(hashes, "hashes", "uint64").tolist()
        worker = _integer(worker, "worker")
        tier = _tier(tier)
        return blocks, self._checked(worker), tier

    def _checked(self, worker: int) -> int:
        worker = _integer(worker, "worker")
        if not 0 <= worker < self.workers:
            raise IndexError(f"worker must be 0..{self.workers - 1}, got {worker}")
        return worker


def _tier(value: SupportsIndex) -> int:
    tier = _integer(value, "tier")
    if not 0 <= tier < TIERS:
        raise ValueError(f"tier must be 0..{TIERS - 1}, got {tier}")
    return tier


def _depths(hits: Hits, workers: int) -> Hits:
    values = _buffer(hits, "hits", "int32")
    if not values.flags.writeable:
        raise ValueError("hits must be writable")
    if len(values) != workers:
        raise ValueError(f"hits must have {workers} values, one a worker, got {len(values)}")
    return values


_FORMATS = {
    "int32": ("il", 4),
    "int64": ("ql", 8),
    "uint64": ("QL", 8),
    "uint8": ("B", 1),
}  # struct codes, bytes of one value


def _buffer(values: Any, name: str, dtype: str) -> npt.NDArray[Any]:
    """Return `values` as an array without a copy; refuse others with the native core's text."""
    formats, item_bytes = _FORMATS[dtype]
    try:
        view = memoryview(values)
    except TypeError:
        raise TypeError(
            f"{name} must be a buffer of {dtype}, got {type(values).__name__}; "
            f"numpy.array(..., dtype=numpy.{dtype}) makes one"
        ) from None
    code = view.format[1:] if view.format[0] in "<=@" else view.format
    if view.itemsize != item_bytes or len(code) != 1 or code not in formats:
        raise TypeError(
            f"{name} must be a buffer of {dtype}, "
            f"got format '{view.format}' of {view.itemsize} bytes"
        )
    if view.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got {view.ndim}")
    if not view.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, got a strided view; "
            "numpy.ascontiguousarray(...) copies it"
        )
    return np.asarray(view)


def _integer(value: SupportsIndex, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def in_range(value: int, name: str, least: int, most: int) -> int:
    """Return `value` as an int from `least` to `most`. Raises TypeError if it is no int, and
    ValueError if it is out of range.
    """
    number = _integer(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least}..{most}, got {value}")
    return number


def uint64(value: int, name: str) -> int:
    """Return `value` as an int in 0..2^64-1. Raises TypeError if it is no int, and ValueError if it
    is out of range.
    """
    number = _integer(value, name)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} must be a uint64, got {number}")
    return number


def parent_of(parent: int | None) -> int | None:
    """Return the parent's name, checked as `uint64` does, or None if there is no parent."""
    return None if parent is None else uint64(parent, "parent")


def names_of(names: Buffer) -> list[int]:
    """Return a buffer of uint64 as ints."""
    blocks: list[int] = _buffer(names, "names", "uint64").tolist()
    return blocks


def data_bytes(data: Buffer, name: str) -> bytes:
    """Return a copy of a buffer's bytes. Raises TypeError for anything else."""
    try:
        return bytes(memoryview(data))
    except TypeError:
        raise TypeError(f"{name} must be a buffer of bytes, got {type(data).__name__}") from None
