"""Runs a real worker on loopback for tests, with real HTTP and ZMQ and ports that the system
chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from engine.server import WorkerSettings, serving
from engine.server.worker import Worker
from engine.wire.events import Live, parse_live, parse_replay, replay_request
from engine.wire.tokens import Tokenizer, WordTokenizer

VOCAB = 32_000
DEADLINE_S = 10.0


@dataclass
class Running:
    """A running worker and an HTTP session for its clients."""

    url: str
    worker: Worker
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Post `body` and return the status and the decoded JSON; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data) as reply:
            return reply.status, await reply.json(content_type=None)

    async def get(self, path: str) -> bytes:
        async with self.http.get(self.url + path) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.read()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Post a streaming request and return its decoded events; assert that the stream ends with
        [DONE].
        """
        async with self.http.post(self.url + path, json=body | {"stream": True}) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.content_type == "text/event-stream"
            text = (await reply.read()).decode()
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.asynccontextmanager
async def running(tokenizer: Tokenizer | None = None, **changes: Any) -> AsyncIterator[Running]:
    """Yield a worker that is 50 times as fast as a real one, with `changes` to its settings."""
    options: dict[str, Any] = {
        "profile_name": "llama-3.1-8b-h100",
        "speed": 50.0,
        "kv_tokens": 16_384,
        "port": 0,
        "grace_s": 0.0,
    }
    settings = WorkerSettings(**(options | changes))
    async with (
        serving(settings, tokenizer or WordTokenizer(VOCAB)) as (url, worker),
        aiohttp.ClientSession() as http,
    ):
        yield Running(url, worker, http)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds; fail with `what` if it does not hold in time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + DEADLINE_S
    while not condition():
        assert loop.time() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def subscriber(worker: Worker) -> AsyncIterator[zmq.asyncio.Socket]:
    """Yield a SUB socket that is certain to receive the next events.

    A subscription takes a moment, so the function causes batches of events until one arrives.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(worker.publisher.endpoint)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await socket.poll(timeout=20):
                worker.reset_cache()
        while await socket.poll(timeout=0):
            await socket.recv_multipart()
        yield socket
    finally:
        context.destroy(linger=0)


async def drain_live(socket: zmq.asyncio.Socket, last_seq: int) -> list[Live]:
    """Return the live event batches up to number `last_seq`."""
    got: list[Live] = []
    async with asyncio.timeout(DEADLINE_S):
        while not got or got[-1].seq < last_seq:
            got.append(parse_live(await socket.recv_multipart()))
    return got


async def replay(worker: Worker, start_seq: int) -> list[Live]:
    """Return the event batches that the worker's replay socket (ROUTER) sends from number
    `start_seq` on.
    """
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(worker.publisher.replay_endpoint)
        await socket.send_multipart(replay_request(start_seq))
        got: list[Live] = []
        async with asyncio.timeout(DEADLINE_S):
            while (reply := parse_replay(await socket.recv_multipart())) is not None:
                got.append(reply)
        return got
    finally:
        context.destroy(linger=0)
