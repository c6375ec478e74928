"""The paged KV cache of one worker: one tensor, reached through strides, quantized or not.

The physical order is (block, head, layer, K or V, token, dim): one block of one head is one run of
bytes over all layers, so that a transfer to a worker with other shards copies whole runs. `HostKv`
keeps blocks that the cache evicts. `KvMemory` is the memory of all ranks for transfers between
workers.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from engine.model.config import KV_ALIGNMENT_BYTES, ModelConfig, ModelError, Shard
from engine.wire.kv_transfer import Form, Place, Pool, Welcome
from kvkernels.ops.relayout import (
    CopyPlan,
    PoolLayout,
    as_bytes,
    moves,
    pieces,
    plan,
)

_SHARED = re.compile(r"(/proc/[0-9]{1,10}/fd/[0-9]{1,10})#(warmroute-kv-[0-9a-f]{16})")
SCALES = torch.float32
FP8 = torch.float8_e4m3fn


def kv_storage(config: ModelConfig, kv: str, device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a model of `dtype` stores K and V with the setting `kv`. Raises
    ModelError for a head_dim whose rows are not aligned, and for fp8 if torch cannot convert to it
    on `device`.
    """
    if kv == "auto":
        return dtype
    if config.head_dim % KV_ALIGNMENT_BYTES:
        raise ModelError(
            config.path,
            f"head_dim {config.head_dim} is no multiple of {KV_ALIGNMENT_BYTES}, which "
            f"kv_dtype {kv} needs",
            "serve it with kv_dtype auto",
        )
    if kv == "int8":
        return torch.int8
    if kv != "fp8":
        raise ValueError(f"kv_dtype {kv!r:.40} is unknown")
    try:
        torch.ones(1, device=device).to(FP8).float()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ModelError(
            config.path,
            f"kv_dtype fp8: torch has no {FP8} on {device} ({error!s:.120})",
            "serve it with kv_dtype int8 or auto",
        ) from error
    return FP8


def largest(storage: torch.dtype) -> float:
    """Return the number that quantization maps a row's absolute maximum to: 127 for INT8, 448 for
    FP8.
    """
    return 127.0 if storage == torch.int8 else float(torch.finfo(storage).max)


def quantize(x: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., dim] to `storage` of the same shape, with float32 scales [...]; NaN stays
    NaN by its scale.

    Errors are at most scale / 2 in INT8; in FP8 at most |x| / 16, or scale * 2**-10 near zero.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    limit = largest(storage)
    scales = (wide.abs().amax(-1) / limit).to(SCALES)
    # A row of zeros has a scale that zeros can be divided by.
    scales = scales.clamp_min(torch.finfo(SCALES).tiny)
    units = (wide / scales.to(wide.dtype).unsqueeze(-1)).clamp(-limit, limit)
    return (units.round() if storage == torch.int8 else units).to(storage), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return values [..., dim] and scales [...] as numbers in `wide`."""
    return values.to(wide) * scales.to(wide).unsqueeze(-1)


def _shared_zeros(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, str]:
    """Return shared memory of zeros, and the name `path#name` by which processes of the same host
    and user map it.

    The memory has no file name of its own, so it is freed when the last process closes it. The name
    is checked, because on another host the path may be that of another worker's memory.
    """
    name = f"warmroute-kv-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, prod(shape) * dtype.itemsize)
    with os.fdopen(os.dup(descriptor), "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    tensor = torch.frombuffer(memory, dtype=dtype).view(*shape)
    weakref.finalize(memory, os.close, descriptor)
    return tensor, f"/proc/{os.getpid()}/fd/{descriptor}#{name}"


def mapped(file: str, size: int, *, writable: bool) -> torch.Tensor:
    """Return uint8[size] of memory that `_shared_zeros` made in another process.

    If it is not `writable`, writes go to private copies of pages. Raises OSError, and ValueError
    for another file or size.
    """
    found = _SHARED.fullmatch(file)
    if found is None:
        raise ValueError(f"{file!r:.80} is no KV cache's memory")
    with open(found[1], "r+b" if writable else "rb") as opened:
        name = os.readlink(f"/proc/self/fd/{opened.fileno()}")
        if name != f"/memfd:{found[2]} (deleted)":
            raise ValueError(f"{found[1]} is {name!r:.80}, not the memory that was told of")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        memory = mmap.mmap(opened.fileno(), 0, access=access)
    if len(memory) != size:
        raise ValueError(f"{file} has {len(memory)} bytes of KV, {size} were told of")
    return torch.frombuffer(memory, dtype=torch.uint8)


class LayerKv(NamedTuple):
    """The K and V of one layer, as views [block, token, head, dim]; the last block is scratch."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None  # [block, token, head] where the cache is quantized
    v_scales: torch.Tensor | None = None


