"""Plans which bytes to copy when KV moves between pools of different shards, sizes or orders.

    layouts = [PoolLayout(...) of every source rank]
    for piece in pieces(layouts, mine, rank):            # once per topology
        made = plan(layouts[piece.source], mine, piece)
        at = moves(made, source_blocks, target_blocks, range(tokens))  # once per request
        copy_runs(as_bytes(source), as_bytes(target), made.runs, at)

Tokens move in units: the largest number of tokens that divides both block sizes. A plan has the
runs of one unit; where a unit is a whole block in both pools, neighbouring runs become one. A
buffer is a pool, too: gathering blocks is a plan between a layout and itself with fewer blocks.

`torch.ops.warmroute.copy_runs(source, target, runs, moves)` (kernel: `cuda/copy_runs.cuh`):

    source, target  int8[bytes]: whole pools as bytes, see `as_bytes`
    runs            int64[R, 3]: offset in source, offset in target, length, in bytes
    moves           int64[M, 2]: what to add to every run's offsets; a negative one: no copy

Runs of `target` must not overlap each other or what is read. On CUDA what would leave a pool is not
copied; on CPUs it raises ValueError. One launch; runs at multiples of 16 bytes are copied as such,
those of 4 as those, else byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvkernels.ops.operator import define

Ints = npt.NDArray[np.int64]

AXES = ("block", "head", "layer", "kv", "token")
RUN_BYTES = 16 << 10  # what one CTA has in flight
MAX_ROWS = 1 << 22  # rows (head, layer, kv, token) of one unit


@dataclass(frozen=True)
class PoolLayout:
    """The part of the KV that one worker has, and its order in memory.

    Raises ValueError for invalid values. `layers` and `heads` are numbers in the whole model, in
    steps of 1. A row is `row_bytes` of one token's K or V of one head: head_dim times the element's
    size; 4 for a pool of scales. `order` has the axes from outermost to innermost; rows are inside
    the last one.
    """

    layers: range
    heads: range
    blocks: int
    block_tokens: int
    row_bytes: int
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order {self.order} is no order of {AXES}")
        for name, owned in (("layers", self.layers), ("heads", self.heads)):
            if owned.step != 1 or not owned or owned.start < 0:
                raise ValueError(f"{name} {owned} is no run of numbers from 0 on")
        for name, number in (
            ("blocks", self.blocks),
            ("block_tokens", self.block_tokens),
            ("row_bytes", self.row_bytes),
        ):
            if number < 1:
                raise ValueError(f"{name} {number} is below 1")

    def shape(self) -> tuple[int, ...]:
        """Return the size of each axis, in `order`, without rows."""
        count = {
            "block": self.blocks,
            "head": len(self.heads),
            "layer": len(self.layers),
            "kv": 2,
            "token": self.block_tokens,
        }
        return tuple(count[axis] for axis in self.order)

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the whole pool."""
        return prod(self.shape()) * self.row_bytes

    def strides(self) -> dict[str, int]:
        """Return, for each axis, the number of bytes from one item to the next."""
        steps, step = {}, self.row_bytes
        for axis, size in zip(reversed(self.order), reversed(self.shape()), strict=True):
            steps[axis] = step
            step *= size
        return steps


class Piece(NamedTuple):
    """The layers and heads that a target pool gets from one source pool."""

    source: int
    layers: range
    heads: range


def pieces(sources: Sequence[PoolLayout], target: PoolLayout, target_rank: int) -> list[Piece]:
    """Return the pieces of KV that `target` gets, each with the source that it comes from.

    Sources that have the same KV take turns by `target_rank`. Raises ValueError if the sources do
    not have all that the target has, or have parts of it in different cuts.
    """
    same: dict[tuple[range, range], list[int]] = {}
    for number, source in enumerate(sources):
        same.setdefault((source.layers, source.heads), []).append(number)
    found = []
    for (own_layers, own_heads), holders in same.items():
        layers, heads = _common(own_layers, target.layers), _common(own_heads, target.heads)
        if layers and heads:
            found.append(Piece(holders[target_rank % len(holders)], layers, heads))
    held = sum(len(piece.layers) * len(piece.heads) for piece in found)
    wanted = len(target.layers) * len(target.heads)
    if held != wanted:
        raise ValueError(
            f"the sources hold {held} of the target's {wanted} (layer, head) pairs, each counted "
            "as often as cuts of it differ: name every rank of one topology"
        )
    return found


class CopyPlan(NamedTuple):
    """The runs of bytes to copy for one unit of tokens between two pools. Lifetime: as long as both
    layouts hold.
    """

    source: PoolLayout
    target: PoolLayout
    unit_tokens: int
    runs: torch.Tensor  # int64[R, 3], see above; on the CPU


def plan(source: PoolLayout, target: PoolLayout, piece: Piece | None = None) -> CopyPlan:
    """Return the plan that copies one unit of `piece` from source to target; None for `piece` means
    all layers and heads that both have. Raises ValueError for layouts of different rows, or that
    have nothing in common.
    """
    if source.row_bytes != target.row_bytes:
        raise ValueError(
            f"rows of {source.row_bytes} and {target.row_bytes} bytes: KV of another dtype or "
            "head_dim has to be computed, not copied"
        )
    layers = piece.layers if piece else _common(source.layers, target.layers)
    heads = piece.heads if piece else _common(source.heads, target.heads)
    for owner in (source, target):
        if _common(owner.layers, layers) != layers or _common(owner.heads, heads) != heads:
            raise ValueError(f"layers {layers} and heads {heads} are not all in {owner}")
    unit = gcd(source.block_tokens, target.block_tokens)
    rows = len(heads) * len(layers) * 2 * unit
    if not 0 < rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows are to be copied for each unit: 1 to {MAX_ROWS} can be")
    index = np.indices((len(heads), len(layers), 2, unit)).reshape(4, rows)
    offsets = [_offsets(owner, heads, layers, index) for owner in (source, target)]
    order = np.argsort(offsets[1])
    runs = _merged(offsets[0][order], offsets[1][order], source.row_bytes)
    return CopyPlan(source, target, unit, torch.from_numpy(runs))


