"""A wide pool in a random state: some signals are absent, some hits are unknown, some workers are
idle.
"""

from __future__ import annotations

import numpy as np

from policies.contract import FleetView
from tests.policies.fleet import fleet_of


def wide_fleet(seed: int, workers: int) -> FleetView:
    """Return a fleet of `workers` rows by `seed`, with hits of at most 999 tokens, two speeds and
    many ties.
    """
    random = np.random.default_rng(seed)

    def maybe_nan(values):
        return np.where(random.random(workers) < 0.2, np.nan, values)

    return fleet_of(
        worker_id=np.sort(random.choice(10_000, workers, replace=False)),
        hit_tokens=random.choice([0, 160, 640, 999], workers),
        hits_unknown=random.random(workers) < 0.1,
        queued_prefill_tokens=random.choice([0.0, 1.0, 5_000.5], workers),
        running=random.integers(0, 9, workers),
        waiting=random.integers(0, 3, workers),
        context_tokens=random.integers(0, 90_000, workers).astype(float),
        waiting_prompt_tokens=random.integers(0, 90_000, workers),
        kv_used_tokens=maybe_nan(random.integers(0, 100, workers)),
        kv_capacity_tokens=maybe_nan(100.0),
        prefill_tokens_per_s=random.choice([7_500.0, 15_000.0], workers),
        step_s=random.choice([0.018, 0.036], workers),
        load_age_s=random.choice([0.1, np.inf], workers),
    )
