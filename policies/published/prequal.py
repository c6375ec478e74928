"""Prequal: probes a few workers; takes the fastest cold one, else the one with fewest requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Dispatched, Failure, Finish, Prefilled, WorkerChange, legs_over
from policies.published.hashing import weights
from policies.published.probes import Probes


@dataclass(frozen=True, slots=True)
class Prequal:
    """The cost is the latency of probed workers that are cold; a worker is hot above a load
    quantile.

    The quantile `rif_quantile` is of the requests in flight in the pool of probes. A cold probed
    worker costs its queued prefill seconds + one decode step. If all are hot, each costs its
    unfinished requests; every worker that is not probed costs +inf. Probed are the workers in the
    pool of probes, not older than `age_s`, and `probes` more drawn for this request. After each
    dispatch the next `probes` workers in turn are added to the pool with their requests in flight.

    Source: Prequal (Wydrowski et al., NSDI 2024): pool of 16, 3 probes a query, quantile 2^-0.25,
    age 1 s. In the source a probe also returns the latency. Here latency is a column, which costs
    nothing and is always new, so limits on reuse and the removal of old probes are not needed.

    Spill depth: no affinity, because hits are not read. Before the first dispatch no worker is hot.
    Requests of other routers count for a worker, but not in the quantile.
    """

    rif_quantile: float = 0.84
    pool_probes: int = 16
    probes: int = 3
    age_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rif_quantile <= 1.0:
            raise ValueError(f"rif_quantile is {self.rif_quantile}; it must be 0 to 1")
        for name in ("pool_probes", "probes"):
            if not 1 <= getattr(self, name) <= 1_000:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 to 1000")
        if not 0.0 < self.age_s < float("inf"):
            raise ValueError(f"age_s is {self.age_s}; it must be finite, above 0")

    def initial_state(self) -> Probes:
        return Probes(deque(maxlen=self.pool_probes))

    def observe(self, fact: Any, state: Probes) -> Probes:
        if isinstance(fact, Dispatched):
            state.send((fact.request_id, fact.leg), fact.worker_id)
            state.probe(self.probes, fact.now_s)
        elif isinstance(fact, Finish | Failure | Prefilled):
            for leg in legs_over(fact):
                state.release((fact.request_id, leg))
        elif isinstance(fact, WorkerChange):
            state.change(fact.worker_id, gone=fact.state == "gone")
        return state

    def costs(self, request: RequestView, fleet: FleetView, state: Probes) -> Floats:
        costs = np.full(len(fleet), np.inf)
        if not len(fleet):
            return costs
        young = [probe for probe in state.pool if request.now_s - probe[2] <= self.age_s]
        pooled = {worker for worker, _, _ in young}
        drawn = weights(int(request.draw * 2.0**53), fleet.worker_id, 0).argsort()[: self.probes]
        rows = set(drawn.tolist())
        rows.update(n for n, worker in enumerate(fleet.worker_id.tolist()) if worker in pooled)
        probed = np.array(sorted(rows))
        requests = fleet.requests[probed]
        found = sorted(inflight for _, inflight, _ in young)
        limit = found[max(ceil(self.rif_quantile * len(found)) - 1, 0)] if found else np.inf
        cold = probed[requests <= limit]
        if len(cold):
            costs[cold] = (fleet.queued_prefill_s + fleet.step_s)[cold]
        else:
            costs[probed] = requests
        return costs