class KvCache:
    """The KV of `blocks` blocks of `block_size` tokens, for one shard.

    Lifetime: worker. One additional block takes the writes of padding, so that slot -1 needs no
    branch. With `kv` auto, K and V are stored in `dtype`; int8 and fp8 store one byte an element
    with a scale per token and head. With `shared`, other processes of this host can map the memory,
    by the names in `files` (CPUs on Linux). Raises ValueError if there are no blocks, ModelError if
    `kv` is not supported here.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: Shard | None = None,
        kv: str = "auto",
        shared: bool = False,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens are no cache")
        shard = shard or Shard()
        heads = shard.kv_heads(config.kv_heads)
        own_layers = len(shard.layers(config.layers))
        self.blocks, self.block_size = blocks, block_size
        shape = (blocks + 1, heads.stop - heads.start, own_layers, 2, block_size)
        storage = kv_storage(config, kv, device, dtype)
        # Zeros: unwritten memory is masked, but must not be NaN.
        self.files = ("", "")  # of pool and scales
        self.scales: torch.Tensor | None = None
        self._layers: list[LayerKv] = []  # once made: kernels keep how they lie
        if shared:
            self.pool, pool_file = _shared_zeros((*shape, config.head_dim), storage)
            scales_file = ""
            if kv != "auto":
                self.scales, scales_file = _shared_zeros(shape, SCALES)
            self.files = pool_file, scales_file
            return
        self.pool = torch.zeros((*shape, config.head_dim), dtype=storage, device=device)
        if kv != "auto":
            self.scales = torch.zeros(shape, dtype=SCALES, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and its scales, with the scratch block."""
        return self.pool.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def layer(self, number: int) -> LayerKv:
        """Return the K and V of the shard's layer `number`, counted from the shard's
        first layer.
        """
        if not self._layers:
            self._layers = [self._views(one) for one in range(self.pool.shape[2])]
        return self._layers[number]

    def _views(self, number: int) -> LayerKv:
        both = self.pool[:, :, number]
        k, v = both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)
        if self.scales is None:
            return LayerKv(k, v)
        scales = self.scales[:, :, number]
        return LayerKv(k, v, scales[:, :, 0].transpose(1, 2), scales[:, :, 1].transpose(1, 2))


class Moves(NamedTuple):
    """Full blocks to copy from a cache into host memory (`to_host`), or back. `block_ids` of the
    cache and `host_ids` correspond one to one. Lifetime: one copy.
    """

    to_host: bool
    block_ids: Sequence[int]
    host_ids: Sequence[int]


