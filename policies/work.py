"""Queued work of a worker, and the work that a request would add, in seconds.

The native twin of `trunk_share_s`, `memory_wait_s` and `delay_to_others_s` is
`kernels/src/decision/warmset.cpp`, which has them under the same names.
"""

from __future__ import annotations

import numpy as np

from policies.contract import FleetView, Floats, RequestView

# Seconds until a queue is empty, for each second of work in it: w seconds of work take
# w / (1 - load) (busy period of an M/G/1 queue), and a load of one half is assumed. 1 and 4 did as
# well in replays (docs/reference/warmset.md).
QUEUE_LASTS = 2.0


def load_s(fleet: FleetView, step_tokens: float) -> Floats:
    """float64[rows]: queued prefill, and one decode step for each unfinished request, in seconds.

    Both at the worker's own prefill rate, so a slow worker is full with less. A request counts one
    step and not all steps that its answer has left: requests that run together share every step,
    so a further one delays each of them by about one token, and nobody knows how long an answer
    will be. `step_tokens` is `FleetView.step_tokens`, equal for all rows, so that load differs by
    requests and not by the length of the present step.
    """
    steps_s = fleet.requests * (step_tokens / fleet.prefill_tokens_per_s)
    seconds: Floats = fleet.queued_prefill_s + steps_s
    return seconds


def own_prefill_s(request: RequestView, fleet: FleetView) -> Floats:
    """float64[rows]: seconds of the request's prefill, less what the worker's caches spare.

    Loading the tokens that lie below the GPU is included.
    """
    spared = fleet.spared_tokens
    return fleet.prefill_s(request.prompt_tokens - spared, spared)


def delay_to_others_s(fleet: FleetView, own_s: Floats) -> Floats:
    """float64[rows]: seconds by which a prefill of `own_s` delays requests that arrive after it.

    The value function of an M/G/1 queue, first come first served (Hyytiä, Penttinen and Aalto,
    2012). A request that arrives while older work is computed waits for all of the prefill; one
    that arrives during the prefill waits for half of it on average. The rate of arrivals at a
    worker follows from its unfinished requests (Little's law). So a long prompt goes to a worker
    with few requests, and the others keep workers without a queue.
    """
    arrivals_per_s = fleet.requests * fleet.turnover_per_s
    delayed_s = fleet.queued_prefill_s + 0.5 * own_s
    seconds: Floats = QUEUE_LASTS * arrivals_per_s * own_s * delayed_s
    return seconds


def trunk_share_s(fleet: FleetView, own_s: Floats) -> Floats:
    """float64[rows]: the part of a prefill of `own_s` seconds that computes a wanted trunk copy.

    That is the request's hot trunk, on a worker that lacks it, while more workers should hold it
    (`FleetView.copies_missing`). The copy serves all later requests, so it is not charged to this
    one.
    """
    if fleet.copies_missing <= 0:
        return np.zeros(len(fleet))
    trunk_s = fleet.prefill_s(fleet.hot_trunk_tokens, 0)
    seconds: Floats = np.where(fleet.lacking_trunk(), np.minimum(trunk_s, own_s), 0.0)
    return seconds


def memory_wait_s(request: RequestView, fleet: FleetView) -> Floats:
    """float64[rows]: seconds until finished answers have freed the KV memory the request lacks.

    Unfinished requests keep their KV in memory; by Little's law the share `turnover_per_s` of it
    is freed in a second. 0 where the request fits, where the KV in use or the capacity is unknown,
    and before any request has come.
    """
    used = np.fmax(fleet.kv_used_tokens, 0.0)  # unknown: 0
    lacking = used + request.prompt_tokens - fleet.spared_tokens - fleet.assumed_capacity_tokens
    waits = lacking > 0.0
    seconds = np.zeros(len(fleet))
    if np.count_nonzero(waits):  # rare
        freed_per_s = used * fleet.turnover_per_s
        np.divide(lacking, freed_per_s, out=seconds, where=waits & (freed_per_s > 0.0))
    return seconds


def busy_share(fleet: FleetView) -> float:
    """Return the share of workers that have prefill queued, 0..1.

    It stands for the share of its time that a worker computes prefill and so fills its cache.
    """
    return np.count_nonzero(fleet.queued_prefill_tokens) / max(len(fleet), 1)


def brought_s(request: RequestView, fleet: FleetView, step_tokens: float) -> Floats:
    """float64[rows]: seconds that the request would add to `load_s`: its prefill and one step.

    Its prefill is that of the tokens which the worker's caches do not spare.
    """
    computed = np.maximum(request.prompt_tokens - fleet.spared_tokens, 1)
    cached = request.prompt_tokens - computed
    seconds: Floats = fleet.prefill_s(computed, cached) + step_tokens / fleet.prefill_tokens_per_s
    return seconds


def whole_s(request: RequestView, fleet: FleetView, step_tokens: float) -> Floats:
    """float64[rows]: seconds that the request would add to `load_s` if nothing were cached."""
    tokens = max(request.prompt_tokens, 1)
    seconds: Floats = fleet.prefill_s(tokens, 0) + step_tokens / fleet.prefill_tokens_per_s
    return seconds
