"""Writes the reasons for a routing decision as JSON, and as the value of a response header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from policies.facts import Arrival
from router.core.contract.actions import (
    SECONDS,
    Decision,
    Details,
    Reject,
    SeenWorker,
    runner_up,
)
from router.core.placement.choice import Choice, Withheld
from router.core.workers.hit_modes import HitVerdict
from router.record.request_record import Attempt

_IN_A_HEADER = 3  # workers


def explanation(
    request_id: int, worker_id: int, decision: Decision, routed_by: str = ""
) -> dict[str, Any]:
    """Return a short description of a decision for JSON: the best three workers, the chosen one
    first, with the terms of their costs if these were requested.

    `routed_by` says by what the request was routed, such as load alone; it is "" if that is
    obvious.
    """
    seen = {} if decision.details is None else {one.worker_id: one for one in decision.details.seen}
    return {
        "request": request_id,
        "worker": worker_id,
        "policy": decision.policy,
        "reason": decision.reason,
        "expected_hit_tokens": decision.hit_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "approximate": decision.approximate,
        "held_s": None if decision.details is None else _plain(decision.details.request["held_s"]),
        "standing": None if decision.details is None else decision.details.request["standing"],
        "unit": decision.unit,
        "best": [
            {"worker": c.worker_id, "cost": _plain(c.cost), "hit_tokens": c.hit_tokens}
            | ({"terms": _numbers(seen[c.worker_id].terms)} if c.worker_id in seen else {})
            for c in decision.candidates
        ],
    } | ({"routed_by": routed_by} if routed_by else {})


def everything(details: Details) -> dict[str, Any]:
    """Return all that the policy saw at a decision, for JSON: the request, the pool and the best
    eight workers.
    """
    return {
        "of_request": _numbers(details.request),
        "of_pool": _numbers(details.pool),
        "considered_workers": details.workers,
        "workers": [_worker(seen) for seen in details.seen],
    }


def columns_in_header(details: Details) -> dict[str, Any]:
    """Return the known columns of the best three workers; more would be too long for a header."""
    known = {
        str(seen.worker_id): {
            name: value for name, value in _numbers(seen.columns).items() if value is not None
        }
        for seen in details.seen[:_IN_A_HEADER]
    }
    return {"columns": known}


def _worker(seen: SeenWorker) -> dict[str, Any]:
    return {
        "worker": seen.worker_id,
        "cost": _plain(seen.cost),
        "terms": _numbers(seen.terms),
        "columns": _numbers(seen.columns),
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """Return a value for JSON: numbers rounded, and None for NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def withheld(request_id: int, hold: Withheld) -> dict[str, Any]:
    """Return a short description of a held request for JSON: how long it is held, its place in the
    queue, and what the best three workers would cost.
    """
    seen = hold.details.seen[:_IN_A_HEADER]
    limit = {"limit": hold.limit} if hold.limit else {}
    return {
        "request": request_id,
        "held": True,
        "held_s": _plain(hold.details.request["held_s"]),
        "standing": hold.details.request["standing"],
        "policy": hold.policy,
        "prompt_tokens": hold.details.request["prompt_tokens"],
        "best": [{"worker": one.worker_id, "terms": _numbers(one.terms)} for one in seen],
        **limit,
    }


EXPLAIN_HEADER = "x-warmroute-explain"
WORKER_HEADER = b"x-warmroute-worker"
HELD_HEADER = b"x-warmroute-held-ms"
Asked = Literal["no", "sampled", "short", "full"]
TO_CLIENTS = ("short", "full")
HELD_CODES = ("hold_timeout", "hold_queue_full")  # of requests that no worker would take

# The fields shown of the decision for a prefill; the others are equal for both legs of a request.
_OF_PREFILL = ("policy", "reason", "expected_hit_tokens", "unit", "best")

_HEADER_BYTES = 6_000  # of an explanation: many clients stop at 8,190 for a line


def explanation_line(attempt: Attempt, full: bool, prefill: Attempt | None = None) -> bytes:
    """Return why a request was sent to its worker as the value of a response header: a sentence,
    then JSON. `full` adds the workers' columns.

    `prefill` is the attempt at the worker that computes the prompt's KV for this one, if there is
    one.
    """
    decision, request_id = attempt.decision, attempt.request_id
    shown = explanation(request_id, attempt.worker_id, decision, attempt.routed_by)
    shown |= hits_of(attempt if prefill is None else prefill) | name_of(attempt)
    if full and decision.details is not None:
        shown |= columns_in_header(decision.details)
    if prefill is not None:
        why = prefill.decision
        first = explanation(request_id, prefill.worker_id, why)
        shown |= {
            "prefill_worker": prefill.worker_id,
            "prefill": {name: first[name] for name in _OF_PREFILL},
        }
        if full and why.details is not None:
            shown["prefill"] |= columns_in_header(why.details)
    return _line(why_there(attempt, prefill), shown)


