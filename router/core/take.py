"""A fact, whatever its kind, told to the core: for those who pass facts on without looking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from policies.facts import (
    Arrival,
    Fact,
    Failure,
    Finish,
    FirstToken,
    KvCopied,
    KvEvents,
    KvHeard,
    LoadReport,
    PeerDispatched,
    PeerEnded,
    PeerFirstToken,
    PeerProgress,
    Probed,
    Progress,
    ReplayEnd,
    Tick,
    WorkerChange,
)
from router.core.actions import Action
from router.core.core import RouterCore

# Each kind of fact and what is told of it: looked up, for facts come by the thousand a second.
_TOLD: Mapping[type, Callable[[RouterCore, Any], list[Action]]] = MappingProxyType(
    {
        Arrival: RouterCore.on_arrival,
        FirstToken: RouterCore.on_first_token,
        Progress: RouterCore.on_progress,
        Finish: RouterCore.on_finish,
        Failure: RouterCore.on_failure,
        LoadReport: RouterCore.on_load_report,
        KvEvents: RouterCore.on_kv_events,
        ReplayEnd: RouterCore.on_replay_end,
        KvCopied: RouterCore.on_kv_copied,
        KvHeard: RouterCore.on_kv_heard,
        WorkerChange: RouterCore.on_worker,
        Probed: RouterCore.on_probed,
        PeerDispatched: RouterCore.on_peer,
        PeerFirstToken: RouterCore.on_peer,
        PeerProgress: RouterCore.on_peer,
        PeerEnded: RouterCore.on_peer,
        Tick: RouterCore.on_tick,
    }
)


def take(core: RouterCore, fact: Fact) -> list[Action]:
    """The core's answer to `fact`. Raises TypeError for what it is never told from outside."""
    told = _TOLD.get(type(fact))
    if told is None:
        raise TypeError(f"not a fact the core takes from outside: {fact!r}")
    return told(core, fact)
