"""The admin port: workers, metrics and explanations for operators, never for clients.

It listens on loopback by default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any

import msgspec

from router.admin.kv_view import encode_kv_view, kv_view
from router.admin.ui.page import LINKS, PAGE, STATE, UiPages, links_page
from router.admin.ui.state import UiState
from router.admin.views.explain import ExplainPages
from router.admin.views.rows import policy_shown, shown_count, trunks_shown, worker_shown
from router.core.placement.worker_caches import TableFullError
from router.engines.spec import ROLES, WorkerSpecError
from router.engines.worker_spec import worker_spec_of
from router.fleet.manager import DuplicateWorkerError, FleetManager, RoleRefusedError
from router.fleet.member import Member
from router.http.errors import ClientError
from router.http.messages import Answer, Handler, Request, Response, error_response, json_response
from router.keys.key_ring import KeyRing
from router.metrics.exposition import exposition
from router.metrics.registry import RouterMetrics
from router.record.logs import worth_a_line
from router.record.request_record import LatestAttempts
from router.request.dispatcher import Dispatcher
from router.request.inference import Inference
from router.request.quotas import bearer_key
from router.request.service import Service
from router.server.client_port import answer_or_error, health, readiness

log = logging.getLogger(__name__)

_PROBES = ("/health", "/ready")
_KEYLESS_PATHS = (
    *_PROBES,
    PAGE,
    LINKS,
)  # without a key: probes have none, and the pages have no data
_PATHS_BY_URL = ("/workers", "/workers/drain", "/workers/undrain", "/workers/role")
_BROWSER_HEADERS = ("Origin", "Sec-Fetch-Site")
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
Rows = Callable[[], list[dict[str, Any]]]
_NO_PAGES: Mapping[str, Mapping[str, Handler]] = MappingProxyType({})
_NAME_CHARS = 200  # characters of a name that are shown
_REQUEST = "admin request"  # the author of a change, in the log


class AdminApi:
    """Answers all requests of the admin port. Lifetime: process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        service: Service,
        fleet: FleetManager,
        inference: Inference,
        decisions: LatestAttempts,
        metrics: RouterMetrics,
        keys: KeyRing | None = None,
        pages: Mapping[str, Mapping[str, Handler]] = _NO_PAGES,
        hosts: tuple[str, ...] = (),
        sources: Rows = list,
        replicas: Rows = list,
    ) -> None:
        """Set up the routes of the admin port. If `keys` is not None, every request except
        `/health` needs one of these keys. `pages` has the handlers of other parts of the router, by
        path and method. `hosts` lists the names that the field `Host` of a request may have.
        `sources` returns rows of the parts that name workers, and `replicas` returns rows of the
        routers that share state.
        """
        self._dispatcher = dispatcher
        self._service = service
        self._fleet = fleet
        self._inference = inference
        self._decisions = decisions
        self._metrics = metrics
        self.ui = UiState(dispatcher, service, fleet, decisions, metrics, sources, replicas)
        self._keys = keys
        self._pages = pages
        self._hosts = hosts
        self._sources = sources
        self._strange_hosts = 0  # refused requests with an unknown host name
        self._routes = self._all_routes()

    def renew(self, hosts: tuple[str, ...]) -> None:
        """From now on accept the names in `hosts` in the field `Host` of requests."""
        self._hosts = hosts

    def _all_routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the handlers by path and method. `{id}` stands for one segment of a path."""
        explain = ExplainPages(self._service, self._inference, self._decisions)
        pages = UiPages(self.ui)
        return {
            "/workers": {
                "GET": self.list_workers,
                "POST": self.add_worker,
                "DELETE": self.remove_workers,  # by `?url=URL`, like the next two paths
            },
            "/workers/drain": {"POST": self.drain_workers},
            "/workers/undrain": {"POST": self.undrain_workers},
            "/workers/role": {"POST": self.change_role},
            "/workers/{id}/role": {"POST": self.change_role},
            "/workers/{id}": {"GET": self.show_worker, "DELETE": self.remove_workers},
            "/workers/{id}/drain": {"POST": self.drain_workers},
            "/workers/{id}/undrain": {"POST": self.undrain_workers},
            "/drain": {"POST": self.drain},
            "/undrain": {"POST": self.undrain},
            "/kv": {"GET": self.kv},
            "/explain": {"GET": explain.look, "POST": explain.attempt},
            **self._pages,
            "/policy": {"GET": self.policy},
            "/trunks": {"GET": self.trunks},
            "/metrics": {"GET": self.metrics},
            LINKS: {"GET": self.links},
            PAGE: {"GET": pages.show},
            STATE: {"GET": pages.state},
            "/health": {"GET": self.health},
            "/ready": {"GET": self.ready},
        }

    def faulty(self, status: int) -> None:
        """Do nothing, because mistakes of operators are not counted as mistakes of clients."""

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request, errors included. Raises OSError if the client left."""
        return await answer_or_error(self._checked, request, self.faulty)

    async def _checked(self, request: Request) -> Answer:
        _refuse_pages(request)
        if request.path not in _PROBES and self._keys is None:
            self._check_host(request)
        elif request.path not in _KEYLESS_PATHS and self._keys is not None:
            bearer_key(request.headers.get("Authorization"), self._keys)
        path = request.path if request.path in self._routes else _with_id(request.path)
        methods = self._routes.get(path)
        if methods is None:
            served = ", ".join(sorted(self._routes))
            here = "is not served at the admin port (clients' requests go to the client port)"
            raise ClientError(404, f"{request.method} {request.path} {here}; served: {served}")
        handle = methods.get("GET" if request.method == "HEAD" else request.method)
        return _not_allowed(request, methods) if handle is None else await handle(request)

    def _check_host(self, request: Request) -> None:
        """Raise ClientError if a request names an unknown host in the field `Host`. The owner of a
        host name may point it at this address, and so let a web page read the admin port through an
        operator's browser (DNS rebinding). The web page has no key, so the check is needed only if
        the port asks for no key.
        """
        asked = request.headers.get("Host")
        if asked is None or known_host(asked, self._hosts):  # HTTP/1.0 may omit it; no browser
            return
        self._strange_hosts += 1
        if worth_a_line(self._strange_hosts):
            log.warning(
                "the admin port refused a request that asked by the name %r (%d so far): it is "
                "neither localhost nor in admin_allowed_hosts",
                asked[:_NAME_CHARS],
                self._strange_hosts,
            )
        raise ClientError(
            421,
            f"the admin port does not answer to the name {asked[:_NAME_CHARS]!r}: ask by "
            "an address or localhost, add it to admin_allowed_hosts, or set admin_keys_file",
            code="unknown_host",
        )

    async def list_workers(self, request: Request) -> Response:
        """Return all workers with their state, load and cache, and the sources that name
        workers.
        """
        rows = [worker_shown(self._service, m) for m in self._fleet.members.values()]
        return json_response({"workers": rows, "sources": self._sources()})

    async def show_worker(self, request: Request) -> Response:
        """Return the worker in the path with its state, load and cache."""
        return json_response(worker_shown(self._service, self._member(_id_in(request) or "")))

    async def add_worker(self, request: Request) -> Response:
        """Add the worker in the body: a JSON string `URL,key=value...` or an object of the keys."""
        wanted = _json_of(request)
        try:
            member = self._fleet.add(worker_spec_of(wanted), _REQUEST, by_hand=True)
        except WorkerSpecError as error:
            raise ClientError(400, str(error), code="bad_worker") from error
        except (DuplicateWorkerError, TableFullError) as error:
            raise ClientError(409, str(error), code="worker_refused") from error
        return json_response(worker_shown(self._service, member), status=201)

    async def drain_workers(self, request: Request) -> Response:
        """Send the workers no new requests; running requests finish."""
        members = self._named(request)
        for member in members:
            member.drain(_REQUEST)
        return self._shown(request, members)

    async def undrain_workers(self, request: Request) -> Response:
        """Send requests to the drained workers again. If one of the workers is about to be removed,
        refuse this for all of them.
        """
        members = self._named(request)
        for member in members:
            if member.leaving:
                why = f"worker {member.worker_id} is to be removed: POST it to /workers to keep it"
                raise ClientError(409, why, code="worker_leaving")
        for member in members:
            member.undrain(_REQUEST)
        return self._shown(request, members)

    async def change_role(self, request: Request) -> Response:
        """Drain the workers, then give them the role in the body, such as `{"role": "decode"}`."""
        wanted = _json_of(request)
        role = wanted.get("role") if isinstance(wanted, dict) and len(wanted) == 1 else None
        if role not in ROLES:
            raise ClientError(400, f'send {{"role": R}}; R: {", ".join(ROLES)}', "role")
        members = self._named(request)
        try:
            self._fleet.change_role(members, role, _REQUEST)
        except RoleRefusedError as error:
            raise ClientError(409, str(error), code="role_refused") from error
        return self._shown(request, members, 202)

    async def drain(self, request: Request) -> Response:
        """Make the router not ready, so that load balancers use other routers; the router still
        serves all requests that it gets.
        """
        self._service.drain(_REQUEST)
        return json_response(readiness(self._service))

    async def undrain(self, request: Request) -> Response:
        """Make the router ready again after `/drain`."""
        self._service.undrain(_REQUEST)
        return json_response(readiness(self._service))

    async def ready(self, request: Request) -> Response:
        """Return whether the router is ready, with the same answer as the client port."""
        shown = readiness(self._service, request.query.get("model"))
        return json_response(shown, 200 if shown["ready"] else 503)

    async def remove_workers(self, request: Request) -> Response:
        """Remove the workers as soon as they are idle. With `?force=true`, remove them at once and
        end their requests.
        """
        members, force = self._named(request), _forced(request)
        if not force:
            for member in members:
                self._fleet.leave(member, _REQUEST)
            return self._shown(request, members, 202)
        for member in members:
            await self._fleet.remove(member, f"forced by {_REQUEST}")
        return _rows(request, [{"id": one.worker_id, "state": "gone"} for one in members])

    async def kv(self, request: Request) -> Response:
        """Return all blocks that the router believes one worker holds: `?worker=ID`
        (router.admin.kv_view).
        """
        member = self._member(request.query.get("worker", ""))
        worker = self._dispatcher.core.workers.get(member.worker_id)
        if worker is None:
            raise ClientError(409, f"worker {member.worker_id} is not recognized yet")
        view = kv_view(worker, self._dispatcher.core.caches.index)
        return Response(200, encode_kv_view(view), content_type="application/msgpack")

    async def trunks(self, request: Request) -> Response:
        """Return the beginnings of prompts that many sessions share, the one with the greatest
        demand first. The query `?most=20` sets how many are returned.
        """
        most = shown_count(request, "most")
        return json_response(trunks_shown(self._dispatcher.core, most))

    async def policy(self, request: Request) -> Response:
        """Return the configured policy, the policy that makes the decisions now, and the faults of
        policies.
        """
        core = self._dispatcher.core
        return json_response(policy_shown(core.guard, self._dispatcher.clock()))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics as Prometheus text."""
        return Response(200, await exposition(self._metrics), content_type=_METRICS)

    async def links(self, request: Request) -> Response:
        """Return a page with links to all paths of the admin port, for a person who knows only the
        port's address.
        """
        return links_page(self._routes)

    async def health(self, request: Request) -> Response:
        """Return the health of the router as the client port does, and the number of workers."""
        return health(self._service, {"workers": len(self._fleet.members)})

    def _member(self, text: str) -> Member:
        known = text.isascii() and text.isdecimal() and len(text) < 10
        member = self._fleet.members.get(int(text)) if known else None
        if member is None:
            ids = ", ".join(map(str, self._fleet.members)) or "none"
            raise ClientError(404, f"there is no worker {text[:20]!r}; ids: {ids}")
        return member

    def _named(self, request: Request) -> list[Member]:
        """Return the worker in the path. If the path names none, return all workers (ranks of an
        engine) at the URL in the query `?url=URL`.
        """
        if (text := _id_in(request)) is not None:
            return [self._member(text)]
        url = request.query.get("url", "").rstrip("/")
        members = self._fleet.at_url(url)
        if not members:
            raise ClientError(404, f"there is no worker at {url[:200]!r}; ask as ?url=URL", "url")
        return members

    def _shown(self, request: Request, members: list[Member], status: int = 200) -> Response:
        return _rows(request, [worker_shown(self._service, m) for m in members], status)


def _rows(request: Request, rows: list[dict[str, Any]], status: int = 200) -> Response:
    """Return an answer with one worker if the path names one, else with a list of workers."""
    return json_response(rows[0] if _id_in(request) is not None else {"workers": rows}, status)


def _forced(request: Request) -> bool:
    force = request.query.get("force", "false")
    if force not in ("true", "false"):
        raise ClientError(400, "`force` must be true or false", "force")
    return force == "true"


def known_host(host: str, names: tuple[str, ...]) -> bool:
    """Return True if the field `Host` is an address, localhost, or one of `names`.

    An attacker can make a name point to another server, but cannot serve a page under an address
    that is not that server's own.
    """
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    else:
        name = name.partition(":")[0].removesuffix(".")
    if name == "localhost" or name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _refuse_pages(request: Request) -> None:
    """Raise ClientError if a web page in an operator's browser asks for a change, because such a
    page reaches loopback, too. Browsers add one of the fields `_BROWSER_HEADERS` to all requests of
    pages, and pages cannot remove these fields.
    """
    if request.method not in ("GET", "HEAD") and any(
        request.headers.get(name) is not None for name in _BROWSER_HEADERS
    ):
        raise ClientError(403, "the admin port takes no changes from web pages")


def _with_id(path: str) -> str:
    """Return the route of a path: `/workers/{id}/drain` for `/workers/3/drain`."""
    first, workers, *rest = path.split("/")
    return "/".join((first, workers, "{id}", *rest[1:])) if rest else path


def _id_in(request: Request) -> str | None:
    """Return the worker id in a path, or None if the path names no worker."""
    return None if request.path in _PATHS_BY_URL else request.path.split("/")[2]


def _not_allowed(request: Request, methods: Mapping[str, Handler]) -> Response:
    allowed = sorted({*methods, "HEAD"} if "GET" in methods else methods)
    said = f"{request.path} takes {', '.join(allowed)}, not {request.method}"
    answer = error_response(405, said)
    answer.headers["Allow"] = ",".join(allowed)
    return answer


def _json_of(request: Request) -> Any:
    """Return the body of a request as JSON. The content type must be JSON, because a web page of
    another origin cannot send that type.
    """
    content_type = (request.headers.get("Content-Type") or "").partition(";")[0]
    if content_type.strip().lower() != "application/json":
        raise ClientError(415, "send Content-Type: application/json")
    body = request.body
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
    """Return the body as a JSON string if it is the text of a worker without quotes, else None."""
    try:
        return msgspec.json.encode(str(worker_spec_of(body.decode()))).decode()
    except ValueError:
        return None
