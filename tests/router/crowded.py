"""A router for tests with any number of fake workers and fake load."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np

from policies.facts import Arrival, LoadReport, WorkerChange, WorkerFacts
from router.assembly import Router
from router.body.paths import OTHER
from router.core.contract.actions import Reject
from router.engines.worker_spec import parse_worker_spec
from router.fleet.recognize import Recognized
from router.http.errors import WorkerError
from router.http.messages import Request
from router.http.reply import Outcome, Usage
from router.record.explain import Asked
from router.request.carrier import Carrier
from router.request.prompts import Prompt
from router.request.settling import settle
from router.request.state import AttemptEnd, ReadRequest, RequestState
from router.settings.schema import Config, Intervals, Limits
from tests.router.fleet.fleet_support import admin_port

BLOCK = 16
HEADS = (20, 26, 40)  # blocks of the system prompts that sessions share
KV_TOKENS = 400_000.0


@dataclass
class Crowd:
    """A router whose workers do not exist. Lifetime: test."""

    router: Router
    url: str  # of the admin port
    http: aiohttp.ClientSession
    draws: random.Random = field(default_factory=lambda: random.Random(5))
    requests: list[RequestState] = field(default_factory=list)

    def join(self, models: Sequence[str] = ("m",), url: str | None = None) -> int:
        """Add a worker that counts as ready."""
        router, number = self.router, len(self.router.fleet.members)
        here = url or f"http://127.0.{number // 250}.{number % 250 + 1}:9"
        worker_id = router.fleet.add(parse_worker_spec(here)).worker_id
        facts = WorkerFacts(
            name=here,
            models=tuple(models),
            block_size=BLOCK,
            has_events=worker_id % 7 == 3,
            kv_capacity_tokens=KV_TOKENS,
            prefill_tokens_per_s=15_000.0,
        )
        router.fleet.members[worker_id].recognized = Recognized("vllm", facts, None)
        self.state(worker_id, "ready", facts)
        used = KV_TOKENS * self.draws.random()
        report = LoadReport(router.dispatcher.clock(), worker_id, 0, 0, used)
        router.dispatcher.handle_fact(report)
        return worker_id

    def state(self, worker_id: int, state: Any, facts: WorkerFacts | None = None) -> None:
        """Tell the core a worker's state, as its monitor would."""
        now_s = self.router.dispatcher.clock()
        self.router.dispatcher.handle_fact(WorkerChange(now_s, worker_id, state, facts))

    async def send(
        self, session: str = "s", tenant: str | None = None, model: str = "m", body: bytes = b""
    ) -> None:
        """Dispatch a request, which is not answered yet."""
        service, draws = self.router.service, self.draws
        own = np.frombuffer(draws.randbytes(8 * draws.randrange(5, 60)), dtype=np.uint64)
        blocks = draws.choice(HEADS)
        head = np.frombuffer(random.Random(blocks).randbytes(8 * blocks), dtype=np.uint64)
        chain = np.concatenate([head, own])
        tokens = len(chain) * BLOCK + 3
        number = service.next_request_id()
        arrival = Arrival(
            *(service.clock(), number, model, tokens, {BLOCK: chain}),
            session=session,
            tenant=tenant,
        )
        http = cast(Request, None)
        request = self.router.inference.begin(http, Carrier(http))
        prompt = Prompt(tokens, tokens, {BLOCK: chain}, False)
        asked: Asked = "short" if draws.random() < 0.5 else "no"
        request.understood(ReadRequest(body, OTHER, arrival, prompt, asked))
        request.ticket.arrive(arrival, explained=asked != "no")
        action = await request.ticket.next_action()
        assert not isinstance(action, Reject), action
        self.router.inference.attempts.begin(request, action)
        self.requests.append(request)

    def answer(self, share: float = 1.0, fails: float = 0.0) -> None:
        """Answer the oldest requests, a share `share` of them; a share `fails` fails for good."""
        for request in self.requests[: int(len(self.requests) * share)]:
            now_s = self.router.dispatcher.clock()
            request.ticket.first_token(now_s)
            error = WorkerError("garbage", "x") if self.draws.random() < fails else None
            usage = Usage(prompt_tokens=1000, cached_tokens=self.draws.randrange(1000))
            outcome = Outcome(now_s, 200, error, 99, now_s + 0.02, now_s + 0.5, 9, usage)
            settle(self.router.service, request, request.attempts[-1], AttemptEnd(None, outcome))
            request.__exit__(None, None, None)
        del self.requests[: int(len(self.requests) * share)]

    async def second(self) -> None:
        """Advance the history of the status page by one second."""
        self.router.admin.ui.sample()

    async def ui_state(self, query: str = "") -> Any:
        """Return the answer of `/ui/state`, or None if its status is 204."""
        async with self.http.get(f"{self.url}/ui/state{query}") as reply:
            assert reply.status in (200, 204), await reply.text()
            return msgspec.json.decode(await reply.read()) if reply.status == 200 else None


@asynccontextmanager
async def crowd(workers: int, **config: Any) -> AsyncIterator[Crowd]:
    """Yield a router with its admin port and `workers` workers, which all count as ready."""
    async with aiohttp.ClientSession() as http:
        limits = Limits(workers=max(workers + 8, 16))
        router = Router(Config(limits=limits, intervals=Intervals(health_s=600.0), **config), http)
        try:
            async with admin_port(router) as url:
                one = Crowd(router, url, http)
                for _ in range(workers):
                    one.join()
                try:
                    yield one
                finally:
                    one.answer()
        finally:
            await router.aclose()
