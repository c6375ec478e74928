"""Hypothesis strategies for views of a fleet and for requests to it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import strategies as st

from policies.contract import FleetView, TableFleet
from policies.facts import Dispatched, Finish, WorkerChange
from policies.load import LoadedPolicy
from tests.policies.fleet import fleet_of, request_of

counts = st.integers(0, 10_000)
amounts = st.floats(0.0, 1e6)
maybe = st.one_of(st.just(float("nan")), st.floats(1.0, 1e6))


@st.composite
def fleets(draw, rows_min=1, rows_max=8):
    n = draw(st.integers(rows_min, rows_max))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    return fleet_of(
        worker_id=sorted(draw(st.sets(counts, min_size=n, max_size=n))),
        hit_tokens=column(st.integers(0, 5_000)),
        hits_unknown=column(st.booleans()),
        queued_prefill_tokens=column(amounts),
        running=column(counts),
        waiting=column(counts),
        context_tokens=column(amounts),
        waiting_prompt_tokens=column(counts),
        kv_used_tokens=column(maybe),
        kv_capacity_tokens=column(maybe),
        prefill_tokens_per_s=column(st.floats(1.0, 1e6)),
        step_s=column(st.floats(1e-4, 10.0)),
        max_requests=column(maybe),
        max_queued_tokens=column(maybe),
        max_kv_fraction=column(st.one_of(st.just(float("nan")), st.floats(0.01, 1.0))),
    )


requests = st.builds(
    request_of,
    prompt_tokens=st.integers(1, 5_000),
    draw=st.floats(0.0, 1.0, exclude_max=True),
    serial=st.integers(0, 2**40),
    session=st.one_of(st.none(), st.sampled_from("abc")),
    group=st.one_of(st.none(), st.sampled_from("ab")),
    parent=st.one_of(st.none(), st.sampled_from("ab")),
)


def state_after_dispatches(policy: LoadedPolicy, fleet: FleetView, seed: int = 0) -> Any:
    """Return the state of `policy` after a few dispatches to workers of `fleet` and to a worker
    that is gone.
    """
    random = np.random.default_rng(seed)
    state = policy.initial_state()
    chain = np.arange(1, 11, dtype=np.uint64)
    for number in range(6):
        worker_id = int(random.choice(fleet.worker_id)) if len(fleet) else 7
        session, parent = ("a", "b", None)[number % 3], (None, "a")[number % 2]
        sent = Dispatched(
            *(float(number), number, worker_id, 16, 100 * number, chain, session),
            group="a",
            parent=parent,
        )
        state = policy.observe(sent, state)
    state = policy.observe(Finish(6.0, 0), state)
    return policy.observe(WorkerChange(7.0, 20_000, "gone"), state)


def columns_of(fleet: FleetView) -> dict[str, np.ndarray]:
    values = {field.name: getattr(fleet, field.name) for field in fields(TableFleet)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