class HostKv:
    """Host memory for at most `blocks` blocks of the cache `kv`.

    Lifetime: worker. A block is one run of bytes, so it is moved by one copy, and its scales by
    another. On a GPU each direction of copies has a stream of its own, beside the stream that
    computes. Raises RuntimeError if CUDA cannot pin the memory.
    """

    def __init__(self, kv: KvCache, blocks: int) -> None:
        parts = [kv.pool] if kv.scales is None else [kv.pool, kv.scales]
        rows = [as_bytes(part).view(len(part), -1) for part in parts]
        self._pairs = [(row, torch.empty((blocks, row.shape[1]), dtype=row.dtype)) for row in rows]
        self._streams: list[torch.cuda.Stream] = []  # from the host, to the host
        if kv.pool.is_cuda:
            for _, host in self._pairs:
                _pin(host)
            for _ in range(2):
                stream = torch.cuda.Stream(kv.pool.device)  # type: ignore[no-untyped-call]
                self._streams.append(stream)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks with their scales."""
        return sum(host.nbytes for _, host in self._pairs)

    def move(self, moves: Moves) -> None:
        """Copy these blocks, and wait until that is done. No unfinished step may write to them. One
        thread may copy in each direction at a time, if the two threads copy different blocks.
        """
        stream = self._streams[moves.to_host] if self._streams else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for cache, host in self._pairs:
                source, target = (cache, host) if moves.to_host else (host, cache)
                ids = moves.block_ids, moves.host_ids
                sources, targets = ids if moves.to_host else ids[::-1]
                for at, to in zip(sources, targets, strict=True):
                    target[to].copy_(source[at], non_blocking=True)
        if stream is not None:
            stream.synchronize()


def _pin(memory: torch.Tensor) -> None:
    """Pin `memory` in place; torch's own pinned memory would take the next power of two."""
    if not memory.nbytes:
        return
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if status != cudart.cudaError.success:
        raise RuntimeError(
            f"CUDA cannot pin {memory.nbytes} bytes of host memory (error {int(status)}): lower "
            "host_kv_tokens, or raise the limit of locked memory"
        )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's KV as bytes. Lifetime: worker."""

    layout: PoolLayout
    bytes: torch.Tensor  # int8
    scales: torch.Tensor | None  # int8
    files: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, config: ModelConfig, kv: KvCache, shard: Shard | None = None) -> RankMemory:
        """Return the memory of a cache in this process."""
        scales = None if kv.scales is None else as_bytes(kv.scales)
        layout = layout_of(config, kv.blocks, kv.block_size, kv.pool.element_size(), shard)
        return cls(layout, as_bytes(kv.pool), scales, kv.files)

    @classmethod
    def at(cls, layout: PoolLayout, files: tuple[str, str], *, writable: bool) -> RankMemory:
        """Return the memory of a cache in another process. Raises OSError or ValueError."""
        pool = mapped(files[0], layout.bytes, writable=writable)
        scales = None
        if files[1]:
            size = _of_scales(layout).bytes
            scales = as_bytes(mapped(files[1], size, writable=writable))
        return cls(layout, as_bytes(pool), scales, files)

    def parts(self) -> list[tuple[PoolLayout, torch.Tensor]]:
        """Return the pool, and its scales if it has some."""
        found = [(self.layout, self.bytes)]
        return found if self.scales is None else [*found, (_of_scales(self.layout), self.scales)]


def layout_of(
    config: ModelConfig, blocks: int, block_size: int, itemsize: int, shard: Shard | None = None
) -> PoolLayout:
    """Return the layout of a `KvCache` with its scratch block."""
    shard = shard or Shard()
    heads = shard.kv_heads(config.kv_heads)
    return PoolLayout(
        shard.layers(config.layers),
        range(heads.start, heads.stop),
        blocks + 1,
        block_size,
        config.head_dim * itemsize,
    )


def _of_scales(layout: PoolLayout) -> PoolLayout:
    return replace(layout, row_bytes=SCALES.itemsize)


