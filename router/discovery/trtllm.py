"""Reads workers from TensorRT-LLM's disaggregation YAML, and serves the store at which workers
announce themselves. The file that `trtllm-serve disaggregated -c FILE` reads names context servers,
which prefill, and generation servers, which decode. If the file has `disagg_cluster` with an http
address instead, workers announce themselves, and this router serves the key store that they expect
there (`tensorrt_llm/serve/cluster_storage.py`, `disagg_auto_scaling.py`, 2026-08).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta

from policies.near import nearest
from router.discovery.plain_sources import FileSource, data_in
from router.discovery.source import TrtllmSpec, bounded
from router.engines.spec import WorkerSpec, WorkerSpecError
from router.fleet.sources import Report, ReportedWorker
from router.http.errors import ClientError
from router.http.messages import Answer, Request, Response, json_response
from router.http.parser import RequestLimits
from router.server.client_port import answer_or_error
from router.server.server import HttpServer, ServerTerms

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
_MAX_URLS = 4_096
_SERVERS: Mapping[str, Role] = {"context_servers": "prefill", "generation_servers": "decode"}
_READ = (*_SERVERS, "disagg_cluster", "internal_request_auth_key", "node_id")
# Keys for TensorRT-LLM's own orchestrator; the router's configuration decides these things.
_OTHER_SETTINGS = {
    "hostname": "host",
    "port": "port",
    "max_retries": "retries.attempts",
    "otlp_config": "tracing.endpoint",
    "num_workers": "reuse_port",
    "disagg_coordinator_url": "state",
    "conditional_disagg_config": "disaggregation: the router compares times, not lengths",
    "schedule_style": "nothing: the context server always comes first",
    **dict.fromkeys(
        ("perf_metrics_max_requests", "return_perf_metrics", "perf_metrics_output_dir"),
        "the router's own metrics",
    ),
    **dict.fromkeys(
        ("allow_request_chat_template", "gen_strip_message_history", "gen_tokids_ctxbytes"),
        "nothing: bodies go on as they came",
    ),
}
_CLUSTER = ("cluster_uri", "cluster_name", "minimal_instances")
_CLUSTER_TIMES = ("heartbeat_interval_sec", "inactive_timeout_sec")  # its workers keep them
_SERVER_KEYS = ("num_instances", "urls", "router")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The address and the cluster name under which workers announce themselves. Lifetime: until the
    file changes.
    """

    name: str
    host: str
    port: int
    least: tuple[int, int]  # context and generation servers, with which it is ready


@dataclass(frozen=True, slots=True)
class DisaggPool:
    """The contents of TensorRT-LLM's disaggregation YAML. Lifetime: until the file changes."""

    workers: tuple[WorkerSpec, ...] = ()
    cluster: Cluster | None = None
    auth_key: str | None = field(default=None, repr=False)
    node_id: int = 0
    unused: tuple[str, ...] = ()  # keys that have no meaning for this router, with reasons


def group_of(spec: TrtllmSpec) -> str:
    """Return the group of the workers in the file. KV is moved only between workers of one group,
    that is, of one file.
    """
    return f"trtllm {spec.path}"


def read_pool(spec: TrtllmSpec) -> DisaggPool:
    """Return the contents of the file. Raises ValueError with a text that says what is wrong and
    never contains the key in the file.
    """
    data = data_in(Path(spec.path))
    try:
        whole = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"not yaml{where}") from error
    whole = _mapping(whole, "the file")
    unused = []
    for key in whole:
        if key in _READ:
            continue
        if key in _OTHER_SETTINGS:
            unused.append(f"{key} (here: {_OTHER_SETTINGS[key]})")
        elif near := nearest(key, (*_READ, *_OTHER_SETTINGS), cutoff=0.75):
            raise ValueError(f"unknown key {key[:80]!r}: did you mean {near}?")
        else:  # their orchestrator hands it to both lists of servers, which run already here
            unused.append(f"{key[:80]} (unknown; an option of the servers themselves?)")
    for name in _SERVERS:
        servers = _mapping(whole.get(name, {}), name)
        unused += [f"{name}.{str(k)[:80]}" for k in servers if k not in _SERVER_KEYS[:2]]
    workers = _workers(spec, whole)
    cluster = _cluster(whole.get("disagg_cluster"))
    if not workers and cluster is None:
        raise ValueError("neither context_servers and generation_servers nor disagg_cluster")
    roles = {worker.role for worker in workers}
    if cluster is None and len(roles) == 1:
        missing = "generation_servers" if "prefill" in roles else "context_servers"
        raise ValueError(f"{missing} has no urls: the pool has only one half")
    auth_key = whole.get("internal_request_auth_key")
    if auth_key is not None and not (isinstance(auth_key, str) and 0 < len(auth_key) <= 4_096):
        raise ValueError("internal_request_auth_key is not a text of 1..4096 characters")
    node_id = _whole_number(whole.get("node_id", 0), "node_id", 0, 255)
    return DisaggPool(workers, cluster, auth_key, node_id, tuple(unused))


