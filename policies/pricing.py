"""The cost of prompt tokens that a worker must compute, or load from host memory or disk."""

from __future__ import annotations

import numpy as np

from policies.arrays import Floats, Ints

# Speed of loading KV, as a multiple of the speed of computing it, assumed until a worker's own
# speed was measured. PCIe carries 25 GB/s, which is 5 to 20 times the prefill of the GPUs and
# models in `engine.profiles`, and a disk 6 GB/s, 1 to 4 times. The lowest of each range is assumed:
# a tier that is assumed too slow is still used, and its true speed is learned.
HOST_SPEED = 5.0
DISK_SPEED = 1.5


def missing_tokens(hit_tokens: Ints, prompt_tokens: int) -> Floats:
    """Return the price of the prompt tokens that each worker lacks, float64[rows]; at least 1.

    The unit is a token that no worker holds. A token that m workers hold costs 1 / m on each worker
    that lacks it.

    At full price, no worker would ever get a copy of a popular prefix: each request would be
    cheapest on the few workers that hold the prefix, while others stay idle. But a copy also serves
    later requests, and the number of workers that hold the prefix shows how popular it is. Tokens
    that only one worker holds, such as a conversation, keep their full price.
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


def saved_share(
    tokens: Ints | int, tokens_per_s: Floats, prefill_s: Floats, assumed_speed: float
) -> Floats:
    """Return the share of prefill time, 0..1, that each worker saves by loading the KV of `tokens`.

    The shape is float64[rows].
    tokens_per_s: the speed of loading; where it is NaN, loading is assumed to be `assumed_speed`
        times as fast as computing.
    prefill_s: the seconds to compute the tokens, attention included.
    """
    share = (tokens / tokens_per_s) / np.maximum(prefill_s, 1e-9)
    saved: Floats = 1.0 - np.fmin(np.where(np.isnan(tokens_per_s), 1.0 / assumed_speed, share), 1.0)
    return saved
