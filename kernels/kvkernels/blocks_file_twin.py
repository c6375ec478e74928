"""One worker's blocks as bytes and back, the same bytes as the native code writes.

Little-endian: "kvwb"; version (uint32); block size (uint32); XXH3-64 of the model's name; the cache
group that counts (uint32) and whether it was told to be one of full attention (uint8); the number
of names (uint64) and as many names (uint64, ascending), chain hashes (uint64), tiers (uint8, bit t:
held in tier t); the number of parked runs (uint32) and each run's parent (uint64), tier, whether it
has chain hashes, whether it has extras (uint8 each), number of blocks (uint32), their names, and
their chain hashes or their tokens (int32), and of extras for each block its length (uint32) and the
bytes; the number of parked blocks that were evicted (uint32) and the name (uint64) and tier (uint8)
of each; XXH3-64 of all this.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvkernels.batch_twin import MAX_RANK
from kvkernels.parked_twin import ParkedBlocks, Run

_MAGIC = b"kvwb"
_VERSION = 1
TIERS = 3


class Contents(NamedTuple):
    """What a dump holds; the three arrays are of equal length, names ascending."""

    group: int
    full_attention: bool
    names: npt.NDArray[np.uint64]
    chains: npt.NDArray[np.uint64]
    tiers: npt.NDArray[np.uint8]
    parked: ParkedBlocks


def contents_of(
    group: int,
    full_attention: bool,
    known: Mapping[int, tuple[int, int]],
    parked: ParkedBlocks,
) -> Contents:
    """A copy of what is known: chain hash and tiers by name, and what is parked."""
    rows = sorted((name, chain, tiers) for name, (chain, tiers) in known.items())
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3).T
    tiers = columns[2].astype(np.uint8)
    return Contents(group, full_attention, columns[0], columns[1], tiers, deepcopy(parked))


class FrozenBlocks(NamedTuple):
    """One worker's blocks as of a moment. Lifetime: one dump."""

    block_size: int
    model: str
    contents: Contents

    def dump(self) -> bytes:
        """What `WorkerBlocks.dump` gave at that moment."""
        return _written(self.block_size, self.model, self.contents)


def _written(block_size: int, model: str, contents: Contents) -> bytes:
    head = struct.pack(
        "<IIQIBQ",
        *(_VERSION, block_size, xxhash.xxh3_64_intdigest(model.encode())),
        *(contents.group, contents.full_attention, len(contents.names)),
    )
    parts = [_MAGIC, head]
    parts += [contents.names.tobytes(), contents.chains.tobytes(), contents.tiers.tobytes()]
    runs = [run for _, waiting in sorted(contents.parked.runs.items()) for run in waiting]
    parts.append(struct.pack("<I", len(runs)))
    for run in runs:
        parts += _run_parts(run)
    parts.append(struct.pack("<I", len(contents.parked.dead)))
    parts += [struct.pack("<QB", *name) for name in sorted(contents.parked.dead)]
    body = b"".join(parts)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def read(data: bytes, block_size: int, model: str, max_parked: int) -> Contents:
    """What is in a dump. ValueError for anything that `written` did not write for such a worker."""
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
    group, full_attention, count = parts.unpack("<IBQ")
    names = parts.array(count, np.uint64)
    chains = parts.array(count, np.uint64)
    tiers = parts.array(count, np.uint8)
    legal = ((tiers >= 1) & (tiers < 1 << TIERS)).all() and (names[1:] > names[:-1]).all()
    if group > MAX_RANK or full_attention > 1 or not legal:
        raise ValueError("dump of blocks: its names are malformed")
    parked = _read_parked(parts, block_size, max_parked)
    if parts.at != len(body):
        raise ValueError("dump of blocks: more bytes follow it")
    return Contents(group, bool(full_attention), names, chains, tiers, parked)


def _run_parts(run: Run) -> list[bytes]:
    assert run.parent is not None
    flags = (run.chain is not None, bool(run.extras))
    parts = [struct.pack("<QBBBI", run.parent, run.tier, *flags, len(run.names))]
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
    parent, tier, has_chain, has_extras, blocks = parts.unpack("<QBBBI")
    if tier >= TIERS or has_chain > 1 or has_extras > 1 or blocks == 0:
        raise ValueError("dump of blocks: a parked run is malformed")
    run = Run(parts.array(blocks, np.uint64).tolist(), parent, tier)
    if has_chain:
        run.chain = parts.array(blocks, np.uint64)
    else:
        run.tokens = parts.array(blocks * block_size, np.int32)
    if has_extras:
        run.extras = tuple(parts.take(parts.unpack("<I")[0]) for _ in range(blocks))
    return run


class _Parts:
    """Reads bytes in order. Lifetime: one read."""

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