def moves(
    made: CopyPlan, source_blocks: Sequence[int], target_blocks: Sequence[int], tokens: range
) -> torch.Tensor:
    """Return the moves, int64[M, 2] on the CPU, for `tokens` of a request that has these blocks.

    `tokens.start` is a multiple of the unit; the last unit is copied whole, with what is beyond the
    last token. Raises ValueError for another start, and for blocks that a pool does not have.
    """
    unit = made.unit_tokens
    if tokens.step != 1 or tokens.start < 0 or tokens.start % unit:
        raise ValueError(f"tokens {tokens} do not begin at a multiple of {unit}")
    first = np.arange(tokens.start, tokens.stop, unit, dtype=np.int64)
    bases = [
        _bases(made.source, "source_blocks", source_blocks, first),
        _bases(made.target, "target_blocks", target_blocks, first),
    ]
    return torch.from_numpy(np.stack(bases, axis=1))


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _offsets(owner: PoolLayout, heads: range, layers: range, index: Ints) -> Ints:
    """Return the byte offset of every row of a unit, counted from the beginning of the block."""
    step = owner.strides()
    steps = [step[axis] for axis in AXES[1:]]
    first = np.array([heads.start - owner.heads.start, layers.start - owner.layers.start, 0, 0])
    found: Ints = np.asarray(steps, dtype=np.int64) @ (index + first[:, None])
    return found


def _merged(source: Ints, target: Ints, row_bytes: int) -> Ints:
    """Return rows as runs of bytes: rows that are adjacent in both pools become one run, of at most
    RUN_BYTES.
    """
    breaks = (np.diff(source) != row_bytes) | (np.diff(target) != row_bytes)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    ends = np.concatenate((starts[1:], [len(source)]))
    most = max(1, RUN_BYTES // row_bytes)
    cut = [
        (source[at], target[at], (min(at + most, end) - at) * row_bytes)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for at in range(start, end, most)
    ]
    return np.array(cut, dtype=np.int64)


def _bases(owner: PoolLayout, name: str, blocks: Sequence[int], first: Ints) -> Ints:
    """Return the byte offset at which each unit begins in the pool; `first` has the number of each
    unit's first token. Raises ValueError for blocks that the pool does not have.
    """
    step, size = owner.strides(), owner.block_tokens
    ids = np.asarray(blocks, dtype=np.int64)
    if len(first) and first[-1] // size >= len(ids):
        raise ValueError(
            f"{name} has {len(ids)} blocks of {size} tokens, token {first[-1]} is beyond them"
        )
    used = ids[first // size]
    wrong = used[(used < 0) | (used >= owner.blocks)]
    if len(wrong):
        raise ValueError(f"{name} names block {wrong[0]}, the pool has 0..{owner.blocks - 1}")
    return used * step["block"] + first % size * step["token"]


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """Return a contiguous pool of any dtype as int8[bytes], which shares its memory."""
    return pool.view(-1).view(torch.int8)


INDEX_WORDS = 1 << 18  # copied at once: indices take as much memory as words of eight bytes
_WORDS = ((8, torch.int64), (4, torch.int32), (1, torch.int8))


def copy_runs_on_cpu(
    source: torch.Tensor, target: torch.Tensor, runs: torch.Tensor, moves: torch.Tensor
) -> None:
    """Copy the runs, in rows as long as all offsets and lengths allow. Each batch needs two of
    torch's own copies, so that Python's lock is free meanwhile. Nothing is copied if some run would
    leave a pool.
    """
    at, parts = moves.numpy(), runs.numpy()
    at = at[(at >= 0).all(axis=1)]
    _check_inside(at, parts, (len(source), len(target)))
    if not len(at) or not parts[:, 2].any():
        return
    row = int(np.gcd.reduce(np.concatenate((at.ravel(), parts.ravel()))))
    word, dtype = next(one for one in _WORDS if row % one[0] == 0)
    pools = [
        pool[: len(pool) // row * row].view(dtype).view(-1, row // word)
        for pool in (source, target)
    ]
    counts = parts[:, 2] // row
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = [steps + np.repeat(parts[:, side] // row, counts) for side in (0, 1)]
    each = max(1, INDEX_WORDS // len(steps))
    for first in range(0, len(at), each):
        some = at[first : first + each] // row
        index = [torch.from_numpy((some[:, side, None] + rows[side]).ravel()) for side in (0, 1)]
        pools[1].index_copy_(0, index[1], pools[0].index_select(0, index[0]))


def _check_inside(at: Ints, parts: Ints, sizes: tuple[int, int]) -> None:
    """Raise ValueError if a run leaves its pool; the message names the first such run."""
    for side, name in enumerate(("source", "target")):
        begins = at[:, side, None] + parts[:, side]
        wrong = np.argwhere((parts[:, 2] < 0) | (begins < 0) | (begins + parts[:, 2] > sizes[side]))
        if len(wrong):
            move, run = wrong[0]
            raise ValueError(
                f"a run of {parts[run, 2]} bytes at {begins[move, run]} leaves {name}, which has "
                f"{sizes[side]}: plan it with the layouts that the pools have"
            )


define("copy_runs", copy_runs_on_cpu, ("target",))