def _workers(spec: TrtllmSpec, whole: Mapping[str, Any]) -> tuple[WorkerSpec, ...]:
    found: dict[str, WorkerSpec] = {}
    for name, role in _SERVERS.items():
        servers = _mapping(whole.get(name, {}), name)
        urls = servers.get("urls", [])
        if not isinstance(urls, list) or len(urls) > _MAX_URLS:
            raise ValueError(f"{name}.urls is not a list of at most {_MAX_URLS}")
        count = servers.get("num_instances", len(urls))
        if count != len(urls) and urls:
            raise ValueError(f"{name}.num_instances is {str(count)[:20]}, urls has {len(urls)}")
        for number, url in enumerate(urls):
            if not isinstance(url, str):
                raise ValueError(f"{name}.urls[{number}] is no text such as host:8001")
            try:
                worker = _worker(spec, url if "://" in url else f"http://{url}", role)
            except WorkerSpecError as error:
                raise ValueError(f"{name}.urls[{number}]: {error}") from error
            if worker.url in found:
                raise ValueError(
                    f"{name}.urls[{number}]: {worker.url} is given twice; a server takes no KV "
                    "from itself"
                )
            found[worker.url] = worker
    return tuple(found.values())


def _worker(spec: TrtllmSpec, url: str, role: Role) -> WorkerSpec:
    return WorkerSpec(url.rstrip("/"), kind="trtllm", role=role, group=group_of(spec))


def _cluster(given: Any) -> Cluster | None:
    if given is None:
        return None
    cluster = _mapping(given, "disagg_cluster")
    _only(cluster, (*_CLUSTER, *_CLUSTER_TIMES), "disagg_cluster")
    uri, name = cluster.get("cluster_uri"), cluster.get("cluster_name", "")
    try:
        parts = urlsplit(uri if isinstance(uri, str) else "")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"disagg_cluster.cluster_uri: {error}") from error
    if parts.scheme == "etcd":
        raise ValueError("disagg_cluster.cluster_uri is etcd://: this router serves http:// only")
    if parts.scheme != "http" or not host or not port:
        raise ValueError("disagg_cluster.cluster_uri is not of the form http://host:port")
    if not isinstance(name, str) or len(name) > 200 or "/" in name:
        raise ValueError("disagg_cluster.cluster_name is no text without slash, or too long")
    where = "disagg_cluster.minimal_instances"
    least = _mapping(cluster.get("minimal_instances", {}), where)
    _only(least, tuple(_SERVERS), where)
    context, generation = (
        _whole_number(least.get(key, 1), f"{where}.{key}", 0, _MAX_URLS) for key in _SERVERS
    )
    return Cluster(name, host, port, (context, generation))


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} is no mapping of names")
    return cast(dict[str, Any], value)


