"""The prefill term of Dynamo's rules: queued and prompt tokens, less a credit for cached tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from policies.contract import FleetView, Floats, RequestView


@dataclass(frozen=True, slots=True)
class DynamoPrefill:
    """The parameters that Dynamo's rules share, and their prefill term with the charge per request.

    Raises ValueError unless all parameters, also those that a rule adds, are finite and 0 or more.
    Lifetime: process.
    """

    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    request_tokens: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{field.name} is {value}; it must be finite, 0 or more")

    def prefill_tokens(self, request: RequestView, fleet: FleetView) -> Floats:
        """Return prefill_scale * max(0, queued + prompt - credit) + request_tokens * A,
        float64[rows].

        credit = overlap_credit * fade * hits + host_credit * host hits + disk_credit * disk hits,
        and fade = 1 / (1 + decay * (queued - least queued) / prompt): hits count less on a worker
        with more queued tokens than the least busy one. A is the worker's number of unfinished
        requests.
        """
        prompt, queued = float(request.prompt_tokens), fleet.queued_prefill_tokens
        credit: Floats = fleet.hit_tokens * np.float64(self.overlap_credit)
        if self.decay and len(fleet):
            behind: Floats = (queued - np.float64(queued.min())) / prompt
            credit /= 1.0 + self.decay * behind
        if self.host_credit:
            credit += self.host_credit * fleet.hit_tokens_host
        if self.disk_credit:
            credit += self.disk_credit * fleet.hit_tokens_disk
        tokens: Floats = prompt + queued - credit
        np.maximum(tokens, 0.0, out=tokens)
        tokens *= self.prefill_scale
        if self.request_tokens:
            tokens += self.request_tokens * fleet.requests
        return tokens
