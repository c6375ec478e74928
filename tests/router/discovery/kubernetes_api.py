"""A Kubernetes API server for tests: objects with versions, lists in pages, watches that can fail.

It speaks what clients need of the API's conventions: one counter of versions over all kinds, lists
with `limit` and `continue`, watches from a version with bookmarks and selectors, and 410 for
versions that were compacted away. It can fail in the ways in which real ones do.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

NAMESPACE = "llm"
PATHS = {
    f"/api/v1/namespaces/{NAMESPACE}/pods": "pods",
    f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools": "inferencepools",
    f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices": "endpointslices",
    f"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives": (
        "inferenceobjectives"
    ),
}
KINDS = {
    "pods": ("v1", "Pod"),
    "inferencepools": ("inference.networking.k8s.io/v1", "InferencePool"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "inferenceobjectives": ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"),
}
Illness = Literal["", "refuses", "hangs", "garbage", "forbidden", "unknown"]
_STATUS = {"refuses": 503, "forbidden": 403, "unknown": 404}


def pool(
    name: str, labels: Mapping[str, str], *ports: int, protocol: str | None = None
) -> dict[str, Any]:
    """Return an InferencePool that its controller's webhook accepts."""
    spec: dict[str, Any] = {
        "selector": {"matchLabels": dict(labels)},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "warmroute", "port": {"number": 9002}},
    }
    if protocol is not None:
        spec["appProtocol"] = protocol
    return {"metadata": {"name": name}, "spec": spec, "status": {}}


def objective(name: str, of: str, priority: Any = None, **ref: str) -> dict[str, Any]:
    """Return an InferenceObjective of the pool `of`, with the fields that the API fills in. `ref`
    has fields of its poolRef.
    """
    named = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": of} | ref
    spec = {"poolRef": named} | ({} if priority is None else {"priority": priority})
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": []}}


def pod(
    name: str,
    address: str | None,
    labels: Mapping[str, str],
    ready: bool = True,
    notes: Mapping[str, str] | None = None,
    deleted: bool = False,
) -> dict[str, Any]:
    """Return a pod with more fields than the router reads. With `deleted`, it is in its grace
    period.
    """
    meta: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "labels": dict(labels)}
    if notes is not None:
        meta["annotations"] = dict(notes)
    if deleted:
        meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 130}
    status: dict[str, Any] = {
        "phase": "Running" if address else "Pending",
        "conditions": [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False", "reason": "x"},
        ],
    }
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    return {"metadata": meta, "spec": {"containers": [{"name": "vllm"}]}, "status": status}


@dataclass
class _Change:
    version: int
    kind: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass
