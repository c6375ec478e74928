"""Tests that unique prompts leave no memory behind in the router once its limits are reached."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.live.chaos import FLAGS
from tests.live.stack import MODEL, Stack, running

pytestmark = pytest.mark.alone

PROMPTS, EACH = 100_000, 20_000
CLIENTS = 16
PROMPT_TOKENS = 256  # 16 blocks
SESSIONS = 500  # of which up to 65,536 are counted as alive, whatever the limits
MOST_KIB = 6_144  # normal change of a process's heap, in KiB


@asynccontextmanager
async def quick_worker() -> AsyncIterator[str]:
    """Run a worker that answers at once on keep-alive connections; yield its URL."""
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1}
    choice = {"index": 0, "text": " a", "finish_reason": "length"}
    answers = {
        b"/v1/completions": json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode(),
        b"/health": b"{}",
        b"/v1/models": json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode(),
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(length_of(head))
                path = head.split(b" ")[1]
                if path not in answers:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                answer = answers[path]
                kind = b"Content-Type: application/json\r\n"
                size = b"Content-Length: %d\r\n\r\n" % len(answer)
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind + size + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def length_of(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)


async def ask(stack: Stack, numbers: range) -> None:
    """Send unique prompts one after another on one connection."""
    port = int(stack.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in numbers:
        prompt = [number * PROMPT_TOKENS + n for n in range(PROMPT_TOKENS)]
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"x-session-id: s%d\r\nContent-Length: %d\r\n\r\n"
            % (number % SESSIONS, len(body))
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readexactly(length_of(head))
        assert head.startswith(b"HTTP/1.1 200 "), (head, answer)
    writer.close()


async def ask_all(stack: Stack, numbers: range) -> int:
    """Send all prompts by several clients; return the router's memory afterwards, in KiB."""
    parts = (numbers[n::CLIENTS] for n in range(CLIENTS))
    await asyncio.gather(*(ask(stack, part) for part in parts))
    await stack.assert_idle()
    return rss_kib(stack.router.process.pid)


def rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.full
@pytest.mark.timeout(1_800)
async def test_memory_is_flat_over_a_hundred_thousand_unique_prompts(tmp_path: Path) -> None:
    async with quick_worker() as worker, running(tmp_path, 0, FLAGS) as stack:
        await stack.add(worker)
        kib = [await ask_all(stack, range(n, n + EACH)) for n in range(0, PROMPTS, EACH)]
    print(f"after each {EACH} unique prompts: {kib} KiB")
    assert kib[-1] - kib[0] < MOST_KIB, kib
