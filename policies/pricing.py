"""What a prompt's missing tokens are worth, when a copy of a prefix serves others, too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def missing_tokens(hit_tokens: Ints, prompt_tokens: int) -> Floats:
    """float64[rows]: prompt tokens a worker lacks, each at 1 / (workers that hold it); at least 1.

    At full price nobody would ever copy a popular prefix: a hit is the better choice for each
    single request, so a few holders serve everyone while other workers stay idle. But a copy
    serves those who come after, too, and how many workers hold a prefix tells how much it is in
    demand. So once m workers hold a token, a further copy counts 1 / m of its prefill. What one
    worker alone holds, as it does a conversation, keeps its full price.
    """
    if len(hit_tokens) == 0:
        return np.zeros(0)
    order = hit_tokens.argsort()
    depths = hit_tokens[order]
    # The last token is computed even if all are resident: its logits give the next one.
    if depths[-1] >= prompt_tokens:
        depths = np.minimum(depths, prompt_tokens - 1)
    steps = depths.copy()
    steps[1:] -= depths[:-1]
    # Between the hits of neighbours in this order, the tokens are held by all further rows.
    priced = np.add.accumulate(steps / np.arange(len(depths), 0, -1))
    missing = np.empty(len(depths))
    # Plain numbers: a scalar of numpy's own makes an operation take half as long again.
    missing[order] = (float(priced[-1]) - priced) + float(prompt_tokens - int(depths[-1]))
    return missing
