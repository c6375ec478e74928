"""A small Kubernetes API server that replays answers in the API's documented schema (1.33)."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.served_app import served_app

PATH = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    """Return an endpoint that is ready and serving, except for the given conditions."""
    known = {"ready": True, "serving": True, "terminating": False} | conditions
    target = {"kind": "Pod", "namespace": "llm", "name": f"vllm-{address}", "uid": "5f0e"}
    return {"addresses": [address], "conditions": known, "targetRef": target, "nodeName": "n1"}


def terminating(address: str) -> dict[str, Any]:
    return endpoint(address, ready=False, serving=True, terminating=True)


def endpoint_slice(
    name: str, version: int, *endpoints: Any, ports: Any = None, kind: str = "IPv4"
) -> dict[str, Any]:
    """Return an EndpointSlice as its controller writes it."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "generateName": "vllm-",
            "namespace": "llm",
            "resourceVersion": str(version),
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": "vllm",
            },
            "managedFields": [{"manager": "kube-controller-manager", "fieldsV1": {"f:x": {}}}],
        },
        "addressType": kind,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}] if ports is None else ports,
    }


def event(kind: str, what: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    meta = {"resourceVersion": str(version), "creationTimestamp": None}
    return event("BOOKMARK", {"kind": "EndpointSlice", "metadata": meta, "endpoints": None})


def too_old() -> bytes:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410}
    return event("ERROR", status | {"reason": "Expired", "message": "too old resource version"})


@dataclass
class Watch:
    """The lines of one watch, which waits for more lines until the test ends it. Lifetime: test."""

    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def send(self, *lines: bytes) -> None:
        for line in lines:
            self.lines.put_nowait(line)

    def end(self) -> None:
        """End the watch in the way that the server's own timeout does."""
        self.lines.put_nowait(None)

    def break_off(self) -> None:
        """Break the watch off in the middle of an event."""
        self.lines.put_nowait(b"")


@dataclass
class ApiServer:
    """An API server that replays the test's answers. Lifetime: test."""

    url: str = ""
    lists: deque[Any] = field(default_factory=deque)  # answers in turn, the last one for ever
    watches: list[Watch] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    status: int = 200

    def set_next_list(self, version: int, *slices: dict[str, Any]) -> None:
        meta = {"resourceVersion": str(version)}
        kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
        self.lists.append(json.dumps({**kind, "metadata": meta, "items": list(slices)}).encode())

    def watch(self, number: int) -> Watch:
        while len(self.watches) <= number:
            self.watches.append(Watch())
        return self.watches[number]

    @property
    def watched(self) -> list[str]:
        """Return the version from which each watch started."""
        return [one["resourceVersion"] for one in self.asked if one.get("watch")]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        assert request.query["labelSelector"] == "kubernetes.io/service-name=vllm"
        if not request.query.get("watch"):
            body = self.lists.popleft() if len(self.lists) > 1 else self.lists[0]
            return web.Response(body=body, content_type="application/json")
        watch = self.watch(len(self.watched) - 1)
        reply = web.StreamResponse()
        await reply.prepare(request)
        while (line := await watch.lines.get()) is not None:
            if not line:
                await reply.write(b'{"type":"MODIFIED","obj')
                assert request.transport is not None
                request.transport.abort()
                break
            for start in range(0, len(line), 100):  # however it is cut on its way
                await reply.write(line[start : start + 100])
        return reply


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """Yield an API server on loopback, at a port that the system chooses."""
    server = ApiServer()
    app = web.Application()
    app.router.add_get(PATH, server.answer)
    async with served_app(app) as server.url:
        try:
            yield server
        finally:
            for watch in server.watches:
                watch.end()


def hosts(urls: Iterable[str]) -> list[str]:
    return sorted(url.partition("://")[2] for url in urls)
