"""The admin port: workers, metrics, reasons. Loopback by default, never for clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from router.admin.answers import Handler, errors_as_json, json_response, shown_count
from router.admin.kv_view import encode_kv_view, kv_view
from router.admin.ui.page import PAGE, UiPages
from router.admin.ui.state import UiState
from router.admin.views import ExplainPages, policy_shown, trunks_shown, worker_shown
from router.config.worker_spec import WorkerSpecError, worker_spec_of
from router.core.roster import TableFullError
from router.fleet.manager import DuplicateWorkerError, FleetManager
from router.fleet.member import Member
from router.keys.key_ring import KeyRing
from router.metrics.exposition import exposition
from router.metrics.registry import RouterMetrics
from router.record.request_record import LatestAttempts
from router.request.errors import ClientError
from router.request.inference import Inference
from router.request.quotas import bearer_key
from router.request.service import Service
from router.request.switchboard import Switchboard
from router.server.client_port import readiness

_OPEN = ("/health", "/ready", PAGE)  # to probes, which have no key; no page has data in it
_REQUEST = "admin request"  # who asked for a change, in the log


class AdminApi:
    """Handlers of the admin port. Lifetime: process."""

    def __init__(
        self,
        switchboard: Switchboard,
        service: Service,
        fleet: FleetManager,
        inference: Inference,
        decisions: LatestAttempts,
        metrics: RouterMetrics,
        keys: KeyRing | None = None,
    ) -> None:
        """`keys`: one of which every request needs, but for `/health`; None: nobody needs any."""
        self._switchboard = switchboard
        self._service = service
        self._fleet = fleet
        self._inference = inference
        self._decisions = decisions
        self._metrics = metrics
        self.ui = UiState(switchboard, service, fleet, decisions, metrics)
        self._keys = keys
        self.sources: Callable[[], list[dict[str, Any]]] = list  # those that name workers

    def app(self, body_bytes: int) -> web.Application:
        """The application of the admin port."""
        app = web.Application(
            client_max_size=body_bytes,
            middlewares=[errors_as_json, _no_pages, self._with_key()],
        )
        app.router.add_get("/workers", self.list_workers)
        app.router.add_post("/workers", self.add_worker)
        app.router.add_get("/workers/{id}", self.show_worker)
        app.router.add_delete("/workers/{id}", self.remove_worker)
        app.router.add_post("/workers/{id}/drain", self.drain_worker)
        app.router.add_post("/workers/{id}/undrain", self.undrain_worker)
        app.router.add_delete("/workers", self.remove_ranks)
        app.router.add_post("/workers/drain", self.drain_ranks)
        app.router.add_post("/workers/undrain", self.undrain_ranks)
        app.router.add_post("/drain", self.drain)
        app.router.add_post("/undrain", self.undrain)
        app.router.add_get("/kv", self.kv)
        explain = ExplainPages(self._switchboard, self._inference, self._decisions)
        app.router.add_get("/explain", explain.look)
        app.router.add_post("/explain", explain.attempt)
        app.router.add_get("/policy", self.policy)
        app.router.add_get("/trunks", self.trunks)
        app.router.add_get("/metrics", self.metrics)
        UiPages(self.ui).add_to(app)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        return app

    def _with_key(self) -> Any:
        """The middleware that asks for a key of the admin port's own."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._keys is not None and request.path not in _OPEN:
                bearer_key(request.headers.get("Authorization"), self._keys)
            return await handler(request)

        return middleware

    async def list_workers(self, request: web.Request) -> web.StreamResponse:
        """Every worker: who it is, what it does, what it holds; and who names workers."""
        rows = [worker_shown(self._switchboard, m) for m in self._fleet.members.values()]
        return json_response({"workers": rows, "sources": self.sources()})

    async def show_worker(self, request: web.Request) -> web.StreamResponse:
        """One worker."""
        return json_response(
            worker_shown(self._switchboard, self._member(request.match_info["id"]))
        )

    async def add_worker(self, request: web.Request) -> web.StreamResponse:
        """Begin to follow a worker: a JSON string `URL,key=value...` or an object of the keys."""
        wanted = await _json_of(request)
        try:
            member = self._fleet.add(worker_spec_of(wanted), _REQUEST, by_hand=True)
        except WorkerSpecError as error:
            raise ClientError(400, str(error), code="bad_worker") from error
        except (DuplicateWorkerError, TableFullError) as error:
            raise ClientError(409, str(error), code="worker_refused") from error
        return json_response(worker_shown(self._switchboard, member), status=201)

    async def drain_worker(self, request: web.Request) -> web.StreamResponse:
        """Send it nothing new; what runs there finishes."""
        member = self._member(request.match_info["id"])
        member.drain(_REQUEST)
        return json_response(worker_shown(self._switchboard, member))

    async def drain_ranks(self, request: web.Request) -> web.StreamResponse:
        """The same for all workers at one URL, the ranks of one engine: `?url=URL`."""
        members = self._at_url(request)
        for member in members:
            member.drain(_REQUEST)
        return json_response(
            {"workers": [worker_shown(self._switchboard, member) for member in members]}
        )

    async def undrain_worker(self, request: web.Request) -> web.StreamResponse:
        """Send it requests again. One that is to be removed stays on its way out."""
        member = self._member(request.match_info["id"])
        self._undrain([member])
        return json_response(worker_shown(self._switchboard, member))

    async def undrain_ranks(self, request: web.Request) -> web.StreamResponse:
        """The same for all workers at one URL, the ranks of one engine: `?url=URL`."""
        members = self._at_url(request)
        self._undrain(members)
        return json_response({"workers": [worker_shown(self._switchboard, m) for m in members]})

    def _undrain(self, members: list[Member]) -> None:
        """All of them or none."""
        for member in members:
            if member.leaving:
                why = f"worker {member.worker_id} is to be removed: add it anew once it is gone"
                raise ClientError(409, why, code="worker_leaving")
        for member in members:
            member.undrain(_REQUEST)

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """Be ready no more, so that balancers turn elsewhere; requests that come are served."""
        self._service.drain(_REQUEST)
        return json_response(readiness(self._service))

    async def undrain(self, request: web.Request) -> web.StreamResponse:
        """Take that back."""
        self._service.undrain(_REQUEST)
        return json_response(readiness(self._service))

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """As on the client port."""
        shown = readiness(self._service, request.query.get("model"))
        return json_response(shown, 200 if shown["ready"] else 503)

    async def remove_worker(self, request: web.Request) -> web.StreamResponse:
        """Remove it once idle; with `?force=true` at once, what runs there being cut off."""
        member = self._member(request.match_info["id"])
        shown = await self._remove(member, _forced(request))
        return json_response(shown, status=200 if shown["state"] == "gone" else 202)

    async def remove_ranks(self, request: web.Request) -> web.StreamResponse:
        """The same for all workers at one URL, the ranks of one engine: `?url=URL`."""
        force = _forced(request)
        shown = [await self._remove(member, force) for member in self._at_url(request)]
        return json_response({"workers": shown}, status=200 if force else 202)

    async def _remove(self, member: Member, force: bool) -> dict[str, Any]:
        if force:
            await self._fleet.remove(member, f"forced by {_REQUEST}")
            return {"id": member.worker_id, "state": "gone"}
        self._fleet.leave(member, _REQUEST)
        return worker_shown(self._switchboard, member)

    async def kv(self, request: web.Request) -> web.StreamResponse:
        """All blocks that one worker is believed to hold: `?worker=ID` (router.admin.kv_view)."""
        member = self._member(request.query.get("worker", ""))
        worker = self._switchboard.core.workers.get(member.worker_id)
        if worker is None:
            raise ClientError(409, f"worker {member.worker_id} is not recognized yet")
        view = kv_view(worker, self._switchboard.core.roster.index)
        return web.Response(body=encode_kv_view(view), content_type="application/msgpack")

    async def trunks(self, request: web.Request) -> web.StreamResponse:
        """Heads of prompts that many share, the greatest demand first: `?most=20`."""
        most = shown_count(request, "most")
        return json_response(trunks_shown(self._switchboard.core, most))

    async def policy(self, request: web.Request) -> web.StreamResponse:
        """The policy in use, who decides, and what went wrong."""
        core = self._switchboard.core
        return json_response(policy_shown(core.guard, self._switchboard.clock()))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Prometheus text."""
        return web.Response(
            body=await exposition(self._metrics),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def health(self, request: web.Request) -> web.StreamResponse:
        """The router itself is alive; with how many workers."""
        ready = sum(w.takes_requests for w in self._switchboard.core.workers)
        return json_response(
            {"status": "ok", "ready_workers": ready, "workers": len(self._fleet.members)}
        )

    def _member(self, text: str) -> Member:
        known = text.isascii() and text.isdecimal() and len(text) < 10
        member = self._fleet.members.get(int(text)) if known else None
        if member is None:
            ids = ", ".join(map(str, self._fleet.members)) or "none"
            raise ClientError(404, f"there is no worker {text[:20]!r}; ids: {ids}")
        return member

    def _at_url(self, request: web.Request) -> list[Member]:
        url = request.query.get("url", "").rstrip("/")
        members = self._fleet.at_url(url)
        if not members:
            raise ClientError(404, f"there is no worker at {url[:200]!r}; ask as ?url=URL", "url")
        return members


def _forced(request: web.Request) -> bool:
    force = request.query.get("force", "false")
    if force not in ("true", "false"):
        raise ClientError(400, "`force` must be true or false", "force")
    return force == "true"


@web.middleware
async def _no_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a page in an operator's browser sends: it reaches loopback ports too."""
    if request.method not in ("GET", "HEAD") and "Origin" in request.headers:
        raise ClientError(403, "the admin port takes no changes from web pages")
    return await handler(request)


async def _json_of(request: web.Request) -> Any:
    """The body as JSON. A page in a browser cannot send this content type across origins."""
    if request.content_type != "application/json":
        raise ClientError(415, "send Content-Type: application/json")
    body = await request.read()
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        quoted = _quoted(body) or '"http://127.0.0.1:8003"'
        raise ClientError(
            400,
            f"the body is not JSON: {error}; a worker's text stands in double quotes, as in "
            f"{quoted} (for curl: -d '{quoted}')",
            code="invalid_json",
        ) from error


def _quoted(body: bytes) -> str | None:
    """A worker's bare text as JSON; None where it is none, and so not to be repeated."""
    try:
        return msgspec.json.encode(str(worker_spec_of(body.decode()))).decode()
    except ValueError:
        return None
