"""Clients that leave or do not read: their requests end at once and hold nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.engine.harness import eventually, running

PROMPT = list(range(100, 140))
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_a_silent_prefill(stream: bool) -> None:
    async with running(speed=0.001) as worker:  # the first token would take 8 s
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": stream}
        call = asyncio.create_task(worker.post(COMPLETIONS, body))
        await eventually(lambda: worker.worker.runner.scheduler.running == 1, "it runs")
        call.cancel()
        await eventually(lambda: worker.worker.unfinished == 0, "the request is cancelled")
        assert worker.worker.pool.used_blocks == 0
        assert worker.worker.runner.scheduler.running == 0


async def test_a_client_that_leaves_during_the_stream() -> None:
    async with running(speed=1.0) as worker:
        body = {"prompt": PROMPT, "max_tokens": 10_000, "stream": True}
        async with worker.http.post(worker.url + COMPLETIONS, json=body) as reply:
            assert (await reply.content.readany()).startswith(b"data: ")
            reply.close()
        await eventually(lambda: worker.worker.unfinished == 0, "the request is cancelled")
        assert worker.worker.pool.used_blocks == 0
        assert worker.worker.tallies.finished["abort"] == 1


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.answers.MAX_UNSENT_BYTES", 50_000)
    async with running(speed=100_000.0) as worker:
        host, port = worker.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"prompt": [[1]] * 64, "max_tokens": 16_000, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await eventually(lambda: worker.worker.tallies.slow_clients >= 1, "it is cut off")
        await eventually(lambda: worker.worker.unfinished == 0, "its requests are cancelled")
        writer.close()
        assert reader is not None
