"""A chain of scripted workers, from one to the next of which a stream is moved, and its
counters.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from policies.facts import Arrival
from router.config.extras import Migration
from router.engines.table import ADAPTERS
from router.http.messages import Answer, Request, Response
from router.http.reply import Outcome, Timeouts
from router.migration.metrics import MigrationMetrics
from router.migration.stream import Migrations
from router.request.refusals import pass_refusal_on
from router.upstream.client_reply import ClientReply, upstream_request
from router.upstream.fallback import Upstream
from tests.router.relay_support import Script, served, upstreams_to, worker

FORMS = {kind: one.stream_form for kind, one in ADAPTERS.items() if one.stream_form is not None}


TOTAL = 5


class MigrationDispatcher:
    """The attributes of a dispatcher that migration reads. Lifetime: test."""

    clock = staticmethod(time.monotonic)

    def identity(self, model: str) -> tuple[str, str | None]:
        return model, None

    def card(self, name: str) -> dict[str, Any] | None:
        return {"id": "m", "max_model_len": 100} if name == "m" else None


class Chain:
    """Sends each stream to its workers in turn, until one completes it. Lifetime: test."""

    def __init__(self, upstreams: list[Upstream], terms: Migration, buffer_bytes: int) -> None:
        self.metrics = MigrationMetrics()
        dispatcher: Any = MigrationDispatcher()
        self.migrations = Migrations(dispatcher, self.metrics, terms)
        self.outcomes: list[Outcome] = []
        self.rests: list[Arrival | None] = []
        self.sending: asyncio.Future[Outcome]  # the latest
        self.port = 0
        self.buffer_bytes = buffer_bytes
        self.upstreams = upstreams

    async def handle(self, request: Request) -> Answer:
        body = request.body
        tokens = json.loads(body)["max_tokens"]
        arrival = Arrival(0.0, 1, "m", 3, {4: []}, True, tokens)  # type: ignore[dict-item]
        with self.migrations.stream(body, request.path, arrival) as stream:
            assert stream is not None
            for upstream in self.upstreams:
                assert stream.take("warmroute", ClientReply(request, self.buffer_bytes))
                sent = stream.request(upstream_request(request, body))
                sending = upstream.send(sent, stream, Timeouts())
                self.sending = asyncio.ensure_future(sending)
                outcome = stream.ended(pass_refusal_on(await self.sending, stream, arrival.model))
                self.outcomes.append(outcome)
                if not outcome.retryable:
                    return stream.reply
                self.rests.append(stream.rest())
            if stream.begun:
                return stream.give_up("refused")
            return Response(502)


@asynccontextmanager
async def chain(
    *scripts: Script, buffer_bytes: int = 262_144, **terms: int
) -> AsyncIterator[Chain]:
    """Yield a chain of workers that follow these scripts; a stream goes from each to the next."""
    async with AsyncExitStack() as exits:
        workers = [await exits.enter_async_context(worker(script)) for script in scripts]
        ports = [each.port for each in workers]
        upstreams = await exits.enter_async_context(upstreams_to(*ports))
        it = Chain(upstreams, Migration(**{"moves": 3, **terms}), buffer_bytes)
        async with served(it.handle) as it.port:
            yield it
        assert it.metrics.kept_tokens() == 0
