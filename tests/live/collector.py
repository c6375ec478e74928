"""A collector of OpenTelemetry traces: receives OTLP over HTTP and decodes it with OpenTelemetry's
own package.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.live.ports import lasting_port
from tests.live.stack import until

KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CLIENT: "client"}


@dataclass(frozen=True)
class Seen:
    """A received trace span, with its fields decoded to plain Python values."""

    name: str
    trace: str
    id: str
    parent: str  # "": none
    kind: str
    start_ns: int
    end_ns: int
    about: dict[str, Any]
    events: dict[str, int]
    failed: bool
    state: str
    service: str


@dataclass
class Collector:
    """An OTLP server that keeps every span that it receives. Lifetime: test."""

    port: int
    answer: Any = 200  # a status, or what to do with a request instead
    seen: list[Seen] = field(default_factory=list)
    posts: int = 0

    @property
    def flags(self) -> list[str]:
        return ["--tracing-endpoint", f"http://127.0.0.1:{self.port}", "--tracing-sample", "1"]

    async def traces(self, requests: int = 1) -> dict[str, list[Seen]]:
        """Wait until the spans of `requests` requests have arrived; return spans by trace id."""

        async def has_requests() -> bool:
            return sum(span.kind == "server" for span in self.seen) >= requests

        await until(has_requests, f"the spans of {requests} requests")
        found: dict[str, list[Seen]] = {}
        for span in self.seen:
            found.setdefault(span.trace, []).append(span)
        return found

    async def take(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/traces"
        self.posts += 1
        told = ExportTraceServiceRequest.FromString(await request.read())
        if self.answer == "slow":
            await asyncio.sleep(60)
        if self.answer != 200:
            return web.Response(status=self.answer, body=b"\x00garbage")
        for resource in told.resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.seen += [plain(span, service) for span in scope.spans]
        return web.Response(body=b"", content_type="application/x-protobuf")


def plain(span: Any, service: str) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        KINDS.get(span.kind, "internal"),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values(span.attributes),
        {event.name: event.time_unix_nano for event in span.events},
        span.status.code == Status.STATUS_CODE_ERROR,
        span.trace_state,
        service,
    )


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector(lasting_port())
    app = web.Application()
    app.router.add_post("/{path:.*}", collector.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", collector.port).start()
    try:
        yield collector
    finally:
        await runner.cleanup()
