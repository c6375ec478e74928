"""Tests of the relay thread's reader of replies: it equals the Python relay byte by byte."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvkernels
from router.http.errors import WorkerError
from router.http.messages import Request
from router.http.reply import RelayLimits, Terms, Timeouts, Usage
from router.upstream.client_reply import ClientReply
from router.upstream.fallback import Exchange, WorkerConnection
from router.upstream.meter import usage_in
from router.upstream.native import NativeRelay, pool_of
from tests.router.property_support import Wire, cut, patient

pytestmark = pytest.mark.skipif(not NativeRelay.usable(), reason="the native relay was not built")

LIMITS = RelayLimits(header_bytes=200, chunk_line_bytes=40, held_bytes=100, tail_bytes=80)
OURS = ((b"X-Ours", b"1"),)

STATUS = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK", b"HTTP/1.0 200 Fine \xe9", b"HTTP/1.1 204 No", b"HTTP/1.1 304 Same"),
        *(
            b"HTTP/1.1 404",
            b"HTTP/1.1 400 Bad",
            b"HTTP/1.1 500 Oh",
            b"HTTP/1.1 503 Busy",
            b"HTTP/1.1 429 Busy",
            b"HTTP/1.1 529 Busy",
            b"HTTP/1.1 501 ",
            b"HTTP/2 200",
        ),
        *(b"HTTP/1.1 101 Up", b"HTTP/1.1 099 x", b"HTTP/1.1 200 a\x01", b"HTTP/1.1  200 OK", b""),
    ]
)
FIELD = st.sampled_from(
    [
        *(b"Content-Length: 5", b"content-length:\t5 ", b"Content-Length: 6", b"Content-Length: x"),
        *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: CHUNKED", b"Transfer-Encoding: gzip"),
        *(b"Connection: close", b"Connection: keep-alive, X-Hop", b"connection:,", b"X-Hop: 1"),
        *(b"Content-Type: text/event-stream", b"Content-Type: TEXT/event-stream; x"),
        *(
            b"Retry-After: 1",
            b"X-A: \xe9",
            b"X B: 1",
            b"X-Nul: \x00",
            b": x",
            b"no colon",
            b"A:b\rc",
        ),
        *(b"X-WarmRoute-Worker: 9", b"x-warmroute-: 1", b"x-warmroute: 1"),
        *(b"Keep-Alive: 5", b"Trailer: X-T", b"TE: x", b"Proxy-Connection: x", b"Content-Length: "),
    ]
)
PIECE = st.sampled_from(
    [
        *(b"data: 1\n\n", b"\ndata:", b"data: [DONE]\n\n", b"hello", b"0\r\n\r\n", b"\n", b"\nda"),
        *(
            b'{"usage": {"prompt_tokens": 5}}',
            b'"usage":null',
            b'"usage" :\t{"completion_tokens":2}',
        ),
        b"x" * 90,
        *(
            b'data: {"choices":[{"text":"x"}]}\n\n',
            b'data: {"choices":[{"delta":{"role":""}}]}\n\n',
        ),
        *(b'data: {"error":"x"}\n\n', b": ping\n\n", b'{"choices":[{"text":"x"}]}', b"<html>"),
        *(b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', b'{"error":{"code":400}}'),
    ]
)
CHUNK = st.tuples(
    PIECE, st.sampled_from([b"", b"", b"", b";a=b", b' ; q="0"', b" ", b";\x00", b"g", b";" * 50])
)
BENDS = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=2)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """Draw replies that are valid, nearly valid, or wrong."""
    head = b"".join(line + b"\r\n" for line in [draw(STATUS), *draw(st.lists(FIELD, max_size=4))])
    hints = draw(st.sampled_from([b"", b"", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"]))
    if draw(st.booleans()):
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        )
    if b"hunked" in head:
        chunks = draw(st.lists(CHUNK, max_size=5))
        body = b"".join(b"%X%s\r\n%s\r\n" % (len(data), ext, data) for data, ext in chunks)
        body += (
            b"0\r\n" + draw(st.sampled_from([b"", b"X-T: 1\r\n", b"T\r\n", b"A: b\n"])) + b"\r\n"
        )
    else:
        body = b"".join(draw(st.lists(PIECE, max_size=4)))
    reply = hints + head + b"\r\n" + body + draw(st.sampled_from([b"", b"", b"surplus"]))
    for place, bend in draw(BENDS):
        at = place % (len(reply) + 1)
        reply = reply[:at] + bend + reply[at + len(bend) :]
    return reply


@dataclass
class RelayResult:
    """The bytes that a client received, and the outcome that was reported."""

    client: bytes
    fault: str
    status: int | None
    body_bytes: int
    events: int
    usage: Usage | None
    held: bytes | None
    reusable: bool
    refused: bool
    flaw: bool


class Client:
    """A client's transport that keeps the bytes written to it, for comparison."""

    def __init__(self) -> None:
        self.got = b""

    def set_write_buffer_limits(self, high: int) -> None: ...
    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None: ...
    def abort(self) -> None: ...
    def write(self, data: bytes) -> None:
        self.got += data


