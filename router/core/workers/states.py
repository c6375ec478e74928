"""Defines the state machines of a worker in the decision core: one for its lifecycle, and one for
its health.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

# A worker's life, as the shell reports it (`WorkerChange.state` is the event).
WorkerState = Literal["new", "ready", "draining", "down", "gone"]
WORKER_STATES: Mapping[tuple[WorkerState, str], WorkerState] = MappingProxyType(
    {
        ("new", "ready"): "ready",
        ("new", "draining"): "draining",
        ("new", "down"): "down",
        ("ready", "ready"): "ready",
        ("ready", "draining"): "draining",
        ("ready", "down"): "down",
        ("ready", "gone"): "gone",
        ("draining", "ready"): "ready",
        ("draining", "draining"): "draining",
        ("draining", "down"): "down",
        ("draining", "gone"): "gone",
        ("down", "ready"): "ready",
        ("down", "draining"): "draining",
        ("down", "down"): "down",
        ("down", "gone"): "gone",
    }
)

# A worker's health, as the core observes it. "healthy": it gets requests. "ejected": it gets none.
# "probed": it gets none until it answers a probe. "trial": it gets one request at a time until it
# has answered one.
HealthState = Literal["healthy", "ejected", "probed", "trial"]
HEALTH_STATES: Mapping[tuple[HealthState, str], HealthState] = MappingProxyType(
    {
        ("healthy", "too many requests fail"): "ejected",
        ("healthy", "all its streams stall"): "ejected",
        ("healthy", "it comes back from being down"): "healthy",
        ("ejected", "its ejection ends"): "probed",
        ("ejected", "it answers a new request"): "healthy",
        ("ejected", "its stall ends"): "healthy",
        ("ejected", "it comes back from being down"): "healthy",
        ("probed", "its probe gets no answer"): "probed",
        ("probed", "its probe fails"): "ejected",
        ("probed", "its probe succeeds"): "trial",
        ("probed", "it answers a new request"): "healthy",
        ("probed", "its stall ends"): "healthy",
        ("probed", "it comes back from being down"): "healthy",
        ("trial", "it fails a new request"): "ejected",
        ("trial", "it answers a new request"): "healthy",
        ("trial", "no request came to try it"): "healthy",
        ("trial", "its stall ends"): "healthy",
        ("trial", "it comes back from being down"): "healthy",
    }
)
