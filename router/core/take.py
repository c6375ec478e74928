"""A fact, whatever its kind, told to the core: for those who pass facts on without looking."""

from __future__ import annotations

from policies.facts import (
    Arrival,
    Fact,
    Failure,
    Finish,
    FirstToken,
    KvEvents,
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


def take(core: RouterCore, fact: Fact) -> list[Action]:
    """The core's answer to `fact`. Raises TypeError for what it is never told from outside."""
    match fact:
        case Arrival():
            return core.on_arrival(fact)
        case FirstToken():
            return core.on_first_token(fact)
        case Progress():
            return core.on_progress(fact)
        case Finish():
            return core.on_finish(fact)
        case Failure():
            return core.on_failure(fact)
        case LoadReport():
            return core.on_load_report(fact)
        case KvEvents():
            return core.on_kv_events(fact)
        case ReplayEnd():
            return core.on_replay_end(fact)
        case WorkerChange():
            return core.on_worker(fact)
        case Probed():
            return core.on_probed(fact)
        case PeerDispatched() | PeerFirstToken() | PeerProgress() | PeerEnded():
            return core.on_peer(fact)
        case Tick():
            return core.on_tick(fact)
        case _:
            raise TypeError(f"not a fact the core takes from outside: {fact!r}")
