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


def brought_s(request: RequestView, fleet: FleetView, step: float) -> Floats:
    """float64[rows]: what the request would add to `load_s`: its missing prefill and one step."""
    computed = np.maximum(request.prompt_tokens - fleet.hit_tokens, 1)
    cached = request.prompt_tokens - computed
    seconds: Floats = fleet.prefill_s(computed, cached) + step / fleet.prefill_tokens_per_s
    return seconds


def whole_s(request: RequestView, fleet: FleetView, step: float) -> Floats:
    """float64[rows]: the same where nothing of the prompt were cached."""
    tokens = max(request.prompt_tokens, 1)
    seconds: Floats = fleet.prefill_s(tokens, 0) + step / fleet.prefill_tokens_per_s
    return seconds
