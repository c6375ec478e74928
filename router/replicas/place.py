"""What all stretches of a link have in common: who we are, what is counted, who listens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.replicas.agreement import Disagreements
from router.replicas.exchange import Exchange
from router.replicas.identity import Keys
from router.replicas.lease import Leases
from router.replicas.roll import Roll


@dataclass(slots=True)
class LinkCounters:
    """Counts only ever grow. Lifetime: process."""

    told_messages: int = 0
    told_bytes: int = 0
    heard_messages: int = 0
    heard_bytes: int = 0
    dropped: int = 0  # of ours: too long, or lost with the link
    malformed: int = 0  # of others: entries that are no messages, fields that are no replicas
    reconnects: int = 0  # times that the link was up again
    lapses: int = 0  # times that our own entry was gone from the registry


@dataclass(slots=True)
class Place:
    """Lifetime: process."""

    me: str
    keys: Keys
    exchange: Exchange
    roll: Roll
    leases: Leases
    terms: Mapping[str, str]  # what must agree (`agreement.py`); replaced at a reload
    flush_s: float
    lease_s: float
    clock: Callable[[], float]
    counters: LinkCounters = field(default_factory=LinkCounters)
    disagreements: Disagreements = field(default_factory=Disagreements)
    beats: int = 0
    leaving: bool = False  # the next flush is the last