class KubernetesApi:
    """An API server that changes only when the test says so. Lifetime: test."""

    version: int = 1
    illness: Illness = ""
    illnesses: dict[str, Illness] = field(default_factory=dict)  # of single kinds
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # kind, query
    url: str = ""
    _objects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    _changes: list[_Change] = field(default_factory=list)
    _oldest: int = 1  # from this version on all changes are known
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)
    _watches: dict[asyncio.Task[Any], asyncio.Queue[str]] = field(default_factory=dict)
    _kinds: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    _runner: web.AppRunner | None = None
    _port: int = 0

    async def put(self, kind: str, what: dict[str, Any]) -> None:
        """Create an object in the API server, or change it."""
        await self._change(kind, what["metadata"]["name"], copy.deepcopy(what))

    async def delete(self, kind: str, name: str) -> None:
        """Delete an object in the API server at once, if it exists."""
        if name in self._objects.get(kind, {}):
            await self._change(kind, name, None)

    async def compact(self) -> None:
        """Forget all earlier changes, so that earlier watches and later pages of earlier lists get
        410.
        """
        self.version += 1
        self._oldest, self._changes = self.version, []

    async def send_to_watches(
        self, what: Literal["bookmark", "end", "break", "garbage", "expire"]
    ) -> None:
        """Send to all watches what `what` names: a bookmark, their end, a broken line, a line that
        is not JSON, or the error that they are too old.
        """
        for said in self._watches.values():
            said.put_nowait(what)
        async with self._news:
            self._news.notify_all()

    async def until_watched(self, kind: str) -> None:
        """Wait until a client watches this kind of object."""
        async with self._news:
            await self._news.wait_for(lambda: kind in self._kinds.values())

    async def until_requested(self, kind: str, times: int = 1) -> None:
        """Wait until the kind was requested this many times from now on."""
        wanted = times + sum(k == kind for k, _ in self.asked)
        async with self._news:
            await self._news.wait_for(lambda: sum(k == kind for k, _ in self.asked) >= wanted)

    def objects(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return all current objects of a kind."""
        return self._objects.get(kind, {})

    def lists(self, kind: str) -> int:
        """Return how often the kind was listed; only first pages count."""
        return sum(k == kind and not {"watch", "continue"} & q.keys() for k, q in self.asked)

    def watched(self, kind: str) -> list[str]:
        """Return the versions from which clients started to watch the kind."""
        return [q["resourceVersion"] for k, q in self.asked if k == kind and "watch" in q]

    async def start(self) -> None:
        """Start the API server; after a stop, it listens at the same port as before."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Stop listening, and cut the API server's open connections."""
        await self.send_to_watches("break")
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _change(self, kind: str, name: str, what: dict[str, Any] | None) -> None:
        self.version += 1
        here = self._objects.setdefault(kind, {})
        before = here.pop(name, None)
        if what is not None:
            api, title = KINDS[kind]
            what |= {"apiVersion": api, "kind": title}
            what["metadata"] |= {"namespace": NAMESPACE, "resourceVersion": str(self.version)}
            here[name] = what
        self._changes.append(_Change(self.version, kind, before, what))
        async with self._news:
            self._news.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind, query = PATHS.get(request.path, ""), dict(request.query)
        self.asked.append((kind, query))
        async with self._news:
            self._news.notify_all()
        illness = self.illness or self.illnesses.get(kind, "")
        if illness == "hangs":
            await asyncio.sleep(3600)
        if illness == "garbage":
            return web.Response(text="<html>a proxy's page</html>")
        status = _STATUS.get(illness, 200 if kind else 404)
        if status != 200:
            return web.json_response({"kind": "Status", "code": status}, status=status)
        if query.get("watch") == "true":
            return await self._watch(request, kind, query)
        return self._list(kind, query)

    def _list(self, kind: str, query: Mapping[str, str]) -> web.Response:
        names = sorted(n for n, one in self.objects(kind).items() if _selected(one, query))
        first, limit = 0, int(query.get("limit", "500"))
        if page := query.get("continue"):
            version, place = page.split(":")
            if int(version) < self._oldest:
                return web.json_response(_GONE, status=410)
            first = int(place)
        items = [self.objects(kind)[name] for name in names[first : first + limit]]
        meta = {"resourceVersion": str(self.version)}
        if first + limit < len(names):
            meta["continue"] = f"{self.version}:{first + limit}"
        api, title = KINDS[kind]
        answer = {"apiVersion": api, "kind": f"{title}List", "metadata": meta, "items": items}
        return web.json_response(answer)

    async def _watch(
        self, request: web.Request, kind: str, query: Mapping[str, str]
    ) -> web.StreamResponse:
        version = int(query["resourceVersion"])
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        await reply.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        said = self._watches[task] = asyncio.Queue()
        self._kinds[task] = kind
        async with self._news:
            self._news.notify_all()
        try:
            while True:
                if version < self._oldest and self.version > version:
                    await reply.write(_line("ERROR", _GONE))
                    return reply
                while not said.empty():
                    if not await self._interrupt(request, reply, said.get_nowait(), kind, version):
                        return reply
                for change in [c for c in self._changes if c.version > version]:
                    version = change.version
                    if change.kind == kind and (line := _event(change, query)):
                        await reply.write(line)
                while self.version == version and said.empty():
                    async with self._news:
                        await self._news.wait()
        except ConnectionResetError:  # whoever asked has gone
            return reply
        finally:
            del self._watches[task], self._kinds[task]

    async def _interrupt(
        self, request: web.Request, reply: web.StreamResponse, what: str, kind: str, version: int
    ) -> bool:
        """Do to a watch what `send_to_watches` asked for; return whether the watch continues."""
        if what == "bookmark":
            api, title = KINDS[kind]
            meta = {"resourceVersion": str(version), "creationTimestamp": None}
            mark = {"apiVersion": api, "kind": title, "metadata": meta, "spec": None}
            await reply.write(_line("BOOKMARK", mark))
            return True
        if what == "garbage":
            await reply.write(b"upstream timed out\n")
        elif what == "expire":
            await reply.write(_line("ERROR", _GONE))
        elif what == "break":
            await reply.write(b'{"type":"MODIFIED","obj')
            if request.transport is not None:
                request.transport.abort()
        return False


_GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


def _line(kind: str, what: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode() + b"\n"


def _event(change: _Change, query: Mapping[str, str]) -> bytes:
    """Return the event that a watch with these selectors gets for a change, or b"" if it
    gets none.
    """
    was = change.before is not None and _selected(change.before, query)
    now = change.after is not None and _selected(change.after, query)
    if now:
        return _line("MODIFIED" if was else "ADDED", change.after or {})
    if not was:
        return b""
    last = copy.deepcopy(change.after or change.before or {})
    last["metadata"]["resourceVersion"] = str(change.version)
    return _line("DELETED", last)


def _selected(one: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    labels = one["metadata"].get("labels", {})
    wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    if not all(labels.get(key) == value for key, value in wanted):
        return False
    chosen = query.get("fieldSelector")
    return chosen is None or chosen == f"metadata.name={one['metadata']['name']}"


@asynccontextmanager
async def kubernetes_api() -> AsyncIterator[KubernetesApi]:
    """Yield an API server on loopback, at a port that the system chooses."""
    api = KubernetesApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()
