"""Finds the workers that may take a request, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

import numpy as np

from policies.contract import Ints
from policies.facts import Arrival, Role
from router.core.contract.actions import Reject
from router.core.placement.pending import Pending
from router.core.workers.silence import most_silent
from router.core.workers.table import Worker, WorkerTable

Group = str | frozenset[str]  # the group, or groups, whose workers may do a leg
_MODELS_NAMED = 8  # models listed in an error
_LEGS: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Rows:
    """The workers of one decision, in the order of their ids."""

    workers: tuple[Worker, ...]
    worker_ids: tuple[int, ...]
    slots: slice | Ints  # the positions of their columns; a slice if they are adjacent
    slot_ids: Ints  # the same for native code, which takes no slice
    block_sizes: tuple[int, ...]  # of each row
    distinct_block_sizes: tuple[int, ...]  # ascending
    have_thresholds: bool  # True if any of them has thresholds of its own
    have_kv_thresholds: bool  # True if any of them has a threshold of its own for KV in use

    @staticmethod
    def of(workers: Iterable[Worker]) -> Rows:
        """Return a `Rows` object with one row for each of these workers."""
        rows = tuple(workers)
        slots = [w.slot for w in rows]
        slot_ids = np.array(slots, np.int64)
        beside = bool(slots) and slots == list(range(slots[0], slots[0] + len(slots)))
        return Rows(
            workers=rows,
            worker_ids=tuple(w.worker_id for w in rows),
            slots=slice(slots[0], slots[0] + len(slots)) if beside else slot_ids,
            slot_ids=slot_ids,
            block_sizes=(sizes := tuple(w.facts.block_size for w in rows)),
            distinct_block_sizes=tuple(sorted(set(sizes))),
            have_thresholds=any(map(_has_threshold, rows)),
            have_kv_thresholds=not all(isnan(w.facts.max_kv_fraction) for w in rows),
        )

    def __len__(self) -> int:
        return len(self.workers)


@dataclass(frozen=True, slots=True)
class SilentCandidates:
    """The workers that could take a request if they were not silent, that is, if they answered
    probes. No other worker could take the request, so it waits until one of these workers answers.
    """

    rows: Rows


@dataclass(frozen=True, slots=True)
class _Open:
    """The workers of a pool that take requests, and the conditions under which all of them may take
    a request. It is valid until a worker changes. Nearly every request meets the conditions, so
    that most decisions need not check each worker of the pool.
    """

    rows: Rows
    block_sizes: frozenset[int]
    prompt_tokens_end: float  # prompts must be shorter than this
    all_in: bool  # none of them is ejected or on trial

    @staticmethod
    def of(pool: Iterable[Worker], model: str, leg: Role, group: Group | None) -> _Open:
        ready = [w for w in pool if w.state == "ready"]
        able = with_partners([w for w in ready if does(w, leg, group)], ready, leg)
        paired = with_partners(able, without_busy(ready), leg)
        rows = Rows.of(without_busy(with_model(paired, model)))
        limits = [w.facts.max_model_tokens for w in rows.workers]
        return _Open(
            rows=rows,
            block_sizes=frozenset(rows.distinct_block_sizes),
            prompt_tokens_end=min((n for n in limits if n is not None), default=float("inf")),
            all_in=len(rows) > 0 and all(w.is_in for w in able),
        )

    def to(self, pending: Pending) -> bool:
        """Return True if all workers in `rows` may take the request now."""
        arrival = pending.arrival
        return (
            self.all_in
            and arrival.needs is None
            and arrival.only is None
            and arrival.among is None
            and not pending.tried
            and self.block_sizes <= arrival.chains.keys()
            and (arrival.approximate or _longest(arrival) < self.prompt_tokens_end)
        )


def does(worker: Worker, leg: Role, group: Group | None) -> bool:
    """Return True if a worker's role allows a leg of a request, or the whole request ("both").
    `group` is the group of the worker that does the other leg, or a set of groups to one of which
    the worker must belong; None allows any group.
    """
    facts = worker.facts
    if leg == "both":
        return facts.role == "both" or (facts.role == "decode" and facts.serves_alone)
    if facts.role not in ("both", leg) or facts.group is None:
        return False
    if isinstance(group, frozenset):
        return facts.group in group
    return group is None or facts.group == group


def with_partners(able: list[Worker], ready: Iterable[Worker], leg: Role) -> list[Worker]:
    """Return the workers of `able` that can prefill alone or have a prefill worker in their group.
    `able` are the candidates for a decode leg; for any other leg, they are returned unchanged. Only
    workers in `ready` count as prefill workers. A group may lack them during a rollout, when a new
    version has only decode workers. If no worker would be left, all `able` workers are returned.
    """
    if leg != "decode" or all(w.facts.serves_alone for w in able):
        return able
    groups = {w.facts.group for w in ready if does(w, "prefill", None)}
    return [w for w in able if w.facts.serves_alone or w.facts.group in groups] or able


def without_busy(able: list[Worker]) -> list[Worker]:
    """Return the workers that did not report that they are busy, or all workers if every one did
    so.
    """
    return [w for w in able if not w.busy] or able


def with_model(able: list[Worker], model: str) -> list[Worker]:
    """Return the workers that did not report the model as missing, or all workers if every one did
    so.
    """
    return [w for w in able if model not in w.facts.denied] or able


def of_revision(pool: list[Worker], revision: str) -> list[Worker]:
    """Return the workers that serve this revision of their model."""
    return [w for w in pool if w.facts.revision == revision]


class Eligibility:
    """Finds the workers that may take a request.

    Results are remembered for each model and leg until a worker changes. Lifetime: process.
    """

    def __init__(self, workers: WorkerTable, panic_share: float = 0.5) -> None:
        """Start without remembered results. `CoreSettings` describes `panic_share`."""
        self._workers = workers
        self._panic_share = panic_share
        self._version = -1
        # By model, leg, group and revision, for served models only.
        self._open: dict[tuple[str, Role, Group | None, str | None], _Open] = {}

    def rows(
        self, pending: Pending, leg: Role = "both", group: Group | None = None
    ) -> Rows | Reject | SilentCandidates:
        """Return the workers that may take a leg of a request, or a `Reject` if there are none.

        Return `SilentCandidates` if the workers that could take it are silent, so that the request
        should wait. `group` is the group of the other leg's worker, or the groups that may have the
        leg, or None for any.
        """
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._open.clear()
        model, revision = pending.arrival.model, pending.arrival.revision
        key = model, leg, group, revision
        known = self._open.get(key)
        if known is None:
            pool = self._workers.serving(model)
            if not pool:
                return self._no_pool(pending.arrival)
            if revision is not None:
                pool = of_revision(pool, revision) or pool
            known = self._open[key] = _Open.of(pool, model, leg, group)
        return known.rows if known.to(pending) else self.rows_uncached(pending, leg, group)

    def rows_uncached(
        self, pending: Pending, leg: Role = "both", group: Group | None = None
    ) -> Rows | Reject | SilentCandidates:
        """Return the same result as `rows`, but check every worker and use no remembered
        results.
        """
        arrival = pending.arrival
        pool = self._workers.serving(arrival.model)
        if not pool:
            return self._no_pool(arrival)
        if arrival.needs is not None:
            pool = [w for w in pool if arrival.needs not in w.facts.lacks]
            if not pool:
                why = f"no worker of model {arrival.model!r} has {arrival.needs}"
                return _reject(arrival, 404, "path_not_served", why)
        if arrival.only is not None:
            pool = [w for w in pool if w.worker_id == arrival.only]
            if not pool:
                why = f"the worker {arrival.only} that has its sequence is gone"
                return _reject(arrival, 503, "sequence_lost", why)
        if arrival.among is not None:
            among = frozenset(arrival.among)
            pool = [w for w in pool if w.worker_id in among]
            if not pool:
                why = f"none of the endpoints that it may go to serves model {arrival.model!r}"
                return _reject(arrival, 503, "no_endpoint_in_subset", why)
        ready = [w for w in pool if w.state == "ready" and w.facts.block_size in arrival.chains]
        heard = [w for w in ready if w.silent is None]
        # If no worker of the revision can take it, others of the model may.
        if arrival.revision is not None:
            able = [w for w in of_revision(heard, arrival.revision) if w.takes_requests]
            if not any(does(w, leg, group) for w in heard) or any(
                does(w, leg, group) for w in able
            ):
                answer = self._of(pending, leg, group, pool, able)
                if isinstance(answer, Rows):
                    return answer
        answer = self._of(pending, leg, group, pool, heard)
        if len(heard) == len(ready) or isinstance(answer, Rows):
            return answer
        able = [w for w in ready if does(w, leg, group)]
        rows = self._of(pending, leg, group, pool, ready)
        if isinstance(rows, Rows) and most_silent(able, self._panic_share):
            return SilentCandidates(rows)
        return answer

    def _of(
        self,
        pending: Pending,
        leg: Role,
        group: Group | None,
        pool: list[Worker],
        ready: list[Worker],
    ) -> Rows | Reject:
        """Return the `ready` workers that may take the leg, or a `Reject` if there are none.

        `pool` has all workers of the model, for the text of the `Reject`.
        """
        arrival = pending.arrival
        able = [w for w in ready if does(w, leg, group)]
        untried = [w for w in ready if w.worker_id not in pending.tried]
        able = with_partners(able, untried, leg)
        able = with_partners(able, without_busy(untried), leg)
        if not able and leg == "both":  # better than a refusal
            able = [w for w in ready if w.facts.serves_alone]
        if ready and not able:
            why = _one_role_only(arrival.model, ready)
            return _reject(arrival, 503, "no_worker_available", why)
        # If all workers are ejected, or all others were tried, a worker that failed lately is
        # better than a certain refusal.
        ready = [w for w in able if w.takes_requests] or able
        if not ready:
            states = sorted({w.shown_state for w in pool})
            why = f"all {len(pool)} workers of model {arrival.model!r} are {' or '.join(states)}"
            return _reject(arrival, 503, "no_worker_available", why)
        untried = [w for w in ready if w.worker_id not in pending.tried] or [
            w for w in able if w.worker_id not in pending.tried
        ]
        if not untried:
            last = f", last: {pending.cause}" if pending.cause else ""
            why = f"every available worker failed this request ({len(pending.tried)} tried{last})"
            return _reject(arrival, 502, "worker_error", why)
        fitting = [w for w in untried if _fits(arrival, w)]
        if not fitting:
            longest = max(w.facts.max_model_tokens or 0 for w in untried)
            why = f"the prompt has {_longest(arrival)} tokens, the model takes {longest}"
            return _reject(arrival, 400, "context_length_exceeded", why)
        return Rows.of(without_busy(with_model(fitting, arrival.model)))

    def has_room(self, pending: Pending, leg: Role) -> bool:
        """Return True if a worker that is not busy may take this leg of the request."""
        rows = self.rows(pending, leg)
        return isinstance(rows, Rows) and not rows.workers[0].busy

    def may_have_model(self, pending: Pending, leg: Role) -> bool:
        """Return True if a worker that did not report the model as missing may take this leg."""
        rows = self.rows(pending, leg)
        return isinstance(rows, Rows) and pending.arrival.model not in rows.workers[0].facts.denied

    def _no_pool(self, arrival: Arrival) -> Reject:
        models = self._workers.models()
        if not models:
            why = "no worker has been recognized yet; `warmroute workers` and the log say why"
            return _reject(arrival, 503, "no_worker_available", why)
        named = ", ".join(models[:_MODELS_NAMED]) + (", ..." if len(models) > _MODELS_NAMED else "")
        why = f"the model {arrival.model!r} does not exist; this router serves: {named}"
        return _reject(arrival, 404, "model_not_found", why)


def _fits(arrival: Arrival, worker: Worker) -> bool:
    """Return True if the prompt is shorter than the worker's maximum number of tokens.

    Also return True if the prompt's length is only estimated, or if the worker has no maximum.
    """
    limit = worker.facts.max_model_tokens
    return limit is None or arrival.approximate or _longest(arrival) < limit


def _has_threshold(worker: Worker) -> bool:
    facts = worker.facts
    limits = (facts.max_requests, facts.max_queued_tokens, facts.max_kv_fraction)
    return not all(map(isnan, limits))


def _longest(arrival: Arrival) -> int:
    """Return the number of tokens in a request's longest prompt.

    A request may have several prompts, and a worker's maximum applies to each of them.
    """
    longest = arrival.longest_prompt_tokens
    return arrival.prompt_tokens if longest is None else longest


def _one_role_only(model: str, ready: list[Worker]) -> str:
    """Return a text that says why the roles of the ready workers cannot serve a request."""
    roles = {w.facts.role for w in ready}
    missing = "decodes" if roles == {"prefill"} else "prefills"
    if {"prefill", "decode"} <= roles and _meet(ready):
        return (
            f"no worker of model {model!r} does all of a request, and this one is not for two: "
            "those with n, echo, media or log probabilities of the prompt are not split"
        )
    if len(roles) > 1:
        groups = ", ".join(sorted({w.facts.group or "none" for w in ready}))
        return f"no worker of model {model!r} takes KV from another: their groups are {groups}"
    return f"no worker of model {model!r} {missing}: all {len(ready)} that are ready have one role"


def _meet(ready: list[Worker]) -> bool:
    """Return True if some group has both a prefill worker and a decode worker."""
    groups = {leg: {w.facts.group for w in ready if w.facts.role == leg} for leg in _LEGS}
    return bool(groups["prefill"] & groups["decode"] - {None})


def _reject(arrival: Arrival, status: int, code: str, message: str) -> Reject:
    return Reject(arrival.request_id, status, code, message)
