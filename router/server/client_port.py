"""Serves the client port: inference paths, models, health and readiness. All other paths are
refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from router.body.paths import KSERVE, PATHS
from router.http.errors import ClientError
from router.http.messages import (
    Answer,
    Handler,
    Request,
    Response,
    error_response,
    json_response,
    refused,
)
from router.server.model_list import anthropic_card, anthropic_page, wants_anthropic_form

if TYPE_CHECKING:
    from router.request.dialect import Dialect, Target
    from router.request.service import Service

log = logging.getLogger(__name__)

_MODEL_CHARS = 1_024
_MODELS = "/v1/models"
_CLAUDE_CODE_PATH = "/api/hello"  # Claude Code sends HEAD to this path before its first request
_GET_PATHS = frozenset({_MODELS, "/health", "/ready", _CLAUDE_CODE_PATH})
_SERVED = (*PATHS, *_GET_PATHS, f"{_MODELS}/{{model}}")
_PATH_CHARS = 200  # longest unknown path for which the error names a similar path, characters


class Infers(Protocol):
    """A function that answers inference requests, as `Inference.handle` does."""

    def __call__(
        self, http: Request, target: Target | None = None
    ) -> Coroutine[Any, Any, Answer]: ...


class ClientPort:
    """Answers each request of the client port. Lifetime: process."""

    def __init__(
        self,
        inference: Infers,
        service: Service,
        forwards: bool = False,
        dialects: Sequence[Dialect] = (),
    ) -> None:
        """Make the handler. `forwards` True means that requests to unknown paths are sent to
        workers, too. `dialects` are the APIs served besides OpenAI's.
        """
        self._dialects = dialects
        self._inference = inference
        self._service = service
        self._forwards = forwards
        self.faulty = service.faulty

    async def answer(self, request: Request) -> Answer:
        """Return the answer, which may be an error answer. Raises OSError if the client left."""
        answer = await answer_or_error(self._handle, request, self.faulty)
        if isinstance(answer, Response) and answer.status >= 400:
            path = request.path
            if (dialect := self._dialect_of(path)) is not None:
                answer.body = dialect.error(path, answer.body)
        return answer

    def _dialect_of(self, path: str) -> Dialect | None:
        return next((dialect for dialect in self._dialects if dialect.has(path)), None)

    def _handle(self, request: Request) -> Coroutine[Any, Any, Answer]:
        if request.method == "POST" and request.path in PATHS:
            return self._inference(request)
        return self._other(request)

    async def _other(self, request: Request) -> Answer:
        method, path = request.method, request.path
        if (dialect := self._dialect_of(path)) is not None:
            if (target := dialect.target_of(path)) is None:
                return await dialect.answer(request)
            if method == "POST":
                return await self._inference(request, target)
            return self._not_allowed(request, "POST")
        if path in PATHS:
            return self._not_allowed(request, "POST")
        of_model = path.startswith(f"{_MODELS}/") and len(path) > len(_MODELS) + 1
        if path in _GET_PATHS or (of_model and not self._forwards):
            if method not in ("GET", "HEAD"):
                return self._not_allowed(request, "GET,HEAD")
            return self._shown(request)
        if of_model and method in ("GET", "HEAD"):
            return self._shown(request)
        if method == "HEAD" and path == "/" and not self._forwards:
            return health(self._service)  # as older releases of Claude Code ask
        if self._forwards:
            return await self._inference(request)
        known = sorted((*_SERVED, *(one.path for one in KSERVE.values() if self._dialects)))
        near = get_close_matches(path[:_PATH_CHARS], known, 1)
        served = ", ".join(dict.fromkeys((*near, *known)))
        here = "is not served at the client port (operators' pages are at the admin port)"
        raise ClientError(404, f"{method} {path} {here}; served: {served}")

    def _shown(self, request: Request) -> Response:
        path = request.path
        if path in ("/health", _CLAUDE_CODE_PATH):
            return health(self._service)
        if path == "/ready":
            shown = readiness(self._service, request.query.get("model"))
            return json_response(shown, 200 if shown["ready"] else 503)
        anthropic = wants_anthropic_form(request)
        if path == _MODELS:
            cards = self._service.cards()
            if anthropic:
                return json_response(anthropic_page(cards, request.query))
            return json_response({"object": "list", "data": cards})
        name = path[len(_MODELS) + 1 :]
        if (card := self._service.card(name)) is not None:
            return json_response(anthropic_card(card) if anthropic else card)
        why = f"the model {name[:200]!r} does not exist; GET /v1/models lists those that do"
        raise ClientError(404, why, "model", "model_not_found")

    def _not_allowed(self, request: Request, allowed: str) -> Response:
        self.faulty(405)
        words = allowed.replace(",", ", ")
        answer = error_response(405, f"{request.path} takes {words}, not {request.method}")
        answer.headers["Allow"] = allowed
        return answer


async def answer_or_error(
    handle: Handler, request: Request, faulty: Callable[[int], None]
) -> Answer:
    """Return the answer of `handle` to a request, or an error answer if `handle` raises an error.

    `faulty` is called with the status of each error answer. Raises OSError if the client left.
    """
    try:
        return await handle(request)
    except ClientError as error:
        faulty(error.status)
        return refused(error)
    except OSError as error:
        log.debug("client of %s left: %r", request.path, error)
        raise
    except Exception:
        # A defect of the router: it is logged, and the client learns that it is not to blame.
        log.exception("failed to answer %s %s", request.method, request.path)
        faulty(500)
        return error_response(500, "internal error of the router", "internal_error")


def health(service: Service, more: Mapping[str, Any] = MappingProxyType({})) -> Response:
    """Return the answer of `/health`, which says whether the router works or must be restarted.

    Any answer shows that the event loop runs.
    """
    hangs = service.hangs()
    shown = {"status": hangs or "ok", "ready_workers": service.ready_workers(), **more}
    return json_response(shown, 503 if hangs else 200)


def readiness(service: Service, model: str | None = None) -> dict[str, Any]:
    """Return the answer of `/ready` and `/ready?model=NAME`: whether a new request would be sent to
    a worker, or held until a worker of its model joins or answers again; otherwise why not.

    Raises ClientError if the model's name is too long.
    """
    if model is not None and len(model) > _MODEL_CHARS:
        raise ClientError(400, "`model` is too long", "model", "string_too_long")
    reasons = list(service.reasons())
    by_model = service.ready_by_model()
    if model is not None and service.names is not None:
        model = service.names.stands_for(model)
    promised = service.promises(model)
    if model is not None:
        if promised and not service.takes(model):
            pass  # its requests are kept for a first worker
        elif model not in by_model:
            reasons.append(f"no worker serves the model {model!r}")
        elif not service.takes(model):
            reasons.append(f"no worker of the model {model!r} takes requests")
        elif why := service.unserved(model):
            reasons.append(why)
        by_model = {name: count for name, count in by_model.items() if name == model}
    elif promised:
        pass
    elif not by_model:
        reasons.append("no worker is recognized")
    elif not service.takes_any():
        reasons.append("no worker takes requests")
    elif all(service.unserved(name) for name, count in by_model.items() if count):
        reasons.extend(service.unserved(name) for name, count in by_model.items() if count)
    shown = {"ready": not reasons, "reasons": reasons, "ready_workers_by_model": by_model}
    if halves := {m: h for m, h in service.halves_missing().items() if m in by_model}:
        shown["halves_missing"] = {m: [str(half) for half in each] for m, each in halves.items()}
    if service.names is not None and (hidden := service.names.hidden_models()):
        shown["hidden_models"] = hidden
    return shown
