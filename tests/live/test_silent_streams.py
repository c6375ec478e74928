"""Tests of streams whose worker sends nothing for long: clients get comment lines and
lose no data.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from simulator.live.processes import Programs
from tests.live.api_engine import message_events, responses_events
from tests.served_app import served_by

MODEL, ALIAS = "plain", "claude-plain"
PING = b": waiting for a worker\n\n"


def chat_events(model: str) -> list[bytes]:
    said = [{"role": "assistant", "content": "Good"}, {"content": " day"}, {}]
    chunks = [
        {"model": model, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip(said, (None, None, "stop"), strict=True)
    ]
    return [b"data: %s\n\n" % json.dumps(one).encode() for one in chunks] + [b"data: [DONE]\n\n"]


NAMED: dict[str, Callable[[str], list[bytes]]] = {
    "/v1/messages": message_events,
    "/v1/responses": responses_events,
}
STREAMS = NAMED | {"/v1/chat/completions": chat_events}
HEAD = {"Content-Type": "text/event-stream; charset=utf-8", "X-Worker": "its own"}
WAIT_S = 60


@dataclass
class Silent:
    """A worker that sends nothing until the event `may_continue` is set. Lifetime: test."""

    opens: int = 0  # events before it is silent
    status: int = 200  # the status of its final answer
    dies: bool = False  # it hangs up instead of answering
    may_continue: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL}]})
        if request.path not in STREAMS:
            return web.json_response({"detail": "Not Found"}, status=404)
        await request.read()
        self.asked += 1
        events = STREAMS[request.path](MODEL)
        reply = web.StreamResponse(headers=HEAD)
        if self.opens:
            await reply.prepare(request)
            for event in events[: self.opens]:
                await reply.write(event)
        await self.may_continue.wait()
        if self.dies:
            assert request.transport is not None
            request.transport.abort()
            return reply
        if self.status != 200:
            error = {"type": "invalid_request_error", "message": "its own words"}
            return web.json_response({"type": "error", "error": error}, status=self.status)
        if not self.opens:
            await reply.prepare(request)
        for event in events[self.opens :]:
            await reply.write(event)
        await reply.write_eof()
        return reply


@asynccontextmanager
async def router(
    folder: Path, *workers: Silent, flags: tuple[str, ...] = ()
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        arguments = ["serve", "--port", "0", "--admin-port", "0", *flags]
        async with AsyncExitStack() as served:
            for one in workers:
                url = await served.enter_async_context(served_by(one.answer))
                arguments += ["--worker", f"{url},kind=openai"]
                served.callback(one.may_continue.set)
            program = await programs.start("router", "router", arguments)
            await _ready(http, program.url, len(workers))
            yield program.url, http


async def _ready(http: aiohttp.ClientSession, url: str, workers: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            async with http.get(f"{url}/health") as answer:
                if (await answer.json())["ready_workers"] == workers:
                    return
            await asyncio.sleep(0.02)


PINGED = ("--waiting-ping-s", "0.2", "--names-aliases", f"{ALIAS}={MODEL}")


def body(model: str = MODEL) -> dict[str, Any]:
    asked = [{"role": "user", "content": "Say good day."}]
    return {"model": model, "stream": True, "max_tokens": 9, "messages": asked, "input": asked}


async def read_until(answer: aiohttp.ClientResponse, found: bytes, times: int = 1) -> bytes:
    read = b""
    async with asyncio.timeout(WAIT_S):
        while read.count(found) < times:
            piece = await answer.content.readany()
            assert piece, read
            read += piece
    return read


@pytest.mark.parametrize("path", NAMED)
@pytest.mark.parametrize("model", [MODEL, ALIAS])
@pytest.mark.parametrize("opens", [0, 1, 4])
async def test_a_client_of_a_silent_worker_gets_comments(tmp_path, path, model, opens) -> None:
    worker = Silent(opens=opens)
    async with router(tmp_path, worker, flags=PINGED) as (url, http):
        async with http.post(url + path, json=body(model)) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            read = await read_until(answer, PING, 3)
            worker.may_continue.set()
            read += await answer.content.read()
        events = b"".join(NAMED[path](MODEL))
        said = events.replace(f'"model": "{MODEL}"'.encode(), f'"model": "{model}"'.encode())
        assert read.replace(PING, b"") == said
        assert worker.asked == 1


async def test_a_chat_with_a_long_prefill_gets_comments(tmp_path) -> None:
    worker = Silent()
    asked = [{"role": "user", "content": "Say good day. " * 20_000}]
    async with router(tmp_path, worker, flags=PINGED) as (url, http):
        sent = {"model": MODEL, "stream": True, "messages": asked}
        async with http.post(f"{url}/v1/chat/completions", json=sent) as answer:
            read = await read_until(answer, PING, 2)
            worker.may_continue.set()
            read += await answer.content.read()
    assert read.replace(PING, b"") == b"".join(chat_events(MODEL))


@pytest.mark.parametrize("path", NAMED)
async def test_an_answer_that_begins_in_time_keeps_the_workers_headers_and_status(
    tmp_path, path
) -> None:
    worker = Silent()
    worker.may_continue.set()
    async with router(tmp_path, worker, flags=("--waiting-ping-s", "30")) as (url, http):
        async with http.post(url + path, json=body()) as answer:
            assert answer.headers["X-Worker"] == "its own"
            assert await answer.content.read() == b"".join(NAMED[path](MODEL))
        worker.status = 400
        async with http.post(url + path, json=body()) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == "its own words"


@pytest.mark.parametrize("path", NAMED)
async def test_an_error_after_a_comment_is_an_event_with_the_workers_message(
    tmp_path, path
) -> None:
    worker = Silent(status=400)
    async with (
        router(tmp_path, worker, flags=PINGED) as (url, http),
        http.post(url + path, json=body()) as answer,
    ):
        read = await read_until(answer, PING)
        worker.may_continue.set()
        read += await answer.content.read()
    (event,) = [part for part in read.split(b"\n\n") if part and part != PING.strip()]
    name, data = event.split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "its own words"},
    }


async def test_a_request_moves_from_a_worker_that_dies_after_comments(tmp_path) -> None:
    workers = Silent(dies=True), Silent(dies=True)
    async with (
        router(tmp_path, *workers, flags=PINGED) as (url, http),
        http.post(f"{url}/v1/messages", json=body()) as answer,
    ):
        read = await read_until(answer, PING)
        first, other = sorted(workers, key=lambda one: -one.asked)
        other.dies = False
        first.may_continue.set()
        read += await read_until(answer, PING)
        other.may_continue.set()
        read += await answer.content.read()
    assert (first.asked, other.asked) == (1, 1)
    assert read.replace(PING, b"") == b"".join(message_events(MODEL))


async def test_the_only_workers_death_after_comments_gives_an_error_event(
    tmp_path,
) -> None:
    worker = Silent(dies=True)
    async with (
        router(tmp_path, worker, flags=PINGED) as (url, http),
        http.post(f"{url}/v1/messages", json=body()) as answer,
    ):
        read = await read_until(answer, PING)
        worker.may_continue.set()
        read += await answer.content.read()
    event = read.replace(PING, b"")
    assert event.startswith(b'event: error\ndata: {"type":"error","error":{')
    assert event.endswith(b"}\n\n")


async def test_clients_get_no_comments_if_they_are_switched_off(tmp_path) -> None:
    worker = Silent(opens=1)
    async with (
        router(tmp_path, worker, flags=("--waiting-ping-s", "0")) as (url, http),
        http.post(f"{url}/v1/messages", json=body()) as answer,
    ):
        read = await read_until(answer, b"\n\n")
        await asyncio.sleep(0.5)  # time in which comments would come
        worker.may_continue.set()
        read += await answer.content.read()
    assert read == b"".join(message_events(MODEL))
