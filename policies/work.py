"""Work in seconds: what a worker has before it, and what a request would bring to it."""

from __future__ import annotations

import numpy as np

from policies.contract import FleetView, Floats, RequestView


def load_s(fleet: FleetView, step: float) -> Floats:
    """float64[rows]: queued prefill and one decode step for each unfinished request, in seconds.

    All at the worker's own prefill rate, so a slow one is full with less. A step each, not all
    the steps an answer has left: those that run together share every step, so a further one
    takes about its token from each, while nobody knows how many it will want. `step` is
    `FleetView.step_tokens`, equal for all, so load differs by requests and not by moments.
    """
    steps_s = fleet.requests * (step / fleet.prefill_tokens_per_s)
    seconds: Floats = fleet.queued_prefill_s + steps_s
    return seconds


def new_s(request: RequestView, fleet: FleetView) -> Floats:
    """float64[rows]: seconds of the request's prefill, without what a worker's cache holds, and of
    the load of what it holds below the GPU."""
    spared = fleet.spared_tokens
    return fleet.prefill_s(request.prompt_tokens - spared, spared)


_BUSY = 2.0  # a queue at half load lasts twice its own work, and delays all who come until then


def later_s(fleet: FleetView, own_s: Floats) -> Floats:
    """float64[rows]: by how much a prefill of `own_s` seconds delays those who come after it.

    The value function of an M/G/1 queue, first come first served (Hyytiä, Penttinen and Aalto,
    2012): who comes before the queue was empty waits for all of it, who comes while it is computed
    for half. How many come to a worker is told by how many it has (Little's law), so long prompts
    go where few are, and the others find workers without a queue.
    """
    rate_per_s = fleet.requests * fleet.turnover_per_s
    seconds: Floats = _BUSY * rate_per_s * own_s * (fleet.queued_prefill_s + 0.5 * own_s)
    return seconds


def invested_s(fleet: FleetView, own_s: Floats) -> Floats:
    """float64[rows]: how much of a prefill of `own_s` seconds is for others: the hot trunk that a
    worker lacks, where more workers should hold it (`FleetView.copies_missing`).
    """
    if fleet.copies_missing <= 0:
        return np.zeros(len(fleet))
    trunk_s = fleet.prefill_s(fleet.hot_trunk_tokens, 0)
    seconds: Floats = np.where(fleet.lacking_trunk(), np.minimum(trunk_s, own_s), 0.0)
    return seconds


def room_s(request: RequestView, fleet: FleetView) -> Floats:
    """float64[rows]: seconds until answers that end there have freed the memory that it lacks.

    Running requests pin their KV, and by Little's law `turnover_per_s` of it is freed in a second.
    0 where it fits, where use or capacity are unknown, and before anything is known of turnover.
    """
    used = np.fmax(fleet.kv_used_tokens, 0.0)  # unknown: 0
    over = used + request.prompt_tokens - fleet.spared_tokens - fleet.assumed_capacity_tokens
    waits = over > 0.0
    seconds = np.zeros(len(fleet))
    if np.count_nonzero(waits):  # else the commonest case
        freed_per_s = used * fleet.turnover_per_s
        np.divide(over, freed_per_s, out=seconds, where=waits & (freed_per_s > 0.0))
    return seconds


def busy_share(fleet: FleetView) -> float:
    """Share of the workers with queued prefill, 0..1: of its time, one computes and fills its cache
    as large a share."""
    return np.count_nonzero(fleet.queued_prefill_tokens) / max(len(fleet), 1)


def brought_s(request: RequestView, fleet: FleetView, step: float) -> Floats:
    """float64[rows]: what the request would add to `load_s`: its missing prefill and one step."""
    computed = np.maximum(request.prompt_tokens - fleet.spared_tokens, 1)
    cached = request.prompt_tokens - computed
    seconds: Floats = fleet.prefill_s(computed, cached) + step / fleet.prefill_tokens_per_s
    return seconds


def whole_s(request: RequestView, fleet: FleetView, step: float) -> Floats:
    """float64[rows]: the same where nothing of the prompt were cached."""
    tokens = max(request.prompt_tokens, 1)
    seconds: Floats = fleet.prefill_s(tokens, 0) + step / fleet.prefill_tokens_per_s
    return seconds
