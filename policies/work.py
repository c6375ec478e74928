"""Seconds of work that are queued at a worker, and seconds that a request would add.

`kernels/src/decision/warmset.cpp` has `trunk_share_s`, `memory_wait_s` and `delay_to_others_s` in
C++, under the same names.
"""

from __future__ import annotations

import numpy as np

from policies.contract import FleetView, Floats, RequestView

# Seconds until a queue is empty, for each second of work in it: w seconds of work take
# w / (1 - load) (busy period of an M/G/1 queue), and a load of one half is assumed. 1 and 4 did as
# well in replays (docs/reference/warmset.md).
QUEUE_LASTS = 2.0


def load_s(fleet: FleetView, step_tokens: float) -> Floats:
    """Return each worker's load in seconds, float64[rows].

    The load is the queued prefill plus one decode step for each unfinished request. Both are
    computed at the worker's own prefill rate, so a slow worker reaches a given load with fewer
    requests.

    A request counts as one step, not as all steps that its answer has left. Requests that run
    together share every step, so one more request delays each of them by about one token. Also, the
    router does not know how long an answer will be. `step_tokens` is `FleetView.step_tokens`, which
    is equal for all workers, so that loads do not differ by the length of the current step.
    """
    steps_s = fleet.requests * (step_tokens / fleet.prefill_tokens_per_s)
    seconds: Floats = fleet.queued_prefill_s + steps_s
    return seconds


def own_prefill_s(request: RequestView, fleet: FleetView) -> Floats:
    """Return the seconds of the request's prefill on each worker, float64[rows].

    Tokens with KV on the GPU cost nothing. Tokens in host memory or on disk cost the time to load
    them.
    """
    spared = fleet.spared_tokens
    return fleet.prefill_s(request.prompt_tokens - spared, spared)


def delay_to_others_s(fleet: FleetView, own_s: Floats) -> Floats:
    """Return the seconds by which a prefill of `own_s` seconds delays later requests.

    The shape is float64[rows]. The formula is the value function of a first-come-first-served M/G/1
    queue (Hyytiä, Penttinen and Aalto, 2012). A request that arrives while older work is computed
    waits for all of the prefill. A request that arrives during the prefill waits for half of it on
    average. The arrival rate at a worker follows from its unfinished requests, by Little's law. So
    a long prompt goes to a worker with few requests, and other requests find workers without a
    queue.
    """
    arrivals_per_s = fleet.requests * fleet.turnover_per_s
    delayed_s = fleet.queued_prefill_s + 0.5 * own_s
    seconds: Floats = QUEUE_LASTS * arrivals_per_s * own_s * delayed_s
    return seconds


def trunk_share_s(fleet: FleetView, own_s: Floats) -> Floats:
    """Return the seconds of a request's prefill that are spent on a wanted copy of its hot trunk.

    The shape is float64[rows]. `own_s` are the seconds of the whole prefill. A hot trunk is the
    leading part of the prompt that many prompts share. The result is above 0 only on workers that
    lack the trunk, and only while too few workers hold it (`FleetView.copies_missing`). The copy
    serves all later requests, so this request does not pay for it.
    """
    if fleet.copies_missing <= 0:
        return np.zeros(len(fleet))
    trunk_s = fleet.prefill_s(fleet.hot_trunk_tokens, 0)
    seconds: Floats = np.where(fleet.lacking_trunk(), np.minimum(trunk_s, own_s), 0.0)
    return seconds


def memory_wait_s(request: RequestView, fleet: FleetView) -> Floats:
    """Return the seconds until finished answers have freed the KV memory that the request lacks.

    The shape is float64[rows]. All tokens of the prompt need memory while the request runs, cached
    or not. Only a shared prefix that other unfinished requests use has its memory already. An
    answer frees its memory as a whole when it ends. So the request waits for the whole number of
    answers, of the mean size, that frees what it lacks. By Little's law, a share of
    `turnover_per_s` of the unfinished requests ends per second. The result is 0 on a worker where
    the request fits or where no request is unfinished, and before the router's first request.
    """
    requests = fleet.requests
    # Requests that wait in the engine have no memory yet, but are served before this one.
    unfinished = fleet.context_tokens + fleet.waiting_prompt_tokens
    unfinished = unfinished - (requests - 1) * request.trunk_tokens
    used = np.maximum(np.fmax(fleet.kv_used_tokens, 0.0), unfinished)  # unknown use: 0
    lacking = used + request.private_tokens - fleet.assumed_capacity_tokens
    waits = (lacking > 0.0) & (requests > 0) & (used > 0.0)
    seconds = np.zeros(len(fleet))
    if fleet.turnover_per_s > 0.0 and np.count_nonzero(waits):  # rare
        count = requests[waits]
        answers = np.minimum(np.ceil(lacking[waits] * count / used[waits]), count)
        seconds[waits] = answers / (count * fleet.turnover_per_s)
    return seconds


def busy_share(fleet: FleetView) -> float:
    """Return the share of workers that have prefill queued, 0..1.

    The share estimates the fraction of time in which a worker computes prefill, and so writes new
    KV into its cache.
    """
    return np.count_nonzero(fleet.queued_prefill_tokens) / max(len(fleet), 1)


def brought_s(request: RequestView, fleet: FleetView, step_tokens: float) -> Floats:
    """Return the seconds that the request would add to each worker's `load_s`, float64[rows].

    These are one decode step and the prefill of the tokens that are not cached on the worker.
    """
    computed = np.maximum(request.prompt_tokens - fleet.spared_tokens, 1)
    cached = request.prompt_tokens - computed
    seconds: Floats = fleet.prefill_s(computed, cached) + step_tokens / fleet.prefill_tokens_per_s
    return seconds


def whole_s(request: RequestView, fleet: FleetView, step_tokens: float) -> Floats:
    """Return the seconds of load that the request would add to each worker without a cache.

    The shape is float64[rows]. `load_s` defines the load.
    """
    tokens = max(request.prompt_tokens, 1)
    seconds: Floats = fleet.prefill_s(tokens, 0) + step_tokens / fleet.prefill_tokens_per_s
    return seconds