def _only(given: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in allowed:
            raise ValueError(f"{where}.{key[:80]} is unknown; keys: {', '.join(allowed)}")


def _whole_number(value: Any, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{where} is {str(value)[:20]!r}; allowed: {least}..{most}")
    return value


# --- the store -----------------------------------------------------------------------------------

_KEYS_MAX = 8_192
_KEY_CHARS, _VALUE_CHARS = 512, 4_096
_TTL_MAX_S = 86_400.0
_STOPPING_S = 5.0  # time for which a worker that signed off is reported as stopping, seconds
_ROLES: tuple[Role, ...] = ("prefill", "decode")  # their numbers: context 0, generation 1


class StoreFullError(Exception):
    """Raised if a key or value is too large for the store, or if the store has too many keys."""


class ClusterStore:
    """Stores keys whose values expire, as TensorRT-LLM's orchestrator does. The class does no I/O
    and reads no clock. Lifetime: as long as the configuration names the source.
    """

    def __init__(self) -> None:
        self._items: dict[str, tuple[str, float]] = {}  # value, and when it expires
        self._stopping: dict[str, tuple[str, float]] = {}  # deleted, not expired

    def set(self, key: str, value: str, ttl_s: float, overwrite: bool, now_s: float) -> bool:
        """Store a value under a key for `ttl_s` seconds. Return False if the key exists and must
        not be overwritten. Raises StoreFullError if there is no room.
        """
        self.expire_all(now_s)
        if key in self._items and not overwrite:
            return False
        if len(key) > _KEY_CHARS or len(value) > _VALUE_CHARS:
            raise StoreFullError(f"keys: {_KEY_CHARS} characters, values: {_VALUE_CHARS}")
        if key not in self._items and len(self._items) >= _KEYS_MAX:
            raise StoreFullError(f"all {_KEYS_MAX} keys are taken")
        self._items[key] = value, _until(ttl_s, now_s)
        self._stopping.pop(key, None)
        return True

    def get(self, key: str, now_s: float) -> str | None:
        """Return the value of a key, or None if the store does not have the key."""
        self.expire_all(now_s)
        item = self._items.get(key)
        return None if item is None else item[0]

    def delete(self, key: str, now_s: float) -> bool:
        """Delete a key, and return whether it existed."""
        self.expire_all(now_s)
        item = self._items.pop(key, None)
        if item is None:
            return False
        self._stopping[key] = item[0], now_s + _STOPPING_S
        return True

    def expire(self, key: str, ttl_s: float, now_s: float) -> bool:
        """Let a key expire `ttl_s` seconds from now, and return whether the key exists."""
        self.expire_all(now_s)
        item = self._items.get(key)
        if item is None:
            return False
        self._items[key] = item[0], now_s + min(max(ttl_s, 0.0), _TTL_MAX_S)
        return True

    def get_prefix(self, prefix: str, now_s: float) -> dict[str, str]:
        """Return all keys that begin with a prefix, with their values."""
        self.expire_all(now_s)
        return {key: value for key, (value, _) in self._items.items() if key.startswith(prefix)}

    def stopping(self, prefix: str, now_s: float) -> dict[str, str]:
        """Return the recently deleted keys that begin with a prefix, with their values."""
        self.expire_all(now_s)
        gone = self._stopping.items()
        return {key: value for key, (value, _) in gone if key.startswith(prefix)}

    def next_s(self) -> float:
        """Return the time at which the next key expires, or infinity if no key expires."""
        items = (*self._items.values(), *self._stopping.values())
        return min((until_s for _, until_s in items), default=float("inf"))

    def expire_all(self, now_s: float) -> None:
        """Delete the keys whose time is over."""
        for items in (self._items, self._stopping):
            for key in [key for key, (_, until_s) in items.items() if until_s <= now_s]:
                del items[key]


def _until(ttl_s: float, now_s: float) -> float:
    """Return the time at which a key expires. As in TensorRT-LLM, a key whose time to live is None,
    or not above 0, never expires.
    """
    return now_s + min(ttl_s, _TTL_MAX_S) if ttl_s > 0 else float("inf")


class _Announced(msgspec.Struct):
    """The data that a worker writes about itself into the store."""

    worker_id: str
    host: Annotated[str, Meta(min_length=1, max_length=253)]
    port: Annotated[int, Meta(ge=1, le=65_535)]
    role: int


_ANNOUNCED = msgspec.json.Decoder(_Announced)


def _prefix(cluster: str) -> str:
    return f"/trtllm-disagg/{cluster}/workers/"


def joined(
    store: ClusterStore, spec: TrtllmSpec, cluster: str, now_s: float
) -> tuple[list[ReportedWorker], list[str]]:
    """Return the workers in the store, and a line for each entry that cannot be used, with the
    reason.
    """
    found: dict[str, ReportedWorker] = {}
    refused = []
    prefix = _prefix(cluster)
    there, gone = store.get_prefix(prefix, now_s), store.stopping(prefix, now_s)
    for stopping, items in ((True, gone), (False, there)):
        for key, value in items.items():
            try:
                said = _ANNOUNCED.decode(value)
                if said.role not in range(len(_ROLES)):
                    raise ValueError(f"role is {said.role}; allowed: 0 context, 1 generation")
                host = f"[{said.host}]" if ":" in said.host else said.host
                worker = _worker(spec, f"http://{host}:{said.port}", _ROLES[said.role])
            except (ValueError, UnicodeError, RecursionError) as error:
                refused.append(f"{key[len(prefix) :][:100]!r}: {error}")
            else:
                found[worker.url] = ReportedWorker(worker, stopping)
    return list(found.values()), refused


# --- served --------------------------------------------------------------------------------------

_LIMITS = RequestLimits(head_bytes=16 << 10, header_bytes=8 << 10, body_bytes=64 << 10)
_TERMS = ServerTerms(
    connections=4_096,
    connections_per_address=0,
    held_bytes=16 << 20,
    head_s=20.0,
    body_s=20.0,
    client_s=20.0,
)


class _Item(msgspec.Struct):
    key: str
    value: str | None = ""
    ttl: float | None = -1
    overwrite_if_exists: bool | None = False


_ITEM = msgspec.json.Decoder(_Item)


class StorePort:
    """Serves the key-value store over HTTP to the workers that announce themselves in it. Lifetime:
    as long as the configuration names the source.
    """

    def __init__(
        self,
        store: ClusterStore,
        cluster: Callable[[], Cluster | None],
        reported: Callable[[], list[ReportedWorker]],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.token: str | None = None  # that each request needs; None: none does
        self._store = store
        self._cluster = cluster
        self._reported = reported
        self._changed = changed
        self._clock = clock
        self._routes = {
            ("POST", "/set"): self._set,
            ("GET", "/get"): self._get,
            ("DELETE", "/delete"): self._delete,
            ("GET", "/expire"): self._expire,
            ("GET", "/get_prefix"): self._get_prefix,
            ("GET", "/cluster_info"): self._info,
        }

    def faulty(self, status: int) -> None:
        """Do nothing, because refused requests of workers are not counted as mistakes of
        clients.
        """

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request, errors included. Raises OSError if the worker
        has left.
        """
        return await answer_or_error(self._answer, request, self.faulty)

    async def _answer(self, request: Request) -> Answer:
        if self.token is not None:
            given = (request.headers.get("Authorization") or "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise ClientError(403, "this store asks for another bearer token")
        handle = self._routes.get((request.method, request.path))
        if handle is None:
            served = ", ".join(f"{method} {path}" for method, path in self._routes)
            raise ClientError(404, f"{request.method} {request.path[:200]} is none of: {served}")
        try:
            return handle(request)
        except KeyError as error:
            raise ClientError(422, f"the query has no {error.args[0]}") from error
        except StoreFullError as error:
            raise ClientError(413, str(error)) from error

    def _set(self, request: Request) -> Response:
        try:
            item = _ITEM.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ClientError(422, f"no item of the store: {error}") from error
        ttl_s = -1.0 if item.ttl is None else item.ttl
        value, overwrite = item.value or "", bool(item.overwrite_if_exists)
        done = self._store.set(item.key, value, ttl_s, overwrite, self._clock())
        return self._result(done, changed=done)

    def _get(self, request: Request) -> Response:
        return self._result(self._store.get(request.query["key"], self._clock()))

    def _delete(self, request: Request) -> Response:
        done = self._store.delete(request.query["key"], self._clock())
        return self._result(done, changed=done)

    def _expire(self, request: Request) -> Response:
        query = request.query
        try:
            ttl_s = float(int(query["ttl"][:9]))
        except ValueError as error:
            raise ClientError(422, "ttl is no whole number of seconds", "ttl") from error
        return self._result(self._store.expire(query["key"], ttl_s, self._clock()))

    def _get_prefix(self, request: Request) -> Response:
        query = request.query
        found = self._store.get_prefix(query["key_prefix"], self._clock())
        if query.get("keys_only", "false").lower() in ("true", "1"):
            found = dict.fromkeys(found, "")
        return self._result(found)

    def _info(self, request: Request) -> Response:
        cluster = self._cluster()
        least = (1, 1) if cluster is None else cluster.least
        specs = [one.spec for one in self._reported() if not one.stopping]
        by_role = [[s.url for s in specs if s.role == role] for role in _ROLES]
        ready = all(len(urls) >= n for urls, n in zip(by_role, least, strict=True))
        return json_response(
            {
                "is_ready": ready,
                "current_workers": dict(zip(_SERVERS, by_role, strict=True)),
                "minimal_instances": dict(zip(_SERVERS, least, strict=True)),
            }
        )

    def _result(self, result: Any, changed: bool = False) -> Response:
        """Return an answer in TensorRT-LLM's form, with status 400 if there is no result."""
        if changed:
            self._changed()
        return json_response({"result": result}, 200 if result else 400)


_AGAIN_S = 1.0  # pause before another try to get an address or a token, seconds


class TrtllmSource:
    """Reads workers from the YAML file and from the store at which workers announce themselves.
    Lifetime: as long as the configuration names the source.
    """

    def __init__(self, spec: TrtllmSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._pool = DisaggPool()
        self._file = Report(None)
        self._trouble = ""  # of the store's address
        self._news = asyncio.Event()
        self._store = ClusterStore()
        self._port = StorePort(
            self._store,
            lambda: self._pool.cluster,
            lambda: list(self._report().workers or ()),
            self._news.set,
            clock,
        )
        self._server: HttpServer | None = None
        self._at: tuple[str, int] | None = None

    async def reports(self) -> AsyncIterator[Report]:
        """Yield a report whenever the file or the store changes."""
        following = asyncio.create_task(self._follow())
        following.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._changed()
                if following.done():
                    following.result()  # raises the error that ended it
                if self._file.workers is not None:
                    await self._serve()
                yield self._report()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await self._close()

    async def _changed(self) -> None:
        wait_s = max(self._store.next_s() - self._clock(), 0.0)
        if self._trouble:
            wait_s = min(wait_s, _AGAIN_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if wait_s == float("inf") else wait_s):
                await self._news.wait()
        self._news.clear()

    async def _follow(self) -> None:
        source = FileSource(Path(self._spec.path), read=self._read)
        async for report in source.reports():
            self._file = report
            self._news.set()

    def _read(self, path: Path) -> tuple[ReportedWorker, ...]:
        """Read the file and return its workers. The method runs in a thread; it and `_report`
        exchange data only by replacing whole values.
        """
        pool = read_pool(self._spec)
        for unused in set(pool.unused) - set(self._pool.unused):
            log.warning("%s: not used by this router: %s", self._spec, unused)
        self._pool = pool
        return tuple(ReportedWorker(worker) for worker in pool.workers)

    async def _serve(self) -> None:
        """Listen at the address that the file and the source give. If that fails, `_trouble` says
        why.
        """
        cluster, spec = self._pool.cluster, self._spec
        at = None if cluster is None else (spec.host or "127.0.0.1", spec.port or cluster.port)
        self._trouble = ""
        try:
            if spec.token_file is not None:
                self._port.token = await asyncio.to_thread(_token, Path(spec.token_file))
        except ValueError as error:
            self._trouble, at = str(error), None
        if at == self._at:
            return
        await self._close()
        if at is None:
            return
        server = HttpServer(_LIMITS, _TERMS, (), self._clock)
        try:
            host, port = await server.listen(self._port, *at)
        except OSError as error:
            # The router before this one may have the port still: it is tried again.
            self._trouble = f"cannot listen at {at[0]}:{at[1]}: {error.strerror or error}"
            return
        self._server, self._at = server, at
        log.info("%s: its workers may join at http://%s:%d", spec, host, port)
        if self._port.token is None and not _is_loopback(host):
            log.warning("%s: whoever reaches %s:%d may name workers: give token_file", spec, *at)

    async def _close(self) -> None:
        self._at = None
        if self._server is not None:
            server, self._server = self._server, None
            await server.aclose(0.0)

    def _report(self) -> Report:
        file, cluster = self._file, self._pool.cluster
        trouble = "; ".join(filter(None, (file.trouble, self._trouble)))
        if file.workers is None or cluster is None:
            return replace(file, trouble=trouble)
        workers, refused = joined(self._store, self._spec, cluster.name, self._clock())
        named = {one.spec.url for one in file.workers}
        workers = [*file.workers, *(one for one in workers if one.spec.url not in named)]
        return bounded(workers, refused, trouble)


def _token(path: Path) -> str:
    """Return the first line of the file. Raises ValueError if the file cannot be used."""
    lines = data_in(path).decode("ascii", "replace").splitlines()
    if not lines or not lines[0].strip():
        raise ValueError(f"token_file {path} has no token in its first line")
    return lines[0].strip()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
