"""Tests of edited replies over real sockets: their framing, whatever the worker's was, and slow
clients.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.http.messages import Answer, Request
from router.http.reply import Timeouts
from router.names.answers import AnswerEditor
from router.upstream.client_reply import upstream_request
from router.upstream.edited_reply import EditedReply
from tests.router.relay_support import (
    Relay,
    WorkerCall,
    fetch,
    header,
    post,
    relay,
    served,
    until,
    upstreams_to,
    use_implementation,
    worker,
)

VALUE = b'"asked"'
BODY = json.dumps({"id": 1, "data": [{"model": "no"}], "model": "served", "z": "y" * 100}).encode()
EDITED = BODY.replace(b'"model": "served"', b'"model": ' + VALUE)
EVENTS = b"".join(b'data: {"model":"served","n":%d}\r\n\r\n' % n for n in range(9))
EDITED_EVENTS = EVENTS.replace(b'"served"', VALUE)
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"


class Renaming(Relay):
    """A relay that puts the requested model name into answers."""

    async def handle(self, request: Request) -> Answer:
        headers = ((b"X-Warmroute-Worker", b"w"),)
        reply = EditedReply(request, self.buffer_bytes, headers, AnswerEditor(VALUE))
        self.replies.append(reply)
        sent = upstream_request(request, request.body)
        outcome = await self.upstreams[0].send(sent, reply, self.timeouts)
        self.outcomes.append(outcome)
        if outcome.held is not None:
            outcome.held.deliver(reply)
        return reply


@asynccontextmanager
async def renaming(port: int, buffer_bytes: int = 65_536) -> AsyncIterator[Renaming]:
    async with upstreams_to(port) as upstreams:
        it = Renaming(upstreams, Timeouts(), buffer_bytes)
        async with served(it.handle) as it.port:
            yield it


@pytest.fixture(autouse=True, params=["native", "python"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_implementation(str(request.param), monkeypatch)


def chunked(body: bytes, size: int = 7) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


FRAMINGS = {
    "length": lambda body: b"Content-Length: %d\r\n\r\n" % len(body) + body,
    "chunked": lambda body: b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body),
    "close": lambda body: b"Connection: close\r\n\r\n" + body,
}


def split(reply: bytes) -> tuple[bytes, bytes]:
    """Return head and body of a reply, the body without chunk framing."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    if (header(head, b"transfer-encoding") or b"") != b"chunked":
        if (length := header(head, b"content-length")) is not None:
            assert int(length) == len(rest)
        return head, rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        body, rest = body + rest[:count], rest[count + 2 :]
        if not count:
            assert rest == b""
            return head, body


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("kind", ["json", "events"])
async def test_an_edited_reply_gets_its_own_framing(
    kind: str, framing: str, version: bytes
) -> None:
    body, edited = (BODY, EDITED) if kind == "json" else (EVENTS, EDITED_EVENTS)
    text = b"HTTP/1.1 200 OK\r\n" + (JSON if kind == "json" else SSE) + FRAMINGS[framing](body)

    async def script(call: WorkerCall) -> None:
        cuts = sorted(random.Random(3).sample(range(1, len(text)), 20))
        await call.send_in_pieces(text, cuts)
        call.hang_up()

    async with worker(script) as w, renaming(w.port) as r:
        head, came = split(await fetch(r.port, post(b"{}", version=version)))
        assert came == edited
        assert header(head, b"x-warmroute-worker") == b"w"
        known = kind == "json" and framing == "length"
        assert (header(head, b"content-length") is not None) == known
        assert (header(head, b"transfer-encoding") is not None) == (version == b"1.1" and not known)
        (outcome,) = r.outcomes
        assert outcome.error is None


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n" + JSON + FRAMINGS["length"](BODY),
        b"HTTP/1.1 404 Not Found\r\n" + JSON + FRAMINGS["chunked"](BODY),
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n" + JSON + FRAMINGS["length"](BODY),
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n" + SSE + FRAMINGS["chunked"](EVENTS),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n" + FRAMINGS["chunked"](BODY),
        b"HTTP/1.1 200 OK\r\n" + FRAMINGS["length"](BODY),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + JSON + FRAMINGS["length"](b""),
        b"HTTP/1.1 200 OK\r\n" + JSON + FRAMINGS["chunked"](b""),
    ],
)
async def test_other_replies_pass_unchanged(reply: bytes) -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(reply)

    async with worker(script) as w:
        async with relay(w.port) as r:
            plain = split(await fetch(r.port, post(b"{}")))
        async with renaming(w.port) as n:
            edited = split(await fetch(n.port, post(b"{}")))
    assert edited[1] == plain[1]
    assert edited[0].split(b"\r\n")[0] == plain[0].split(b"\r\n")[0]


async def test_connections_are_kept_and_the_relay_thread_is_not_used() -> None:
    async def script(call: WorkerCall) -> None:
        framing = ("length", "chunked")[call.serial % 2]
        await call.send(b"HTTP/1.1 200 OK\r\n" + JSON + FRAMINGS[framing](BODY))

    async with worker(script) as w, renaming(w.port) as r:
        requests = post(b"{}", close=False) * 3 + post(b"{}")
        came = await fetch(r.port, requests)
        assert came.count(b"HTTP/1.1 200") == 4
        assert w.connections == 1
        assert {one.fallback_reason for one in r.outcomes} <= {"renamed", "off"}


async def test_a_long_answer_is_not_buffered_and_a_slow_client_slows_its_worker() -> None:
    row = b'{"embedding":[' + b"0.25," * 20_000 + b"1]},"
    rows, sent = 400, 0
    start = b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: %d\r\n\r\n"
    first, last = b'{"data":[', b'{}],"model":"served"}'

    async def script(call: WorkerCall) -> None:
        nonlocal sent
        await call.send(start % (len(first) + rows * len(row) + len(last)) + first)
        for _ in range(rows):
            await call.send(row)
            sent += 1
        await call.send(last)

    async with worker(script) as w, renaming(w.port, buffer_bytes=65_536) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=1 << 16)
        writer.write(post(b"{}"))
        await until(lambda: sent > 0, "it begins")
        await until(lambda: r.replies[0].congested, "the client does not read")
        assert sent < rows
        _, body = split(await reader.read(-1))
        assert body.endswith(b'"model":' + VALUE + b"}")
        assert len(body) == len(first) + rows * len(row) + len(last) - len(b'"served"') + len(VALUE)
        writer.close()


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_broken_answer_does_not_look_complete(framing: str) -> None:
    text = b"HTTP/1.1 200 OK\r\n" + JSON + FRAMINGS[framing](BODY)

    async def script(call: WorkerCall) -> None:
        await call.send(text[:-30])
        call.hang_up()

    async with worker(script) as w, renaming(w.port) as r:
        came = await fetch(r.port, post(b"{}"))
        assert not came.endswith(b"0\r\n\r\n")
        if framing == "length":  # nothing was written of what was to be edited as a whole
            assert came == b""
        await until(lambda: bool(r.outcomes), "its end")
        assert r.outcomes[0].error is not None