class KvMemory:
    """Gives code outside the model access to a worker's KV, for reading and writing.

    Lifetime: worker. `plan` and `moves` check their arguments: a block that no pool has raises
    ValueError. `before_write` waits, in the writing thread, until the blocks' evicted contents are
    saved.
    """

    copies = True

    def __init__(self, form: Form, ranks: Sequence[RankMemory], shows_files: bool = False) -> None:
        """Give access to the memory of these ranks. If `shows_files` is True, other workers of this
        host may map the memory.
        """
        self.form = form
        self.block_tokens = ranks[0].layout.block_tokens
        self._ranks = ranks
        self._sent_rows = (form.row_bytes, *([form.scale_bytes] if form.scale_bytes else []))
        self.pools = [_shown(rank) for rank in ranks if shows_files and rank.files[0]]
        self.before_write: Callable[[], None] = _no_wait

    def size(self, blocks: int) -> int:
        """Return the bytes of this many blocks of the whole model."""
        return sum(layout.bytes for layout in self._sent(blocks, self.block_tokens))

    def pack(self, block_ids: Sequence[int]) -> memoryview:
        """Return these blocks of all ranks in the order of `relayout.AXES`, values before
        scales.
        """
        tokens = len(block_ids) * self.block_tokens
        sent = self._sent(len(block_ids), self.block_tokens)
        buffers = [torch.empty(layout.bytes, dtype=torch.int8) for layout in sent]
        for number, (layout, buffer) in enumerate(zip(sent, buffers, strict=True)):
            own = [rank.parts()[number] for rank in self._ranks]
            place = range(len(block_ids))
            _copy(own, [(layout, buffer)], block_ids, place, range(tokens))
        return torch.cat(buffers).numpy().data.cast("B")

    def put(
        self, data: bytes, block_tokens: int, first_block: int, blocks: int, place: Place
    ) -> None:
        """Write the blocks that another worker's `pack` returned."""
        sent = self._sent(blocks, block_tokens)
        if len(data) != sum(layout.bytes for layout in sent):
            raise ValueError(f"{len(data)} bytes are not the KV of {blocks} blocks")
        self.before_write()
        memory, at = torch.frombuffer(bytearray(data), dtype=torch.int8), 0
        source_ids = [0] * first_block + list(range(blocks))
        for number, layout in enumerate(sent):
            part = memory[at : at + layout.bytes]
            at += layout.bytes
            own = [rank.parts()[number] for rank in self._ranks]
            _copy([(layout, part)], own, source_ids, place.block_ids, range(*place[1:]))

    def copy(self, welcome: Welcome, place: Place) -> int:
        """Copy blocks directly from the mapped memory of another worker; return the number of bytes
        copied.
        """
        theirs = [self._theirs(pool, welcome.block_tokens) for pool in welcome.pools]
        tokens = range(place.start, place.stop)
        self.before_write()
        for number in range(len(self._sent_rows)):
            source = [rank.parts()[number] for rank in theirs]
            own = [rank.parts()[number] for rank in self._ranks]
            _copy(source, own, welcome.block_ids, place.block_ids, tokens)
        return self.size(1) * len(tokens) // self.block_tokens

    def _theirs(self, pool: Pool, block_tokens: int) -> RankMemory:
        layout = PoolLayout(
            range(*pool.layers), range(*pool.heads), pool.blocks, block_tokens,
            self.form.row_bytes, pool.order,
        )  # fmt: skip
        return RankMemory.at(layout, (pool.file, pool.scales_file), writable=False)

    def _sent(self, blocks: int, block_tokens: int) -> list[PoolLayout]:
        """Return the layouts of the bytes that another worker sends, as if they were pools of the
        whole model.
        """
        layers, heads = range(self.form.layers), range(self.form.heads)
        return [PoolLayout(layers, heads, blocks, block_tokens, row) for row in self._sent_rows]


def _no_wait() -> None:
    """Do nothing, in a worker that saves no evicted blocks."""


_Parts = Sequence[tuple[PoolLayout, torch.Tensor]]


def _copy(
    sources: _Parts,
    targets: _Parts,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    tokens: range,
) -> None:
    """Copy `tokens` to every target pool, each part from the source pools that have it."""
    layouts = tuple(layout for layout, _ in sources)
    for rank, (layout, memory) in enumerate(targets):
        for source, made in _plans(layouts, layout, rank):
            at = moves(made, source_ids, target_ids, tokens)
            torch.ops.warmroute.copy_runs(sources[source][1], memory, made.runs, at)


@lru_cache(maxsize=256)
def _plans(
    sources: tuple[PoolLayout, ...], target: PoolLayout, rank: int
) -> tuple[tuple[int, CopyPlan], ...]:
    """Return the copy plans, which are the same for every request between the same pools."""
    found = pieces(sources, target, rank)
    return tuple((one.source, plan(sources[one.source], target, one)) for one in found)


def _shown(rank: RankMemory) -> Pool:
    layout = rank.layout
    return Pool(
        (layout.layers.start, layout.layers.stop),
        (layout.heads.start, layout.heads.stop),
        layout.blocks,
        layout.order,
        *rank.files,
    )
