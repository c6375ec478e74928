"""Tests that one legal body of 16 MB, of any shape, makes no other client wait."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.live.hostile.heavy_bodies import BODIES, Heavy, post
from tests.live.stack import Stack, misbehaving, running, until
from tests.tokenizer_folder import write_model

pytestmark = pytest.mark.alone

# Limits at full length on an otherwise idle machine. Parsing on the event loop took 190 to 460 ms.
MOST_MS = {"usual": 60.0, "all": 30.0}
AT_ONCE = 2
TRIES = 3
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"  # of a worker
# Bodies for each way of reading; all bodies would take minutes.
USUAL = {
    *("/v1/messages: 280,000 messages", "/v1/messages: 19,000 messages"),
    *("/v1/responses: 280,000 items", "/v1/completions: 1,020 prompts of ids"),
    *("/v1/embeddings: 1,020 texts", "/v1/embeddings: one prompt of 8 million ids"),
    *("/v1/completions: one text of escapes", "/v1/completions: one English text"),
    *("/v1/completions: 1 million characters", "/v1/messages: an image"),
    *("/v1/messages: 130,000 tools", "/v1/messages: unknown lists"),
    "/v1/chat/completions: 1,000 messages",
}
# Bodies that are read in another way without a tokenizer.
AS_TEXT = {
    *("/v1/completions: one text of escapes", "/v1/completions: one English text"),
    *("/v1/completions: 1,020 prompts of ids", "/v1/messages: 19,000 messages"),
    "/v1/chat/completions: 1,000 messages",
}


def port_of(stack: Stack) -> int:
    return int(stack.url.rpartition(":")[2])


@asynccontextmanager
async def beside(stack: Stack) -> AsyncIterator[Process]:
    """Start another client in its own process; yield it once its requests are answered."""
    asked = str(port_of(stack)), str(stack.router.process.pid)
    command = (sys.executable, "-m", "tests.live.hostile.heavy_bodies", *asked)
    client = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)

    async def begun() -> bool:
        return all(await longest_ms(client))

    try:
        await until(begun, "the other client")
        yield client
    finally:
        client.kill()
        await client.wait()


async def longest_ms(client: Process) -> list[float]:
    """Return the other client's longest waits since the last call, in ms: for /health and for a
    completion.
    """
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"\n")
    waits: list[float] = json.loads(await client.stdout.readline())
    return waits


async def waits_beside(stack: Stack, client: Process, heavy: Heavy, most_ms: float) -> list[float]:
    """Send several copies of a heavy body, check their answers, and return the longest waits of the
    other client meanwhile; of several tries, the best counts.
    """
    body = heavy.body()
    tried: list[list[float]] = []
    while len(tried) < TRIES and not (tried and max(tried[-1]) <= most_ms):
        await longest_ms(client)
        asked = (asyncio.to_thread(post, port_of(stack), heavy.path, body) for _ in range(AT_ONCE))
        for status, answer in await asyncio.gather(*asked):
            assert status < 500 or status in (501, 503), (heavy.name, status, answer[:300])
            if heavy.code is not None:
                assert json.loads(answer)["error"]["code"] == heavy.code, (heavy.name, answer)
        tried.append(await longest_ms(client))
    return min(tried, key=max)


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("which", ["usual", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("tokenizer", [False, True], ids=["text", "tokens"])
async def test_other_clients_do_not_wait_for_a_heavy_body(
    tmp_path: Path, which: str, tokenizer: bool
) -> None:
    flags = ["--tokenizer", str(write_model(tmp_path))] if tokenizer else []
    slow: dict[str, list[float]] = {}
    async with (
        misbehaving(ANSWER) as (worker, _),
        running(tmp_path / "logs", 0, flags) as stack,
        beside(stack) as client,
    ):
        await stack.add(worker)
        for heavy in BODIES:
            what = f"{heavy.path}: {heavy.name}"
            if which == "usual" and what not in (USUAL if tokenizer else AS_TEXT):
                continue
            waits = await waits_beside(stack, client, heavy, MOST_MS[which])
            print(f"{what:50} others waited {max(waits):.1f} ms", flush=True)
            if max(waits) > MOST_MS[which]:
                slow[what] = waits
    assert not slow
