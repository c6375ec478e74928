"""Chooses the revision of a model whose workers serve both legs of a request. During a rollout a
model has workers of several revisions, and KV passes only between workers of the same revision. The
scarcest role bounds the share of requests that a revision can carry: with 2 of 2 prefill workers
but 1 of 9 decode workers, the share is a ninth. Requests are shared out by these bounds. Weighted
rendezvous hashing keeps a session at its revision while the shares change, and moves only as many
sessions as necessary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from operator import itemgetter

import xxhash

from policies.facts import Arrival, Role, user_id_of
from router.core.placement.eligible import does
from router.core.placement.pending import Pending
from router.core.workers.table import Worker, WorkerTable

_LEGS: tuple[Role, Role] = ("prefill", "decode")
# Of a prompt without a session: more than system prompts have, which conversations share. Beyond
# it a conversation that grows stays at its revision.
_KEY_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class RevisionShare:
    """The share of a model's requests that one of its revisions can carry.

    Lifetime: until a worker changes.
    """

    revision: str | None
    groups: frozenset[str]  # of its workers that take KV from each other
    weight: float
    seed: int


def shares_of(workers: Iterable[Worker], tried: Container[int] = ()) -> tuple[RevisionShare, ...]:
    """Return the share of each revision of a model's workers, or nothing if there is only one
    revision. Only workers that take requests count, without those in `tried`, which have failed the
    request. A revision that lacks a role has the weight 0, unless its decode workers can do whole
    requests.
    """
    ready = [w for w in workers if w.takes_requests and w.worker_id not in tried]
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
    """Return bytes that are equal for all requests that should stay at one revision. They are made
    of the client's own identification (`policies.facts.user_id_of`), else of the first
    `_KEY_TOKENS` tokens of the prompt, else of the request alone. The beginning of a prompt
    identifies a conversation less well, because conversations often share it. For a shorter prompt,
    its length represents the tokens after its last full block.
    """
    if (person := user_id_of(arrival.session, arrival.identity)) is not None:
        return repr((arrival.tenant, person)).encode()
    size = min(arrival.chains, default=1)
    chain = arrival.chains.get(size, ())
    if not len(chain):
        return b"%d" % serial
    depth = max(_KEY_TOKENS // size, 1)
    tokens = 0 if len(chain) >= depth else arrival.prompt_tokens
    return b"%d %d" % (chain[min(depth, len(chain)) - 1], tokens)


def in_order(shares: Iterable[RevisionShare], key: bytes) -> list[RevisionShare]:
    """Return the revisions with a weight above 0, the best one for a key first. The order is that
    of weighted rendezvous hashing.
    """
    scores = []
    for share in shares:
        if share.weight <= 0.0:  # not by the score: that of the least weights is rounded to 0
            continue
        bits = xxhash.xxh3_64_intdigest(key, share.seed)
        score = share.weight / -math.log(((bits >> 11) + 0.5) * 2.0**-53)
        scores.append((score, share))
    scores.sort(key=itemgetter(0), reverse=True)
    return [share for _, share in scores]


class Revisions:
    """Remembers the shares of each model's revisions until a worker changes.

    Lifetime: process.
    """

    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._version = -1
        self._shares: dict[str, tuple[RevisionShare, ...]] = {}  # of models that are served

    def groups_for(self, pending: Pending) -> list[frozenset[str]]:
        """Return for each revision that could serve a request in two legs the groups of its
        workers, the best revision first. A revision that the request names comes before the others.
        Return an empty list if the model has only one revision, or if no revision has both roles.
        """
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._shares.clear()
        arrival = pending.arrival
        shares = self._shares.get(arrival.model)
        if shares is None:
            shares = self._shares[arrival.model] = shares_of(self._workers.serving(arrival.model))
        if shares and pending.tried:
            shares = shares_of(self._workers.serving(arrival.model), pending.tried)
        if not shares:
            return []
        order = in_order(shares, key_of(arrival, pending.serial))
        if arrival.revision is not None:
            order.sort(key=lambda one: one.revision != arrival.revision)
        return [one.groups for one in order]
