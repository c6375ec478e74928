"""Helpers for rules that may leave the worker that holds a prefix: their costs, and the load at
which they leave it.
"""

from __future__ import annotations

import numpy as np

from policies.facts import Dispatched
from policies.pick import pick
from tests.policies.fleet import fleet_of, request_of


def costs_of(policy, request=None, state=None, **columns):
    if state is None and hasattr(policy, "initial_state"):
        state = policy.initial_state()
    return policy.costs(request or request_of(), fleet_of(**columns), state).tolist()


def sent(policy, *dispatches, state=None):
    """Return the policy's state after dispatches, each given as (worker id, uncached tokens,
    session).
    """
    state = policy.initial_state() if state is None else state
    chain = np.arange(1, 5, dtype=np.uint64)
    for number, (worker_id, uncached, session) in enumerate(dispatches):
        fact = Dispatched(float(number), number, worker_id, 0, uncached, chain, session)
        state = policy.observe(fact, state)
    return state


def leaves_holder_at(policy, idle_workers=1, request=None, hit_tokens=850, state=None):
    """Return how many requests more than its idle peers the only worker with the prefix has when a
    rule first leaves it.
    """
    for more in range(200):
        costs = costs_of(
            policy,
            request,
            state,
            hit_tokens=[hit_tokens] + [0] * idle_workers,
            running=[more] + [0] * idle_workers,
        )
        if pick(np.array(costs), 0.0) != 0:
            return more
    return None
