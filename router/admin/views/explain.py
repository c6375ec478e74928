"""Answers `/explain` of the admin port with the reasons for the worker that a request got or would
get.
"""

from __future__ import annotations

from typing import Any

from router.admin.views.rows import decision_shown, shown_count
from router.body.paths import PATHS
from router.core.contract.actions import Reject
from router.core.placement.choice import Choice, Withheld
from router.http.errors import ClientError
from router.http.messages import Request, Response, json_response
from router.keys.key_file import KeyTerms
from router.record.explain import everything, explanation, why_sentence, withheld
from router.record.request_record import LatestAttempts
from router.request.inference import Inference
from router.request.prompts import Prompt
from router.request.service import Service


class ExplainPages:
    """Handles requests for `/explain`. Lifetime: process."""

    def __init__(self, service: Service, inference: Inference, decisions: LatestAttempts) -> None:
        self._service = service
        self._dispatcher = service.dispatcher
        self._inference = inference
        self._decisions = decisions

    async def look(self, request: Request) -> Response:
        """Return the dispatches of one request, or the reason why it waits (`?request=ID`). With
        `?last=20`, return the latest dispatches of all requests.
        """
        if "request" in request.query:
            return json_response(self._of(request.query["request"]))
        latest = self._decisions.latest(shown_count(request, "last"))
        shown = [decision_shown(attempt) for attempt in latest]
        return json_response({"decisions": shown})

    async def attempt(self, request: Request) -> Response:
        """Return the worker that the request in the body would get now, with the reasons. The
        request is not sent to any worker and not charged.
        """
        path = PATHS.get(request.query.get("path", "/v1/completions"))
        if path is None:
            raise ClientError(400, f"`path` must be one of {', '.join(PATHS)}", "path")
        read = await self._inference.reader.arrival(request.body, path, request.headers, KeyTerms())
        arrival = read.arrival
        choice = self._dispatcher.explain(arrival)
        if isinstance(choice, Reject):
            raise ClientError(
                choice.status if choice.status < 500 else 409, choice.message, code=choice.code
            )
        shown = self._tried(arrival.request_id, choice, read.prompt)
        named = {} if read.name is None else {"name": read.name.shown()}
        return json_response(shown | named)

    def _of(self, text: str) -> dict[str, Any]:
        if not (text.isascii() and text.isdecimal() and len(text) < 18):
            raise ClientError(400, "`request` must be a request's number", "request")
        request_id = int(text)
        found = self._decisions.of(request_id)
        if found:
            return {"decisions": [decision_shown(attempt, whole=True) for attempt in found]}
        choice = self._dispatcher.explain_held(request_id)
        if choice is None or isinstance(choice, Reject):
            raise ClientError(404, f"request {request_id} is neither waiting nor among the latest")
        return self._tried(request_id, choice)

    def _tried(
        self, request_id: int, choice: Choice | Withheld, prompt: Prompt | None = None
    ) -> dict[str, Any]:
        if isinstance(choice, Withheld):
            return withheld(request_id, choice) | everything(choice.details)
        worker, hits = choice.worker, self._service.hits
        member = self._service.fleet.members.get(worker.worker_id)
        verdict = None if hits is None or prompt is None else hits.of_request(member, prompt)
        shown = explanation(request_id, worker.worker_id, choice.decision)
        size = worker.facts.block_size
        shown["why"] = why_sentence(worker.worker_id, choice.decision, size, verdict)
        shown |= {} if verdict is None else {"hits": verdict.shown()}
        details = choice.decision.details
        return shown if details is None else shown | everything(details)
