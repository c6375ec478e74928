"""The plain-Python oracle of the arithmetic over a pool's columns, one row a worker."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Hits = npt.NDArray[np.int32]
Column = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_TIE = 1e-9  # costs this close, relative to the best or absolute, are equal


def drain_queues(
    drained: Column, rate: Column, charged: Column, limit: Column, elapsed_s: float
) -> None:
    """Raise each `drained` by rate x elapsed_s, to at most `charged` and `limit`; none falls.

    All are float64[rows], C-contiguous; `drained` is written in place. Raises TypeError for other
    buffers, ValueError for unequal lengths and where `drained` must not be written to.
    """
    reached = np.minimum(np.minimum(rate * elapsed_s + drained, charged), limit)
    np.maximum(reached, drained, out=drained)


def missing_tokens(hit_tokens: Ids, prompt_tokens: int) -> Column:
    """float64[rows]: prompt tokens each row lacks, each at 1 / (rows that hold it); at least 1.

    `hit_tokens`: int64[rows], leading tokens of the prompt that the row holds. The last token of
    a prompt counts as missing even where it is held. To the last bit what
    `policies.pricing.missing_tokens` gives, which says what the price is for.
    """
    hits = np.minimum(hit_tokens, prompt_tokens - 1).tolist()
    priced, depth = 0.0, 0
    missing = np.zeros(len(hits))
    for place, row in enumerate(sorted(range(len(hits)), key=hits.__getitem__)):
        priced += (hits[row] - depth) / (len(hits) - place)
        depth = hits[row]
        missing[row] = priced
    return (priced - missing) + float(prompt_tokens - depth)


def hit_tokens(blocks: Hits, slots: Ids, block_size: int, most: int) -> Ids:
    """int64[slots]: tokens of the blocks that each holds, at most `most`.

    `blocks`: int32[workers], `slots`: int64, rows of it. Raises ValueError for others.
    """
    _within(slots, blocks)
    return np.minimum(blocks[slots].astype(np.int64) * block_size, most)


def median_product(a: Column, b: Column, slots: Ids) -> float:
    """The median of a x b, float64[workers], over these slots; 0 of none, NaN if one is NaN."""
    _within(slots, a, b)
    products: list[float] = sorted((a[slots] * b[slots]).tolist())
    if any(map(math.isnan, products)):
        return math.nan
    rows = len(products)
    return (products[rows // 2] + products[(rows - 1) // 2]) / 2 if rows else 0.0


def load_tokens(
    charged: Column,
    drained: Column,
    token_work: Column | None,
    requests: Ids,
    slots: Ids,
    step_tokens: float,
) -> Column:
    """float64[slots]: tokens queued there, and `step_tokens` for each of its requests.

    Queued is the work charged and not drained, over the work of a token (None: 1). All columns
    have a row for each worker.
    """
    _within(slots, charged, drained, requests, *(() if token_work is None else (token_work,)))
    queued = charged[slots] - drained[slots]
    if token_work is not None:
        queued = queued / token_work[slots]
    load: Column = queued + requests[slots] * step_tokens
    return load


def cheapest(costs: Column, draw: float) -> int:
    """The row of the lowest cost, drawn among equal ones; -1 where all are +inf, or there is none.

    `draw` is uniform in [0, 1). What `policies.pick.pick` gives without a temperature. Raises
    ValueError for a draw out of range and for costs that are NaN or -inf.
    """
    if not 0.0 <= draw < 1.0:
        raise ValueError("draw must be in [0, 1)")
    known: list[float] = costs.tolist()
    if not all(cost > -math.inf for cost in known):
        raise ValueError("a cost is finite or +inf")
    best = min(known, default=math.inf)
    if best == math.inf:
        return -1
    most = best + _TIE * max(1.0, abs(best))
    ties = [row for row, cost in enumerate(known) if cost <= most]
    return ties[int(draw * len(ties))]


def sum_of(column: Column, slots: Ids) -> float:
    """The sum over these slots, rounded as numpy rounds it. Raises ValueError for others."""
    _within(slots, column)
    return float(np.add.reduce(column[slots]))


def sum_of_least(a: Column, times: float, b: Column, slots: Ids) -> float:
    """The same of the lesser of a x times and b; NaN where one is."""
    _within(slots, a, b)
    return float(np.add.reduce(np.minimum(a[slots] * times, b[slots])))


def leading(hit_tokens: Ids) -> tuple[int, int, int]:
    """(First row with the most tokens, these, the most of any other row or 0.)

    Raises ValueError where there are no rows.
    """
    if not len(hit_tokens):
        raise ValueError("hit_tokens must not be empty")
    row = int(hit_tokens.argmax())
    return row, int(hit_tokens[row]), max(0, *np.delete(hit_tokens, row).tolist(), 0)


def _within(slots: Ids, *columns: np.ndarray) -> None:
    rows = min(map(len, columns))
    if not all(0 <= slot < rows for slot in slots.tolist()):
        raise ValueError("slots must lie within the columns")
