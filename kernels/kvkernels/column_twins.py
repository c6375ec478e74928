"""Plain-Python twins of the arithmetic over a pool's columns, one row a worker."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


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