def name_of(attempt: Attempt) -> dict[str, Any]:
    """Return for JSON what a naming rule did to the request's model name; empty if no
    rule applied.
    """
    return {} if attempt.name is None else {"name": attempt.name.shown()}


def hits_of(attempt: Attempt) -> dict[str, Any]:
    """Return for JSON how exactly the cache of the attempt's worker was known; empty if that was
    not requested.
    """
    return {} if attempt.hits is None else {"hits": attempt.hits.shown()}


def why_there(attempt: Attempt, prefill: Attempt | None = None) -> str:
    """Return one plain sentence on why a request went to its worker, and to the worker that
    computes its prefill.
    """
    if prefill is None:
        return why_sentence(attempt.worker_id, attempt.decision, attempt.block_size, attempt.hits)
    of_prefill = prefill.worker_id, prefill.decision, prefill.block_size, prefill.hits
    return f"{why_sentence(*of_prefill, 'prefills and ')}; worker {attempt.worker_id} decodes"


def why_sentence(
    worker_id: int,
    decision: Decision,
    block_size: int | None,
    hits: HitVerdict | None = None,
    does: str = "",
) -> str:
    """Return a sentence that says why a decision chose its worker: which cached tokens the worker
    holds, what the next best worker would cost, and any other reason. The text is ASCII, without
    braces.

    `hits` says how exactly the cache is known. `does` says what else the worker does for the
    request.
    """
    mode = "approximate" if decision.approximate else "exact" if hits is None else hits.mode
    verb = {"exact": "holds", "degraded": "is known to hold", "approximate": "holds about"}[mode]
    size, unit = (block_size, "block") if block_size and block_size > 1 else (1, "token")
    held, of = decision.hit_tokens // size, -(-decision.prompt_tokens // size)
    parts = [f"worker {worker_id} {does}{verb} {held} of {of} {unit}{'' if of == 1 else 's'}"]
    parts.append(_next_best(decision, size, unit))
    return "; ".join(filter(None, (*parts, _REASONS.get(decision.reason, ""))))


# The words that a decision's reason adds to its sentence; "policy" and "only_worker" add none.
_REASONS = {
    "retry": "another worker had failed it",
    "migration": "another worker had begun it",
    "held": "it had waited for a worker",
    "fallback": "the fallback decided, as the policy failed",
}


def _next_best(decision: Decision, size: int, unit: str) -> str:
    """Return a text that says how much more the next best worker would have cost, or how many
    tokens of the prompt it holds.
    """
    other, best = runner_up(decision), next(iter(decision.candidates), None)
    if other is None or best is None or not math.isfinite(other.cost):
        return "no other worker could take it"
    whose, more = f"worker {other.worker_id}", other.cost - best.cost
    if not math.isfinite(more):
        return f"{whose} was next"
    if more <= 0:
        return f"{whose} would do as well"
    if decision.unit == SECONDS:
        return f"{whose} would take {_duration(more)} longer"
    return f"{whose} holds {other.hit_tokens // size} and costs {more:.3g} more"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def refusal_line(arrival: Arrival, now_s: float, choice: Choice | Withheld | Reject) -> str | None:
    """Return why no worker took a held request until `now_s`, as the header of its refusal; None
    for other refusals.
    """
    if not isinstance(choice, Withheld):
        return None
    shown = withheld(arrival.request_id, choice) | {"held_s": round(now_s - arrival.now_s, 6)}
    return _line("no worker would take it in time", shown).decode()


def _line(why: str, shown: dict[str, Any]) -> bytes:
    """Return the value of a response header: a sentence, and then JSON from the first brace on.

    The JSON is shortened if the header would otherwise be too long for clients' parsers.
    """
    sentence = f"{why}; ".encode("ascii", "replace")
    for part in ("columns", "best"):
        line = sentence + msgspec.json.encode(shown)
        if len(line) <= _HEADER_BYTES:
            return line
        shown = _without(part, shown)
        if "prefill" in shown:
            shown["prefill"] = _without(part, shown["prefill"])
    return sentence + msgspec.json.encode(shown)


def _without(part: str, shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name != part}
