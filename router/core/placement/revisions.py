"""Chooses the revision of a model whose workers serve both legs of a request.

During a rollout a model has workers of several revisions, and KV passes within one revision only.
The scarcest role bounds what a revision can carry: with 2 of 2 prefill workers but 1 of 9 decode
workers, a ninth. Requests are shared out by these bounds. Weighted rendezvous hashing keeps a
session at its revision while the shares move, and moves only as many sessions as it must.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from policies.facts import Arrival, Role
from router.core.placement.eligible import does
from router.core.placement.pending import Pending
from router.core.workers.table import Worker, WorkerTable

_LEGS: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class RevisionShare:
    """What one revision of a model can carry, relative to the others.

    Lifetime: until a worker changes.
    """

    revision: str | None
    groups: frozenset[str]  # of its workers that take KV from each other
    weight: float
    seed: int


def shares_of(workers: Iterable[Worker]) -> tuple[RevisionShare, ...]:
    """Return the share of each revision of a model's ready workers, or nothing for one revision.

    A revision that lacks a role has the weight 0, unless its decode workers can do all of a
    request.
    """
    ready = [w for w in workers if w.state == "ready"]
    counts = {leg: Counter(w.facts.revision for w in ready if does(w, leg, None)) for leg in _LEGS}
    revisions = counts["prefill"].keys() | counts["decode"].keys()
    if len(revisions) < 2:
        return ()
    most = {leg: max(counts[leg].values(), default=0) for leg in _LEGS}
    shares = []
    for revision in sorted(revisions, key=lambda name: name or ""):
        own = [w for w in ready if w.facts.revision == revision]
        decoding = [w for w in own if does(w, "decode", None)]
        legs: tuple[Role, ...] = _LEGS
        if not counts["prefill"][revision] and all(w.facts.serves_alone for w in decoding):
            legs = ("decode",)
        weight = min(counts[leg][revision] / most[leg] if most[leg] else 0.0 for leg in legs)
        groups = frozenset(w.facts.group for w in own if w.facts.group is not None)
        seed = xxhash.xxh3_64_intdigest((revision or "").encode())
        shares.append(RevisionShare(revision, groups, weight, seed))
    return tuple(shares)


def key_of(arrival: Arrival, serial: int) -> bytes:
    """Return what stays the same over the requests that should stay at one revision.

    This is the session, else the beginning of the prompt, else the request alone.
    """
    if arrival.session is not None:
        return repr((arrival.tenant, arrival.session)).encode()
    if arrival.chains and len(chain := arrival.chains[min(arrival.chains)]):
        return int(chain[0]).to_bytes(8, "little")
    return b"%d" % serial


def chosen(shares: Iterable[RevisionShare], key: bytes) -> RevisionShare | None:
    """Return the revision for a key by weighted rendezvous hashing; None if none has a weight."""
    best, best_score = None, 0.0
    for share in shares:
        bits = xxhash.xxh3_64_intdigest(key, share.seed)
        score = share.weight / -math.log(((bits >> 11) + 0.5) * 2.0**-53)
        if score > best_score:
            best, best_score = share, score
    return best


class Revisions:
    """Remembers the shares of each model's revisions until a worker changes.

    Lifetime: process.
    """

    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._version = -1
        self._shares: dict[str, tuple[RevisionShare, ...]] = {}  # of models that are served

    def groups_for(self, pending: Pending) -> frozenset[str] | None:
        """Return the groups of the revision that should serve a request in two legs.

        Return None if the model has one revision only. A revision that the request names goes
        before the choice by shares.
        """
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._shares.clear()
        arrival = pending.arrival
        shares = self._shares.get(arrival.model)
        if shares is None:
            shares = self._shares[arrival.model] = shares_of(self._workers.serving(arrival.model))
        if not shares:
            return None
        named = [one for one in shares if one.weight and one.revision == arrival.revision]
        if arrival.revision is not None and named:
            return named[0].groups
        share = chosen(shares, key_of(arrival, pending.serial))
        return None if share is None else share.groups
