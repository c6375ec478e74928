"""The plain-Python oracle of the native `WorkerBlocks`, which knows one worker's blocks by the
engine's names.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvkernels import chain_seed
from tests.oracles.cache_groups import CacheGroups, Group
from tests.oracles.event_batch import MAX_BLOCK_SIZE, MAX_RANK, EventBatch
from tests.oracles.index import (
    _buffer,
    _integer,
    block_bytes,
    chain_hashes,
    data_bytes,
    in_range,
    names_of,
    parent_of,
    uint64,
    wide_chain_hashes,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvkernels import PrefixIndex


MAX_PARKED_TOKENS = 1 << 24  # of one worker: 64 MiB

Name = tuple[int, int]  # an engine's name of a block, and its tier


@dataclass(slots=True)
class Run:
    """A sequence of stored blocks, given by their chain hashes or by the tokens to hash."""

    names: list[int]
    parent: int | None
    tier: int
    chain: npt.NDArray[np.uint64] | None = None
    tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64] | None = None
    extras: tuple[bytes, ...] = ()
    unit: int = 1  # blocks per name; above 1 only outside tier 0 and without extras

    @property
    def cost_tokens(self) -> int:
        """The room that the sequence takes while it waits for its parent, in tokens. A chain hash,
        a name and a token of 64 bits each count as two.
        """
        size = 2 * len(self.names)
        size += 2 * len(self.chain) if self.chain is not None else 0
        size += self.tokens.nbytes // 4 if self.tokens is not None else 0
        return size + sum(len(extra) for extra in self.extras) // 4


class ParkedBlocks:
    """One worker's blocks whose parents are unknown, at most `limit` of them; they wait ("are
    parked") for their parents. Lifetime: worker.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.runs: dict[int, list[Run]] = {}  # by the parent they wait for
        self.dead: set[Name] = set()  # parked, and evicted before their parent came
        self._blocks = 0
        self._tokens = 0
        self._seen_dead = 0  # dead blocks that the last burial left
        self._names: Counter[Name] = Counter()  # a name may be parked twice

    def __len__(self) -> int:
        return self._blocks

    def park(self, run: Run) -> bool:
        """Keep a sequence of blocks until its parent is stored; return False if there is no room
        for it.
        """
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
        """Note that these blocks are stored again, so that an earlier eviction no longer counts."""
        self.dead.difference_update((name, tier) for name in names)

    def evict(self, names: Sequence[int], tier: int) -> None:
        """Note that these blocks are evicted, so that the ones that wait here are dropped when
        their parent is stored.
        """
        self.dead.update((name, tier) for name in names if (name, tier) in self._names)

    def wake(self, parents: Sequence[int]) -> list[Run]:
        """Return the sequences of blocks that waited for these parents; they no longer
        wait here.
        """
        woken = [run for parent in parents for run in self.runs.pop(parent, ())]
        for run in woken:
            self._unpark(run)
        return woken

    def take_dead(self, names: Sequence[int], tier: int) -> list[int]:
        """Return the blocks among these that were evicted while they waited here, and forget these
        evictions.
        """
        dead = [name for name in names if (name, tier) in self.dead]
        self.revive(dead, tier)
        return dead

    def clear(self) -> None:
        """Drop all blocks that wait for their parents."""
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
        """Make room by dropping sequences that were evicted completely, because their parent may
        never come.

        All waiting blocks are visited only if a good part of them was evicted since the last visit.
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


_MAGIC = b"kvwb"
_VERSION = 5
TIERS = 3
_KINDS = ("", "full", "window", "state", "other")
MOST_SIZES = 8  # block sizes that are counted apart, one of them "more sizes"


class Contents(NamedTuple):
    """The contents of a dump; the three arrays are of equal length, with names ascending."""

    group: int
    full_attention: bool
    is_placed: bool  # the places of blocks of windows alone are known
    names: npt.NDArray[np.uint64]
    chains: npt.NDArray[np.uint64]
    tiers: npt.NDArray[np.uint8]
    copies: list[dict[int, int]]  # by tier: copies of each name beyond the first
    parked: ParkedBlocks
    groups: CacheGroups
    chunks: dict[int, list[int]]  # of names of several blocks: chain hashes of all but the last


def contents_of(
    group: int,
    full_attention: bool,
    is_placed: bool,
    known: Mapping[int, tuple[int, int]],
    copies: Sequence[Mapping[int, int]],
    parked: ParkedBlocks,
    groups: CacheGroups,
    chunks: Mapping[int, list[int]],
) -> Contents:
    """Return a copy of everything known: chain hash and tiers by name, copies, parked runs, groups,
    and chunks.
    """
    rows = sorted((name, chain, tiers) for name, (chain, tiers) in known.items())
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3).T
    tiers = columns[2].astype(np.uint8)
    arrays = columns[0], columns[1], tiers
    kept = [dict(each) for each in copies], deepcopy(parked), deepcopy(groups), dict(chunks)
    return Contents(group, full_attention, is_placed, *arrays, *kept)


class FrozenBlocks(NamedTuple):
    """One worker's blocks at one moment. Lifetime: one dump."""

    block_size: int
    model: str
    contents: Contents

    def dump(self) -> bytes:
        """Return the bytes that `WorkerBlocks.dump` would have given at that moment."""
        return _written(self.block_size, self.model, self.contents)


