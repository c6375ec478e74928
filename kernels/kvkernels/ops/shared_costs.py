"""The cost of an item of work in shared decode, by which requests share a prefix only if that pays.

Time is modelled as a sum over the work of a plan, with one coefficient for each kind of work. That
is coarse (a GPU overlaps them), but it can be fitted, and sums can be minimized exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MOST_ROWS, MANY_STEP, FEW_STEP, FEW_ROWS = 128, 32, 8, 16  # of `cuda/decode/shared_decode.cuh`


class AttentionShape(NamedTuple):
    """The shape of attention over one layer's KV; one plan is run by `layers` such layers."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2
    layers: int = 1
    scale_bytes: int = 0  # of one token's K, or V, of one head

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    @property
    def requests_of_item(self) -> int:
        """Number of requests that fit into the rows of an item of work."""
        return MOST_ROWS // self.group


class Work(NamedTuple):
    """The work of a plan in one layer, by kind: bytes, operations and items. The cost of a plan is
    computed from these.
    """

    first_bytes: int  # of KV, read from memory
    repeated_bytes: int  # of KV that the step has read already: perhaps still in the L2 cache
    flops: int  # of tensor cores, padding included
    partial_bytes: int  # written, then read by the merge
    items: int  # for all KV heads


class Costs(NamedTuple):
    """The cost of each kind of `Work`, in nanoseconds of the whole device for each unit. The
    defaults are predictions for an H200: memory at 4.3 TB/s, L2 at 5.5 TB/s, tensor cores by
    `mma.sync` at 350 TFLOP/s, partial results at L2 speed, 2 us an item with 264 at once. `fit`
    computes costs from measurements.
    """

    first_mb: float = 233.0
    repeated_mb: float = 182.0
    gflop: float = 2860.0
    partial_mb: float = 182.0
    item: float = 7.6
    sharing: float = 0.0  # a run that several requests share; no time, what it has to gain

    def of(self, work: Work) -> float:
        """Return the nanoseconds of this work."""
        return (
            1e-6 * self.first_mb * work.first_bytes
            + 1e-6 * self.repeated_mb * work.repeated_bytes
            + 1e-9 * self.gflop * work.flops
            + 1e-6 * self.partial_mb * work.partial_bytes
            + self.item * work.items
        )


def fit(works: Sequence[Work], measured_ns: Sequence[float]) -> Costs:
    """Return the costs that fit measurements best, by least squares of relative errors, none below
    zero. `measured_ns` are times of one layer's attention with plans of `works`; there must be at
    least as many as coefficients. Raises ValueError for fewer, or for times that are not above 0.
    """
    if len(works) != len(measured_ns) or len(works) < len(Work._fields):
        raise ValueError(
            f"{len(works)} plans and {len(measured_ns)} times: needs 5 or more of both"
        )
    times = np.asarray(measured_ns, dtype=np.float64)
    if not (times > 0).all():
        raise ValueError("measured_ns: times must be above 0")
    units = np.array([1e-6, 1e-6, 1e-9, 1e-6, 1.0])
    features = np.array(works, dtype=np.float64) * units / times[:, None]
    used = list(range(len(units)))
    found = np.zeros(len(units))
    while used:  # a coefficient below zero explains noise: do without it
        solved = np.linalg.lstsq(features[:, used], np.ones(len(times)), rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved
            break
        used.pop(int(solved.argmin()))
    return Costs(*found.tolist())


def padded_rows(rows: Ints) -> Ints:
    """Return the number of rows that the tensor cores compute for items of `rows` rows, padding
    included.
    """
    few = -(-rows // FEW_STEP) * FEW_STEP
    return np.where(rows <= FEW_ROWS, few, -(-rows // MANY_STEP) * MANY_STEP)


def run_cost(
    costs: Costs, shape: AttentionShape, tokens: Ints, requests: Ints, pieces: Ints, slots: Ints
) -> NDArray[np.float64]:
    """Return the nanoseconds for runs of `tokens` that `requests` each share, in `pieces` with
    `slots` for each request.

    All KV counts as if the step had read it before, because the first read is the same for every
    plan of a step. Arrays broadcast.
    """
    whole, rest = np.divmod(requests, shape.requests_of_item)
    full = padded_rows(np.asarray(shape.requests_of_item * shape.group))
    rows = whole * full + padded_rows(rest * shape.group)
    tiles = whole + (rest > 0)
    read = 1e-6 * costs.repeated_mb * shape.token_bytes * tiles
    computed = 1e-9 * costs.gflop * 4 * shape.head_dim * shape.kv_heads * rows
    done: NDArray[np.float64] = (
        tokens * (read + computed)
        + 1e-6 * costs.partial_mb * partial_bytes_of_slot(shape) * requests * slots
        + costs.item * pieces * tiles * shape.kv_heads
        + costs.sharing * (requests > 1)
    )
    return done


def partial_bytes_of_slot(shape: AttentionShape) -> int:
    """Return the number of bytes of one slot's partial results, written once and read once."""
    return 2 * 4 * shape.heads * (shape.head_dim + 1)