async def by_python(
    pieces: list[bytes], method: str, keep_alive: bool, due: kvkernels.AnswerDue | None = None
) -> RelayResult:
    """Return what the Python relay sends and reports for these pieces."""
    client = Client()
    request = SimpleNamespace(
        http_1_0=False,
        keep_alive=keep_alive,
        written_bytes=0,
        connection=SimpleNamespace(transport=client, writing_paused=False),
    )
    sink = ClientReply(cast(Request, request), extra_headers=OURS)
    terms = Terms(LIMITS, Timeouts(), time.monotonic, due=due)
    wire = Wire(pieces, beyond_the_end=False)
    exchange = Exchange(cast(WorkerConnection, wire), method, sink, terms)
    outcome = await exchange.run(b"", b"")
    assert outcome.error is None or isinstance(outcome.error, WorkerError)
    return RelayResult(
        client.got,
        outcome.error.kind if outcome.error is not None else "",
        outcome.status,
        outcome.bytes_to_client,
        outcome.events,
        outcome.usage,
        outcome.held.body if outcome.held is not None else None,
        exchange.reusable,
        outcome.refused,
        outcome.final,
    )


def by_thread(
    pieces: list[bytes], method: str, keep_alive: bool, due: kvkernels.AnswerDue | None = None
) -> RelayResult:
    """Return what the native relay thread sends and reports for these pieces."""
    reply = kvkernels.RelayReply(
        pool_of(LIMITS), method == "HEAD", b"X-Ours: 1\r\n", keep_alive, due
    )
    client, fault, body_bytes = b"", "", 0
    for piece in pieces:
        forward, fault = reply.feed(piece)
        if forward and not client:
            client = reply.head
        client += forward
        body_bytes += len(forward)
        if fault or reply.done:
            break
    if not fault and not reply.done:
        if reply.status and reply.closes:
            forward = reply.close()
            if forward and not client:
                client = reply.head
            client += forward
            body_bytes += len(forward)
        else:
            fault = "early_close"
    held = reply.held_body if reply.held and not fault else None
    reusable = not fault and reply.reusable
    fault = reply.held_fault or fault
    if not fault and not client and held is None:
        client = reply.head
    seen = not reply.held_fault and not reply.withholds
    flaw = reply.status != 0 and not fault and bool(reply.flaw)
    return RelayResult(
        client,
        "no_answer" if flaw else fault,
        reply.status or None,
        body_bytes,
        reply.events if seen else 0,
        usage_in(reply.usage) if seen else None,
        held,
        reusable,
        reply.refuses,
        flaw,
    )


@patient
@given(
    replies(),
    CUTS,
    st.sampled_from(["POST", "POST", "HEAD"]),
    st.booleans(),
    st.sampled_from([None, True, False]),
)
def test_both_relays_write_the_same_bytes_and_report_the_same_outcome(
    reply: bytes,
    cuts: list[int],
    method: str,
    keep_alive: bool,
    tokens: bool | None,
) -> None:
    due = None if tokens is None else kvkernels.AnswerDue("completions", tokens)
    pieces = [piece for piece in cut(reply, cuts) if piece]
    expected = asyncio.run(by_python(pieces, method, keep_alive, due))
    assert by_thread(pieces, method, keep_alive, due) == expected


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\nhello",
        b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_the_compared_results_are_not_empty(reply: bytes) -> None:
    """The compared results of both relays are not empty, so the comparison means something."""
    story = await by_python([reply], "POST", True)
    assert story == by_thread([reply], "POST", True)
    assert story.client or story.held