def _written(block_size: int, model: str, contents: Contents) -> bytes:
    head = struct.pack(
        "<IIQIBBQ",
        *(_VERSION, block_size, xxhash.xxh3_64_intdigest(model.encode())),
        *(contents.group, contents.full_attention, contents.is_placed, len(contents.names)),
    )
    parts = [_MAGIC, head]
    parts += [contents.names.tobytes(), contents.chains.tobytes(), contents.tiers.tobytes()]
    for copies in contents.copies:
        parts.append(struct.pack("<Q", len(copies)))
        parts += [struct.pack("<QI", *copy) for copy in sorted(copies.items())]
    runs = [run for _, waiting in sorted(contents.parked.runs.items()) for run in waiting]
    parts.append(struct.pack("<I", len(runs)))
    for run in runs:
        parts += _run_parts(run)
    parts.append(struct.pack("<I", len(contents.parked.dead)))
    parts += [struct.pack("<QB", *name) for name in sorted(contents.parked.dead)]
    parts.append(struct.pack("<I", len(contents.groups.groups)))
    for number, one in contents.groups.groups.items():
        kind = _KINDS.index(one.kind)
        told = number, kind, one.window, one.block_size, len(one.held)
        parts.append(struct.pack("<IBIIQ", *told))
        parts += [struct.pack("<QQ", *held) for held in sorted(one.held.items())]
    parts.append(struct.pack("<Q", len(contents.chunks)))
    for name, inner in sorted(contents.chunks.items()):
        parts += [struct.pack("<QI", name, len(inner)), np.array(inner, dtype=np.uint64).tobytes()]
    body = b"".join(parts)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def read(data: bytes, block_size: int, model: str, max_parked: int) -> Contents:
    """Return the contents of a dump. Raises ValueError for bytes that `_written` did not write for
    such a worker.
    """
    parts = _Parts(data)
    if parts.take(len(_MAGIC)) != _MAGIC or parts.unpack("<I") != (_VERSION,):
        raise ValueError(f"dump of blocks: not one of version {_VERSION}")
    start = parts.at
    if len(data) < start + 8:
        raise ValueError("dump of blocks: it ends early")
    body, digest = data[:-8], data[-8:]
    if digest != struct.pack("<Q", xxhash.xxh3_64_intdigest(body)):
        raise ValueError("dump of blocks: its bytes were changed")
    parts = _Parts(body)
    parts.at = start
    if parts.unpack("<IQ") != (block_size, xxhash.xxh3_64_intdigest(model.encode())):
        raise ValueError("dump of blocks: it is of another model or block size")
    group, full_attention, is_placed, count = parts.unpack("<IBBQ")
    names = parts.array(count, np.uint64)
    chains = parts.array(count, np.uint64)
    tiers = parts.array(count, np.uint8)
    legal = ((tiers >= 1) & (tiers < 1 << TIERS)).all() and (names[1:] > names[:-1]).all()
    if group > MAX_RANK or full_attention + is_placed > 1 or not legal:
        raise ValueError("dump of blocks: its names are malformed")
    copies = [_read_copies(parts, names[tiers >> tier & 1 > 0]) for tier in range(TIERS)]
    parked = _read_parked(parts, block_size, max_parked)
    groups = _read_groups(parts)
    chunks = _read_chunks(parts, set(names.tolist()))
    if full_attention and groups.groups and chunks:
        raise ValueError("dump of blocks: its chunks are malformed")
    if parts.at != len(body):
        raise ValueError("dump of blocks: more bytes follow it")
    how = bool(full_attention), bool(is_placed)
    return Contents(group, *how, names, chains, tiers, copies, parked, groups, chunks)


def _read_copies(parts: _Parts, held: npt.NDArray[np.uint64]) -> dict[int, int]:
    names, copies = set(held.tolist()), dict[int, int]()
    for _ in range(parts.unpack("<Q")[0]):
        name, more = parts.unpack("<QI")
        if name not in names or name in copies or not more:
            raise ValueError("dump of blocks: its copies are malformed")
        copies[name] = more
    return copies


