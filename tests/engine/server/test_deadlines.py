"""Tests of deadlines over HTTP, of tenants that headers name, and of streams that say why
they end.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.server.errors import ApiError
from engine.server.options import MAX_TENANT_CHARS, MAX_TIMEOUT_MS, tenant_of, timeout_s
from tests.engine.harness import Running, eventually, running

COMPLETIONS = "/v1/completions"
LATE = {"x-request-timeout-ms": "150"}
BODY = {"prompt": [1, 2, 3], "max_tokens": 9000}


async def sent(worker: Running, body: object, headers: dict[str, str]) -> tuple[int, bytes]:
    url = worker.url + COMPLETIONS
    async with worker.http.post(url, json=body, headers=headers) as reply:
        return reply.status, await reply.read()


async def test_an_unstreamed_answer_after_its_deadline_is_a_504() -> None:
    async with running(speed=1.0) as worker:
        status, answer = await sent(worker, BODY, LATE)
        assert status == 504
        assert json.loads(answer)["error"]["type"] == "TimeoutError"
        assert "deadline" in json.loads(answer)["error"]["message"]
        scheduler = worker.worker.runner.scheduler
        assert (scheduler.requests, scheduler.kv_used_blocks) == ({}, 0)
        assert worker.worker.unfinished == 0
        assert worker.worker.counters.finished["timeout"] == 1
        assert b'finished_reason="timeout",model_name="warmroute-timed"} 1.0' in await worker.get(
            "/metrics"
        )


async def test_a_late_stream_is_a_504_before_its_first_token_or_an_error_event() -> None:
    async with running(speed=0.02, kv_tokens=64) as worker:
        # It holds all of the cache, so that the next one waits.
        whole = asyncio.ensure_future(
            sent(worker, BODY | {"prompt": [5] * 60, "max_tokens": 4}, {})
        )
        scheduler = worker.worker.runner.scheduler
        await eventually(lambda: scheduler.running == 1, "it runs")
        waits = BODY | {"prompt": [7] * 60, "max_tokens": 4, "stream": True}
        status, answer = await sent(worker, waits, {"x-request-timeout-ms": "1"})
        assert (status, json.loads(answer)["error"]["code"]) == (504, 504)
        whole.cancel()
    async with running(speed=1.0) as worker:
        status, answer = await sent(worker, BODY | {"stream": True}, LATE)
        assert status == 200
        *tokens, error, end = answer.decode().split("\n\n")
        assert tokens
        assert all("choices" in one for one in tokens)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504
        assert end == ""


async def test_an_answer_before_its_deadline_is_complete() -> None:
    async with running() as worker:
        body = BODY | {"max_tokens": 3, "stream": True}
        for headers in ({"x-request-timeout-ms": "60000"}, {"x-request-timeout-ms": "0"}):
            status, answer = await sent(worker, body, headers)
            assert status == 200
            assert answer.endswith(b"data: [DONE]\n\n")


async def test_the_error_names_the_bad_header() -> None:
    for text in ("-1", "1.5", "soon", str(MAX_TIMEOUT_MS + 1), "²", "1" * 13):
        with pytest.raises(ApiError, match="x-request-timeout-ms") as refused:
            timeout_s({"x-request-timeout-ms": text})
        assert (refused.value.status, refused.value.param) == (400, "x-request-timeout-ms")
    with pytest.raises(ApiError, match="x-tenant must have at most"):
        tenant_of({"x-tenant": "x" * (MAX_TENANT_CHARS + 1)}, "x-tenant")
    async with running() as worker:
        status, answer = await sent(worker, BODY, {"x-request-timeout-ms": "soon"})
        assert (status, json.loads(answer)["error"]["param"]) == (400, "x-request-timeout-ms")
        assert worker.worker.unfinished == 0


async def test_the_tenant_header_sets_the_tenant() -> None:
    async with running(tenant_header="x-team", speed=1.0) as worker:
        left = asyncio.ensure_future(sent(worker, BODY, {"X-Team": "red"}))
        scheduler = worker.worker.runner.scheduler
        await eventually(lambda: bool(scheduler.requests), "it is queued")
        assert [one.tenant for one in scheduler.requests.values()] == ["red"]
        left.cancel()
        await eventually(lambda: not scheduler.requests, "it is gone")


async def test_an_invalid_tenant_header_name_is_refused() -> None:
    with pytest.raises(ValueError, match="tenant header"):
        async with running(tenant_header="a b"):
            pass
