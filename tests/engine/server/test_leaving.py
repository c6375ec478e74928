"""Tests of clients that leave or do not read, and of a worker that fails: nothing stays reserved,
and no failure is hidden.
"""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from engine.step_time import StepTime
from engine.timed import continuation
from tests.engine.harness import VOCAB, eventually, running
from tests.oracles.block_pool import check_pool

PROMPT = list(range(100, 140))
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_during_prefill_ends_the_request(stream: bool) -> None:
    async with running(speed=0.001) as worker:  # the first token would take 8 s
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": stream}
        call = asyncio.create_task(worker.post(COMPLETIONS, body))
        await eventually(lambda: worker.worker.runner.scheduler.running == 1, "it runs")
        call.cancel()
        await eventually(lambda: worker.worker.unfinished == 0, "the request is cancelled")
        assert worker.worker.pool.used_blocks == 0
        assert worker.worker.runner.scheduler.running == 0


async def test_a_disconnect_during_the_stream_ends_the_request() -> None:
    async with running(speed=1.0) as worker:
        body = {"prompt": PROMPT, "max_tokens": 10_000, "stream": True}
        async with worker.http.post(worker.url + COMPLETIONS, json=body) as reply:
            assert (await reply.content.readany()).startswith(b"data: ")
            reply.close()
        await eventually(lambda: worker.worker.unfinished == 0, "the request is cancelled")
        assert worker.worker.pool.used_blocks == 0
        assert worker.worker.counters.finished["abort"] == 1


async def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.answers.MAX_UNSENT_BYTES", 50_000)
    async with running(speed=100_000.0) as worker:
        host, port = worker.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"prompt": [[1]] * 64, "max_tokens": 16_000, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await eventually(lambda: worker.worker.counters.slow_clients >= 1, "it is cut off")
        await eventually(lambda: worker.worker.unfinished == 0, "its requests are cancelled")
        writer.close()
        assert reader is not None


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_blocks_are_held_after_a_storm_of_clients(seed: int) -> None:
    chance = random.Random(seed)
    async with running(kv_tokens=1024, speed=20.0) as worker:

        async def client() -> bool:
            """Send a request; return True if the client stayed to the end, after checking every
            token it got.
            """
            prompt = [chance.randrange(3), *range(chance.randrange(1, 150))]
            count = chance.randrange(1, 60)
            call = worker.events(COMPLETIONS, {"prompt": prompt, "max_tokens": count})
            try:
                events = await asyncio.wait_for(call, chance.choice([0.0, 0.01, 0.05, 10.0]))
            except TimeoutError:
                return False
            said = "".join(event["choices"][0]["text"] for event in events)
            expected = continuation(prompt, count, VOCAB)
            assert said == "".join(f" t{token}" for token in expected)
            return True

        stayed = sum(await asyncio.gather(*(client() for _ in range(80))))
        await eventually(lambda: worker.worker.unfinished == 0, "all requests are over")
        scheduler, counters = worker.worker.runner.scheduler, worker.worker.counters
        assert (scheduler.running, scheduler.waiting) == (0, 0)
        assert worker.worker.pool.used_blocks == 0
        check_pool(worker.worker.pool)
        # Clients that left before they sent a request are no aborts, so it is only certain that
        # some left.
        assert counters.finished["length"] >= stayed
        assert 80 > stayed > 0


async def test_a_failed_step_loop_ends_the_worker_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: StepTime, step: object) -> float:
        raise ZeroDivisionError("the model of time failed")

    async def ask() -> None:
        async with running() as worker:
            await worker.post(COMPLETIONS, {"prompt": PROMPT})

    monkeypatch.setattr(StepTime, "seconds", broken)
    with pytest.raises(BaseExceptionGroup) as failure:
        await ask()
    assert failure.group_contains(ZeroDivisionError)