def _read_groups(parts: _Parts) -> CacheGroups:
    groups = CacheGroups()
    for _ in range(parts.unpack("<I")[0]):
        number, kind, window, block_size, count = parts.unpack("<IBIIQ")
        is_kind = (kind == 3 and not window) or (kind == 2 and window)
        if not is_kind or number > MAX_RANK or block_size > MAX_BLOCK_SIZE:
            raise ValueError("dump of blocks: its groups are malformed")
        one = Group(_KINDS[kind], window, block_size)
        for _ in range(count):
            name, copies = parts.unpack("<QQ")
            if not copies or name in one.held:
                raise ValueError("dump of blocks: its groups are malformed")
            one.held[name] = copies
        if number in groups.groups:
            raise ValueError("dump of blocks: its groups are malformed")
        groups.groups[number] = one
    return groups


def _read_chunks(parts: _Parts, names: set[int]) -> dict[int, list[int]]:
    chunks = dict[int, list[int]]()
    for _ in range(parts.unpack("<Q")[0]):
        name, inner = parts.unpack("<QI")
        if name not in names or name in chunks or not 1 <= inner < MAX_BLOCK_SIZE:
            raise ValueError("dump of blocks: its chunks are malformed")
        chunks[name] = parts.array(inner, np.uint64).tolist()
    return chunks


def _run_parts(run: Run) -> list[bytes]:
    assert run.parent is not None
    is_wide = run.tokens is not None and run.tokens.dtype == np.int64
    flags = (1 if run.chain is not None else 2 * is_wide, bool(run.extras))
    parts = [struct.pack("<QBBBII", run.parent, run.tier, *flags, len(run.names), run.unit)]
    parts.append(np.array(run.names, dtype=np.uint64).tobytes())
    content = run.tokens if run.chain is None else run.chain
    assert content is not None
    parts.append(content.tobytes())
    for extra in run.extras:
        parts += [struct.pack("<I", len(extra)), extra]
    return parts


def _read_parked(parts: _Parts, block_size: int, max_parked: int) -> ParkedBlocks:
    parked = ParkedBlocks(max_parked)
    (runs,) = parts.unpack("<I")
    for _ in range(runs):
        if not parked.park(_read_run(parts, block_size)):
            raise ValueError("dump of blocks: more is parked than may be")
    (dead,) = parts.unpack("<I")
    for _ in range(dead):
        name, tier = parts.unpack("<QB")
        parked.evict([name], tier)
        if (name, tier) not in parked.dead:
            raise ValueError("dump of blocks: a dead block was not parked")
    return parked


def _read_run(parts: _Parts, block_size: int) -> Run:
    parent, tier, told, has_extras, blocks, unit = parts.unpack("<QBBBII")
    may_chunk = tier > 0 and told != 1 and not has_extras and 1 < unit <= MAX_BLOCK_SIZE
    is_unit = unit == 1 or may_chunk
    if tier >= TIERS or told > 2 or has_extras > 1 or blocks == 0 or not is_unit:
        raise ValueError("dump of blocks: a parked run is malformed")
    run = Run(parts.array(blocks, np.uint64).tolist(), parent, tier, unit=unit)
    if told == 1:
        run.chain = parts.array(blocks, np.uint64)
    else:
        run.tokens = parts.array(blocks * unit * block_size, np.int64 if told else np.int32)
    if has_extras:
        run.extras = tuple(parts.take(parts.unpack("<I")[0]) for _ in range(blocks))
    return run


