"""Helpers for tests of published rules: they return costs as lists, states from facts, and the load
at which a rule leaves the cached worker.
"""

from __future__ import annotations

import numpy as np

from policies.facts import Dispatched
from policies.pick import pick
from tests.policies.fleet import fleet_of, request_of


def costs_of(policy, request=None, facts=(), **columns):
    request = request or request_of()
    return policy.costs(request, fleet_of(**columns), state_of(policy, facts)).tolist()


def state_of(policy, facts=()):
    state = policy.initial_state() if hasattr(policy, "initial_state") else None
    for fact in facts:
        state = policy.observe(fact, state)
    return state


def sent(chain, worker_id=0, hit_tokens=0, request_id=0, now_s=0.0, size=16):
    chain = np.array(chain, dtype=np.uint64)
    uncached = max(len(chain) * size - hit_tokens, 1)
    return Dispatched(now_s, request_id, worker_id, hit_tokens, uncached, chain)


def spill_depth(policy, request, hit_tokens, limit=200, state=None, **columns):
    """Return the least number of running requests at the worker with the prefix at which the
    request goes elsewhere, or None if that is never below `limit`.
    """
    for requests in range(limit):
        fleet = fleet_of(hit_tokens=[hit_tokens, 0], running=[requests, 0], **columns)
        made = state(requests) if state else state_of(policy)
        if pick(policy.costs(request, fleet, made), 0.0) == 1:
            return requests
    return None
