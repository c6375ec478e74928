"""Tests of workers with SGLang's own API that break off in the middle of answers, which other
workers continue.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine.timed import continuation
from tests.live.stack import running
from tests.router.migration.generated_streams import PROMPT, parsed_stream, stream
from tests.router.migration.migration_engines import VOCAB, texts
from tests.served_app import served_by

TOTAL = 12
BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": TOTAL}, "stream": True}
ROUTER = ["--migration-moves", "2", "--timeouts-between-bytes-s", "5"]
PAGES: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [{"id": "m", "max_model_len": 8192}]},
    "/server_info": {"page_size": 4, "dp_size": 1, "max_total_num_tokens": 4096},
    "/health": {},
    "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
}


@dataclass
class Worker:
    """A server that writes streams as SGLang does, and breaks them off on demand.
    Lifetime: test.
    """

    name: str
    dies: list[int]  # for all workers: after how many events the next answers break off
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            page = PAGES.get(request.path)
            return web.json_response(page, status=404 if page is None else 200)
        if request.path != "/generate":
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        self.asked.append(body)
        total = body["sampling_params"]["max_new_tokens"]
        events = stream("whole", self.name, body["input_ids"], total)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        dies_at = self.dies.pop(0) if self.dies else None
        await reply.write(b"".join(events[:dies_at]))
        if dies_at is not None:
            assert request.transport is not None
            request.transport.close()
        return reply


@asynccontextmanager
async def served(worker: Worker) -> AsyncIterator[Worker]:
    async with served_by(worker.answer) as url:
        worker.url = f"{url},kind=sglang"
        yield worker


async def test_an_answer_continues_at_another_worker(tmp_path: Path) -> None:
    dies: list[int] = []
    async with running(tmp_path, workers=0, router=ROUTER) as stack, AsyncExitStack() as exits:
        workers = [await exits.enter_async_context(served(Worker(n, dies))) for n in "abc"]
        for worker in workers:
            await stack.add(worker.url)
        for fates in ([], [5], [3, 4]):
            dies[:] = fates
            for worker in workers:
                worker.asked.clear()
            async with stack.http.post(f"{stack.url}/generate", json=BODY) as reply:
                assert reply.status == 200, await reply.text()
                assert reply.headers["x-warmroute-migratable"] == "1"
                out = await reply.read()
            text, ids, metas = parsed_stream(out, "whole")
            tokens = continuation(PROMPT, TOTAL, VOCAB)
            assert (text, ids) == ("".join(texts(tokens, last=True)), tokens)
            assert len({meta["id"] for meta in metas}) == 1
            assert metas[-1]["completion_tokens"] == TOTAL
            asked = [body for worker in workers for body in worker.asked]
            assert len(asked) == 1 + len(fates)
            for body in asked:
                assert body["input_ids"] == [*PROMPT, *tokens][: len(body["input_ids"])]

        assert await stack.metric("warmroute_migrations_total") == 3
        await stack.assert_idle()


async def test_the_limit_of_attempts_includes_moves(tmp_path: Path) -> None:
    """At most three workers may fail a request, whether or not its client has already seen a part
    of the answer.
    """
    dies: list[int] = []
    router = ["--migration-moves", "16", "--retries-attempts", "3"]
    async with running(tmp_path, workers=0, router=router) as stack, AsyncExitStack() as exits:
        workers = [await exits.enter_async_context(served(Worker(n, dies))) for n in "abcde"]
        for worker in workers:
            await stack.add(worker.url)
        dies[:] = [3, 2, 2, 2]
        with pytest.raises(aiohttp.ClientPayloadError):
            async with stack.http.post(f"{stack.url}/generate", json=BODY) as reply:
                await reply.read()
        asked = [body for worker in workers for body in worker.asked]
        assert len(asked) == 3
        assert json.dumps(dies) == "[2]"
        await stack.assert_idle()