class _Parts:
    """Reads parts of a dump in order. Lifetime: one read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError("dump of blocks: it ends early")
        self.at += size
        return self._data[self.at - size : self.at]

    def unpack(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(code, self.take(struct.calcsize(code)))

    def array(self, count: int, dtype: type) -> npt.NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype=dtype)


__all__ = ["EventBatch", "WorkerBlocks"]


_INNER = 0x6B6E756863FF00FF


def inner_name(chain: int) -> int:
    """Return a name for a block within a chunk, for which the engine has none; chunks that begin
    alike share it.
    """
    return chain ^ _INNER


class Known(NamedTuple):
    """The block that has a name: its chain hash, and the set of tiers that hold the block. Bit t of
    the set stands for tier t.
    """

    chain: int
    tiers: int


class WorkerBlocks:
    """Applies one worker's KV events to the index. Lifetime: worker.

    Blocks have the names that the engine gives them; `names` and chain hashes are buffers of
    uint64, `tokens` of int32, or of int64 if one is beyond that. The index gets chain hashes: those
    given, or those computed from the tokens, starting from the parent's. A run of blocks whose
    parent is unknown is parked until the parent comes (at most `max_parked` blocks); a parked block
    that is removed meanwhile is never stored. A name that is stored again with another chain leaves
    the old one. Each tier has its own stores and removals; a name is known while any tier holds it.

    With `counts_copies`, a block that is stored again under its name in a tier that has it counts
    as another copy, and it stays until it was removed as often: vLLM keeps copies of equal blocks,
    and it reports blocks that several chunks in its host memory share once for each chunk. Without
    it, a repeated store changes nothing. Blocks that were parked are no copies, because it is
    unknown which of their stores and removals belong together.

    The counters only grow. `stored_blocks` and `removed_blocks` are those of tier 0, whose capacity
    says when a cache has turned over. `orphans` counts blocks that were parked, and `clears` the
    clear events in batches. `skipped_events` counts events without effect, and `skips` the same by
    reason: "other_group" or "other_block_size"; "unknown_names" without tokens; "masked" if the
    event says nothing else; "no_room" for orphans and blocks of groups. `own_size` counts the
    events that give blocks of tier 0 by tokens in blocks of this size, and `other_sizes` those in
    other sizes: (size, whole, perhaps unfinished). A single block that is smaller than ours may be
    the unfinished end of a prompt. If there are more than seven sizes, the last ones count as size
    0.

    Of a hybrid model's cache groups, the index gets the first one that is reported as full
    attention, and until then group 0; blocks without a group always count. Groups with a window or
    states are kept by name, for tier 0 alone, and `limit` says how much of a hit they allow. If no
    group has full attention, the events do not say where in a prompt their blocks are, and "masked"
    ones say nothing at all, unless `apply` is given what their names stand for. From then on the
    groups alone say how much of a chain can be reused.

    Outside tier 0 a name may stand for several blocks, a chunk (LMCache, 256 tokens): each block
    counts once for every chunk that has it, until these are removed. A chunk is useless if its size
    is no multiple of the block size or if it has extra keys ("chunk_size"). Chunks of hybrid models
    are useless, too, because they do not say to which group they belong ("other_group"). Raises
    IndexError for a worker the index does not have, ValueError for other bad arguments.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker: int,
        block_size: int,
        model: str,
        max_parked: int = 65536,
        counts_copies: bool = False,
    ) -> None:
        self._worker = _integer(worker, "worker")
        if not 0 <= self._worker < index.workers:
            raise IndexError(f"worker must be 0..{index.workers - 1}, got {worker}")
        self._index = index
        self._block_size = in_range(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        self._model = model
        self._parked = ParkedBlocks(in_range(max_parked, "max_parked", 0, 2**31 - 1))
        self._known: dict[int, Known] = {}
        self._counts_copies = counts_copies
        self._copies: list[Counter[int]] = [Counter() for _ in range(TIERS)]  # by tier
        self._chunks: dict[int, list[int]] = {}  # chain hashes of all their blocks but the last
        self._group = 0
        self._full_attention = False  # an event reported such a group, which is `_group`
        self._groups = CacheGroups()
        self._is_placed = False  # the blocks of windows alone have come with their places
        self._placed: dict[int, int] = {}  # in this call: chain hash by name
        self._windows_alone = False  # in this call
        self._is_hybrid = False
        # For a hybrid model: chain hash -> the name stored last of those that stand for it, until
        # it goes. After `load`, or when the worker becomes hybrid, it is the greatest of these
        # names.
        self._by_chain: dict[int, int] = {}
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.clears = 0
        self.orphans = 0
        self._skips: dict[str, int] = {}
        self.own_size = 0
        self._other_sizes: dict[int, list[int]] = {}
        self._left: list[int] = []  # chain hashes that left tier 0 in this call

    def apply(
        self, batch: EventBatch, names: Buffer | None = None, chain: Buffer | None = None
    ) -> npt.NDArray[np.uint64] | None:
        """Apply all events of a batch in order.

        `names` and `chain` say what blocks of windows without full attention stand for, as far as
        the caller computed it. Returns the chain hashes that thereby left tier 0, in order, or None
        if there are none.
        """
        self._left, self._placed, self._windows_alone = [], {}, batch.windows_alone
        if names is not None or chain is not None:
            placed, places = names_of(names), _buffer(chain, "chain", "uint64").tolist()
            if len(placed) != len(places):
                wanted = f"chain must be {len(placed)} hashes, one a name"
                raise ValueError(f"{wanted}, not {len(places)}")
            self._placed = dict(zip(placed, places, strict=True))
        for event in batch.listed():
            if event[0] == "stored":
                self._take_stored(*event[1:])
            elif event[0] == "removed":
                self._take_removed(*event[1:])
            else:
                self.clears += 1
                self.clear()
        return self._told_left()

    def store(self, names: Buffer, parent: int | None, chain: Buffer, tier: int = 0) -> None:
        """Store blocks whose chain hashes are known (replays, recordings), in order."""
        blocks, hashes = names_of(names), _buffer(chain, "chain", "uint64").copy()
        tier = in_range(tier, "tier", 0, TIERS - 1)
        if len(hashes) != len(blocks):
            raise ValueError(f"chain must be {len(blocks)} hashes, one a name, not {len(hashes)}")
        self._store(Run(blocks, parent_of(parent), tier, chain=hashes), seed=0)

    def store_tokens(
        self,
        names: Buffer,
        parent: int | None,
        tokens: Buffer,
        seed: int,
        tier: int = 0,
        extras: Sequence[bytes] = (),
    ) -> None:
        """Store blocks given by their tokens, in order; `seed` starts the chain if there is no
        parent.

        Without tokens the names must be known already, from another tier. `extras` are the bytes to
        hash after the tokens of each block, one for each block, or none at all. Outside tier 0 and
        without extras, each name may stand for the same number of blocks.
        """
        is_wide = isinstance(tokens, np.ndarray) and tokens.dtype == np.int64
        blocks = names_of(names)
        ids = _buffer(tokens, "tokens", "int64" if is_wide else "int32").copy()
        tier, seed = in_range(tier, "tier", 0, TIERS - 1), uint64(seed, "seed")
        a_name, unit = len(blocks) * self._block_size, 1
        if tier and not extras and a_name and not len(ids) % a_name:
            unit = max(len(ids) // a_name, 1)
        for what, got, wanted in (
            ("tokens", len(ids), a_name * unit),
            ("extras", len(extras), len(blocks)),
        ):
            if got not in (0, wanted):
                raise ValueError(f"{what} must be {wanted} or none at all, not {got}")
        run = Run(blocks, parent_of(parent), tier, tokens=ids, extras=tuple(extras), unit=unit)
        self._store_told(run, seed)

    def remove(self, names: Buffer, tier: int = 0) -> npt.NDArray[np.uint64] | None:
        """Remove these blocks from a tier; those that the tier does not have change nothing.
        Returns the same as `apply`.
        """
        self._left = []
        self._remove(names_of(names), in_range(tier, "tier", 0, TIERS - 1))
        return self._told_left()

    def clear(self) -> None:
        """Forget all blocks, also in the index; no counter changes."""
        self._forget_blocks()
        self._groups.forget()

    def limit(self, chain: Buffer, blocks: int) -> int:
        """Return how many of the chain's first `blocks` blocks, which full attention holds, can be
        reused.
        """
        if not self.is_hybrid:
            return blocks
        return self._groups.longest(names_of(chain), blocks, self._block_size, self._by_chain)

    @property
    def is_hybrid(self) -> bool:
        """Whether the worker has groups with windows or states, beside full attention or alone in
        known places.
        """
        return self._is_hybrid

    @property
    def has_full_attention(self) -> bool:
        """Whether an event has reported a group of full attention."""
        return self._full_attention

    def groups(self) -> list[tuple[int, str, int, int, int]]:
        """Return the groups with windows or states: (number, kind, window, block size, blocks
        held).
        """
        return [
            (number, one.kind, one.window, one.block_size, len(one.held))
            for number, one in self._groups.groups.items()
        ]

    def _name_chains(self) -> None:
        alone = self._is_placed and self._groups.judge(self._block_size)
        self._is_hybrid = bool(self._groups.groups) if self._full_attention else alone
        if self._is_hybrid:
            self._forget_chunks()
        names = sorted(self._known) if self._is_hybrid else ()
        self._by_chain = {self._known[name].chain: name for name in names}

    def _unname(self, chain: int, name: int) -> None:
        if self._by_chain.get(chain) == name:
            del self._by_chain[chain]

    def _forget_blocks(self) -> None:
        self._by_chain.clear()
        self._index.clear_worker(self._worker)
        self._known.clear()
        self._copies = [Counter() for _ in range(TIERS)]
        self._chunks = {}
        self._parked.clear()

    def chains(self, tier: int = 0) -> npt.NDArray[np.uint64]:
        """Return the chain hashes held in a tier as uint64, ascending, each once."""
        bit = 1 << in_range(tier, "tier", 0, TIERS - 1)
        held = {known.chain for known in self._known.values() if known.tiers & bit}
        return np.array(sorted(held), dtype=np.uint64)

    def dump(self) -> bytes:
        """Return everything but the counters, as bytes (`_written`)."""
        return self.frozen().dump()

    def frozen(self) -> FrozenBlocks:
        """Return a copy of the present contents, made at once, which a thread can dump."""
        contents = contents_of(
            *(self._group, self._full_attention, self._is_placed, self._known, self._copies),
            *(self._parked, self._groups, self._chunks),
        )
        return FrozenBlocks(self._block_size, self._model, contents)

    def load(self, data: Buffer) -> None:
        """Replace everything by what `dump` gave, in the index too; the counters continue.

        Raises ValueError, and changes nothing, for bytes that `dump` did not write for a worker of
        the same model and block size.
        """
        contents = read(data_bytes(data, "data"), self._block_size, self._model, self._parked.limit)
        self.clear()
        self._group, self._full_attention = contents.group, contents.full_attention
        self._is_placed = contents.is_placed
        self._parked, self._copies = contents.parked, [Counter(each) for each in contents.copies]
        self._groups, self._chunks = contents.groups, contents.chunks
        columns = (column.tolist() for column in contents[3:6])
        self._known = {name: Known(c, t) for name, c, t in zip(*columns, strict=True)}
        self._name_chains()
        for tier in range(TIERS):
            self._tell_stored(contents.chains[contents.tiers >> tier & 1 > 0].tolist(), tier)

    def __len__(self) -> int:
        """Return the number of names known in any tier."""
        return len(self._known)

    @property
    def parked(self) -> int:
        """The number of blocks that wait for their unknown parent."""
        return len(self._parked)

    @property
    def skipped_events(self) -> int:
        """The number of events that changed nothing."""
        return sum(self._skips.values())

    def skips(self) -> dict[str, int]:
        """Return the number of skipped events by reason."""
        return dict(self._skips)

    @property
    def other_size(self) -> int:
        """The number of events skipped for their block size."""
        return self._skips.get("other_block_size", 0)

    def other_sizes(self) -> list[tuple[int, int, int]]:
        """Return the events of tier 0 in blocks of other sizes: (size, whole, perhaps
        unfinished).
        """
        return [(size, whole, partial) for size, (whole, partial) in self._other_sizes.items()]

    @property
    def memory_bytes(self) -> int:
        """The bytes in use: a rough estimate here, exact in the native class."""
        return 200 * len(self._known) + 300 * len(self._parked)

    def _take_stored(
        self,
        names: npt.NDArray[np.uint64],
        parent: int | None,
        tokens: npt.NDArray[np.int32],
        block_size: int,
        tier: int,
        lora_name: str | None,
        salt: str | None,
        extras: tuple[bytes, ...],
        group: int | None,
        cache: str | None,
        window: int,
        masked: bool,
    ) -> None:
        number = group or 0
        if cache == "full" and not self._full_attention:
            self._full_attention = True
            if number != self._group or self._is_placed:  # earlier blocks belonged to another group
                self._group, self._is_placed = number, False
                self._forget_blocks()
            self._groups.groups.pop(number, None)
            self._name_chains()
        is_full = self._full_attention and number == self._group
        is_side = cache in ("window", "state") and not is_full and tier == 0
        if is_side:
            assert cache is not None
            one = Group(cache, window, block_size)
            if not self._groups.store(number, one, names.tolist(), self._counts_copies):
                self._skip("no_room")
            if not self._is_hybrid:
                self._name_chains()
        if group not in (None, self._group):
            if not is_side:
                self._skip("other_group")
            return
        if is_side and self._take_placed(names.tolist(), block_size, tier):
            return
        if masked and is_side and self._windows_alone:
            self._note_size(block_size, len(names))
        if masked:  # the places of its blocks in the prompt are unknown
            if len(names):
                self._skip("masked")
            return
        if len(tokens) and tier == 0:
            self._note_size(block_size, len(names))
        unit = 1
        if len(tokens) and block_size != self._block_size:
            if not tier:
                self._skip("other_block_size")
                return
            if block_size % self._block_size or extras:
                self._skip("chunk_size")
                return
            unit = block_size // self._block_size
        run = Run(names.tolist(), parent, tier, tokens=tokens, extras=extras, unit=unit)
        self._store_told(run, chain_seed(self._model, lora_name, salt))

    def _take_placed(self, names: list[int], block_size: int, tier: int) -> bool:
        """Store blocks of windows alone whose places the caller computed; return False if it
        computed none.
        """
        known = [name for name in names if name in self._placed]
        if self._full_attention or block_size != self._block_size or not known:
            return False
        if len(known) < len(names):
            self._skip("masked")
        self.own_size += 1
        if not self._is_placed:
            self._is_placed = True
            self._name_chains()
        chain = np.array([self._placed[name] for name in known], dtype=np.uint64)
        self._store(Run(known, None, tier, chain=chain), 0)
        return True

    def _take_removed(self, names: npt.NDArray[np.uint64], tier: int, group: int | None) -> None:
        counts = group in (None, self._group)
        if counts:
            self._remove(names.tolist(), tier)
        if tier == 0 and not (counts and self._full_attention):
            self._groups.remove(group or 0, names.tolist())

    def _skip(self, why: str) -> None:
        self._skips[why] = self._skips.get(why, 0) + 1

    def _note_size(self, size: int, blocks: int) -> None:
        if size == self._block_size:
            self.own_size += 1
            return
        sizes = self._other_sizes
        if size not in sizes and len(sizes) >= MOST_SIZES - 1:
            size_told, size = size, 0
            counts = sizes.setdefault(0, [0, 0])
            counts[blocks == 1 and size_told < self._block_size] += 1
            return
        sizes.setdefault(size, [0, 0])[blocks == 1 and size < self._block_size] += 1

    def _store_told(self, run: Run, seed: int) -> None:
        assert run.tokens is not None
        places = self._chunks if run.unit > 1 else self._known
        elsewhere = run.tier > 0 and all(name in places for name in run.names)
        if (len(run.tokens) and not elsewhere) or not run.names:
            self._store(run, seed)
            return
        known = [name for name in run.names if name in self._known]
        if len(known) < len(run.names):
            self._skip("unknown_names")
        self._parked.revive(known, run.tier)
        chains = [self._known[name].chain for name in known]
        self._hold(known, chains, run.tier, self._counts_copies)

    def _store(self, run: Run, seed: int) -> None:
        if not run.names:
            return
        self._parked.revive(run.names, run.tier)
        queue, held, counts = [run], list[Run](), self._counts_copies
        while queue:  # a parent that arrives late brings its parked descendants along
            run = queue.pop()
            if run.unit > 1 and self._groups.groups:  # their group is unknown
                self._skip("other_group")
                held.append(run)
                continue
            if run.parent is not None:
                parent = self._known.get(run.parent)
                if parent is None:
                    self._park(run)
                    continue
                seed = parent.chain
            if run.unit > 1:
                self._hold_chunks(run, seed, counts)
            else:
                self._hold(run.names, self._chain(run, seed), run.tier, counts)
            counts = False
            held.append(run)
            queue += self._parked.wake(run.names)
        for run in held:  # at the end: a block may be in several runs
            self._drop(self._parked.take_dead(run.names, run.tier), run.tier)

    def _chain(self, run: Run, seed: int) -> list[int]:
        """Return the chain hashes of the run's blocks.

        Outside tier 0 a known name keeps its chain, because vLLM leaves out salts and images there.
        """
        if run.chain is not None:
            return [int(block) for block in run.chain]
        chain: list[int] = []
        for i, name in enumerate(run.names):
            known = self._known.get(name) if run.tier else None
            seed = _hashed(run, i, self._block_size, seed) if known is None else known.chain
            chain.append(seed)
        return chain

    def _hold_chunks(self, run: Run, seed: int, counts_copies: bool) -> None:
        """Store chunks: a chunk's name stands for its last block, and each block before that counts
        once for every chunk that has it.
        """
        for i, name in enumerate(run.names):
            known, is_new = self._known.get(name), name not in self._chunks
            chain: list[int] = []
            for block in range(i * run.unit, (i + 1) * run.unit) if is_new else ():
                seed = _hashed(run, block, self._block_size, seed)
                chain.append(seed)
            seed = chain[-1] if known is None else known.chain
            self._hold([name], [seed], run.tier, counts_copies)
            if is_new:
                self._chunks[name] = chain[:-1]
                self._hold_inner(name, run.tier)

    def _hold_inner(self, chunk: int, tier: int) -> None:
        chain = self._chunks.get(chunk, []) if tier else []
        self._hold([inner_name(block) for block in chain], chain, tier, counts_copies=True)

    def _drop_inner(self, chunk: int, tier: int) -> None:
        chain = self._chunks.get(chunk, []) if tier else []
        self._drop([inner_name(block) for block in chain], tier)

    def _forget_chunks(self) -> None:
        """Forget all chunks. Cache groups cannot limit hits on their blocks, because the engine's
        names for these are unknown.
        """
        for chunk in list(self._chunks):
            for tier in range(1, TIERS):
                self._copies[tier].pop(chunk, None)
                self._drop([chunk], tier)
        self._chunks.clear()

    def _park(self, run: Run) -> None:
        if self._parked.park(run):
            self.orphans += len(run.names)
        else:
            self._skip("no_room")

    def _hold(
        self, names: Sequence[int], chain: Iterable[int], tier: int, counts_copies: bool
    ) -> None:
        """Store the blocks one after another; a name that stood for another block before loses that
        block first.
        """
        pending: list[int] = []
        for name, block in zip(names, chain, strict=True):
            known = self._known.get(name, Known(block, 0))
            if known.chain != block:
                self._tell_stored(pending, tier)
                pending = []
                self._unname(known.chain, name)
                self._leave(known)
                for copies in self._copies:
                    copies.pop(name, None)
                for held in range(1, TIERS):
                    if known.tiers >> held & 1:
                        self._drop_inner(name, held)
                self._chunks.pop(name, None)
                known = Known(block, 0)
            elif counts_copies and known.tiers >> tier & 1:
                self._copies[tier][name] += 1
            self._known[name] = Known(block, known.tiers | 1 << tier)
            if self._is_hybrid:
                self._by_chain[block] = name
            pending.append(block)
            if not known.tiers >> tier & 1:
                self._hold_inner(name, tier)
        self._tell_stored(pending, tier)
        self.stored_blocks += 0 if tier else len(names)

    def _leave(self, known: Known) -> None:
        for tier in range(TIERS):
            if known.tiers >> tier & 1:
                self._tell_removed([known.chain], tier)

    def _remove(self, names: Sequence[int], tier: int) -> None:
        self._parked.evict(names, tier)
        self._drop(names, tier)

    def _drop(self, names: Sequence[int], tier: int) -> None:
        gone: list[int] = []
        for name in names:
            known = self._known.get(name)
            if known is None or not known.tiers >> tier & 1:
                continue
            if name in self._copies[tier]:
                self._copies[tier] -= Counter([name])
                self.removed_blocks += tier == 0
                continue
            gone.append(known.chain)
            left = known.tiers & ~(1 << tier)
            self._known[name] = Known(known.chain, left)
            if not left:
                self._unname(known.chain, name)
                del self._known[name]
            self._drop_inner(name, tier)
            if not left:
                self._chunks.pop(name, None)
        self._tell_removed(gone, tier)

    def _tell_stored(self, chain: Sequence[int], tier: int) -> None:
        if chain:
            self._index.store(self._worker, array("Q", chain), tier)

    def _tell_removed(self, chain: Sequence[int], tier: int) -> None:
        if chain:
            self._index.remove(self._worker, array("Q", chain), tier)
        if tier == 0:
            self.removed_blocks += len(chain)
            self._left += chain

    def _told_left(self) -> npt.NDArray[np.uint64] | None:
        return np.array(self._left, dtype=np.uint64) if self._left else None


class HybridWorkers:
    """The workers whose models have hybrid caches, each with its blocks. Lifetime: process."""

    def __init__(self, workers: int) -> None:
        self._workers = in_range(workers, "workers", 1, 4096)
        self._blocks: dict[int, WorkerBlocks] = {}

    def set(self, worker: int, blocks: WorkerBlocks | None) -> None:
        """Make these blocks limit the worker's hits, or remove the limit if `blocks` is None."""
        slot = in_range(worker, "worker", 0, self._workers - 1)
        if blocks is None:
            self._blocks.pop(slot, None)
        else:
            self._blocks[slot] = blocks

    def limit(self, chain: Buffer, hits: npt.NDArray[np.int32], most: int) -> None:
        """Lower `hits`, int32[workers], from the leading blocks that full attention holds to what
        each of these workers can reuse, at most `most`.

        For workers without full attention, the present value of `hits` does not count.
        """
        for slot, blocks in self._blocks.items():
            told = int(hits[slot]) if blocks.has_full_attention else len(names_of(chain))
            hits[slot] = blocks.limit(chain, min(told, most))

    def __len__(self) -> int:
        """Return the number of workers with hybrid caches."""
        return len(self._blocks)


def _hashed(run: Run, i: int, block_size: int, seed: int) -> int:
    """Return the chain hash of the run's block `i`, computed from its tokens."""
    assert run.tokens is not None
    tokens = run.tokens[i * block_size : (i + 1) * block_size]
    if run.extras:
        data = seed.to_bytes(8, "little") + block_bytes(tokens) + run.extras[i]
        return xxhash.xxh3_64_intdigest(data)
    hashes = wide_chain_hashes if tokens.dtype == np.int64 else chain_hashes
    return int(hashes(tokens.copy().data, block_size, seed)[0])
