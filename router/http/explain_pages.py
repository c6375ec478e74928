"""What the admin port tells of decisions: the latest, one request's, and one that is only tried."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from router.core.actions import Reject
from router.core.chooser import Choice, Withheld
from router.http.answers import json_response, shown_count
from router.http.decisions import DecisionLog, Record
from router.http.errors import ClientError
from router.http.inference import Inference
from router.http.paths import PATHS
from router.keys.terms import KeyTerms
from router.record.explanation import everything, explanation, withheld
from router.switchboard import Switchboard


class ExplainPages:
    """Handlers of `/explain`. Lifetime: process."""

    def __init__(
        self, switchboard: Switchboard, inference: Inference, decisions: DecisionLog
    ) -> None:
        self._switchboard = switchboard
        self._inference = inference
        self._decisions = decisions

    async def look(self, request: web.Request) -> web.StreamResponse:
        """One request's dispatches, or why it waits: `?request=ID`; else the latest: `?last=20`."""
        if "request" in request.query:
            return json_response(self._of(request.query["request"]))
        latest = self._decisions.latest(shown_count(request, "last"))
        shown = [decision_shown(record) for record in latest]
        return json_response({"decisions": shown})

    async def attempt(self, request: web.Request) -> web.StreamResponse:
        """Where the request in the body would go now, and why. Nothing is sent or charged."""
        body = await request.read()
        path = PATHS.get(request.query.get("path", "/v1/completions"))
        if path is None:
            raise ClientError(400, f"`path` must be one of {', '.join(PATHS)}", "path")
        arrival, *_ = await self._inference.arrival(body, path, request.headers.get, KeyTerms())
        choice = self._switchboard.explain(arrival)
        if isinstance(choice, Reject):
            raise ClientError(
                choice.status if choice.status < 500 else 409, choice.message, code=choice.code
            )
        return json_response(_tried(arrival.request_id, choice))

    def _of(self, text: str) -> dict[str, Any]:
        if not (text.isascii() and text.isdecimal() and len(text) < 18):
            raise ClientError(400, "`request` must be a request's number", "request")
        request_id = int(text)
        found = self._decisions.of(request_id)
        if found:
            return {"decisions": [decision_shown(record, whole=True) for record in found]}
        choice = self._switchboard.explain_held(request_id)
        if choice is None or isinstance(choice, Reject):
            raise ClientError(404, f"request {request_id} is neither waiting nor among the latest")
        return _tried(request_id, choice)


def _tried(request_id: int, choice: Choice | Withheld) -> dict[str, Any]:
    if isinstance(choice, Withheld):
        return withheld(request_id, choice) | everything(choice.details)
    shown = explanation(request_id, choice.worker.worker_id, choice.decision)
    details = choice.decision.details
    return shown if details is None else shown | everything(details)


def decision_shown(record: Record, whole: bool = False) -> dict[str, Any]:
    """One dispatch and what came of it. `whole`: with all that it saw, where that was kept."""
    details = record.decision.details if whole else None
    return {
        "now_s": record.now_s,
        "model": record.model,
        "session": record.session,
        "tenant": record.tenant,
        **explanation(record.request_id, record.worker_id, record.decision),
        "first_token_s": _rounded(record.first_token_s),
        "cached_tokens": record.cached_tokens,
        "regret_s": _rounded(record.regret_s),
        "regret_hit_tokens": record.regret_hit_tokens,
        **({} if details is None else everything(details)),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
