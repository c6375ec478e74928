"""The plain-Python oracle of the arithmetic over a pool's columns, with one row per worker."""

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
    """Raise each element of `drained` by rate x elapsed_s, to at most `charged` and `limit`; no
    element falls.

    All columns are float64[rows] and C-contiguous; `drained` is written in place. Raises TypeError
    for other buffers, and ValueError for unequal lengths or a read-only `drained`.
    """
    reached = np.minimum(np.minimum(rate * elapsed_s + drained, charged), limit)
    np.maximum(reached, drained, out=drained)


def missing_tokens(hit_tokens: Ids, prompt_tokens: int) -> Column:
    """Return float64[rows]: the prompt tokens that each row lacks, each priced at 1 / (rows that
    hold it), and at 1 at least.

    `hit_tokens` is int64[rows], the leading tokens of the prompt that the row holds. The last token
    of a prompt counts as missing even if it is held. The result equals
    `policies.pricing.missing_tokens` to the last bit; that function explains the price.
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
    """Return int64[slots]: the tokens of the blocks that each slot holds, at most `most`.

    `blocks` is int32[workers]; `slots` is int64 and holds rows of it. Raises ValueError for other
    slots.
    """
    _within(slots, blocks)
    return np.minimum(blocks[slots].astype(np.int64) * block_size, most)


def median_product(a: Column, b: Column, slots: Ids) -> float:
    """Return the median of a x b, float64[workers], over these slots: 0 if there are none, NaN if
    one product is NaN.
    """
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
    """Return float64[slots]: the tokens queued at each slot, plus `step_tokens` for each of its
    requests.

    Queued tokens are the work charged and not drained, divided by the work of one token
    (`token_work`, None for 1). All columns have a row for each worker.
    """
    _within(slots, charged, drained, requests, *(() if token_work is None else (token_work,)))
    queued = charged[slots] - drained[slots]
    if token_work is not None:
        queued = queued / token_work[slots]
    load: Column = queued + requests[slots] * step_tokens
    return load


def cheapest(costs: Column, draw: float) -> int:
    """Return the row of the lowest cost, drawn by `draw` among equal ones, or -1 if all are +inf or
    there are no rows.

    `draw` is uniform in [0, 1). The result is that of `policies.pick.pick` without a temperature.
    Raises ValueError for a draw out of range and for costs that are NaN or -inf.
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
    """Return the sum over these slots, rounded as numpy rounds it. Raises ValueError for slots out
    of range.
    """
    _within(slots, column)
    return float(np.add.reduce(column[slots]))


def sum_of_least(a: Column, times: float, b: Column, slots: Ids) -> float:
    """Return the sum, over these slots, of a x times or b, whichever is smaller; NaN if one of them
    is NaN.
    """
    _within(slots, a, b)
    return float(np.add.reduce(np.minimum(a[slots] * times, b[slots])))


def leading(hit_tokens: Ids) -> tuple[int, int, int]:
    """Return the first row with the most tokens, these tokens, and the most tokens of any other row
    (or 0). Raises ValueError if there are no rows.
    """
    if not len(hit_tokens):
        raise ValueError("hit_tokens must not be empty")
    row = int(hit_tokens.argmax())
    return row, int(hit_tokens[row]), max(0, *np.delete(hit_tokens, row).tolist(), 0)


def _within(slots: Ids, *columns: np.ndarray) -> None:
    rows = min(map(len, columns))
    if not all(0 <= slot < rows for slot in slots.tolist()):
        raise ValueError("slots must lie within the columns")
