"""Property tests of the relay's exchange alone: whatever bytes a worker sends, the calls to the
client's side stay in order.
"""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from router.http.errors import WorkerError
from router.http.reply import Outcome, RelayLimits, ReplyHead, ReplySink, Terms, Timeouts
from router.upstream.fallback import Exchange, WorkerConnection
from tests.router.property_support import Wire, cut, patient

REPLIES = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
        b"",
    ]
)
BENDS = st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), max_size=3)


class Record:
    """A sink that records the order of the calls to it."""

    dechunk = False
    movable = False
    congested = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.body = b""

    def head(self, head: ReplyHead) -> None:
        self.calls.append("head")

    def data(self, data: bytes) -> None:
        assert data
        self.body += data
        if self.calls[-1] != "data":
            self.calls.append("data")

    async def drain(self) -> None: ...

    def finish(self) -> None:
        self.calls.append("finish")

    def abort(self) -> None:
        self.calls.append("abort")


async def relayed(pieces: list[bytes]) -> tuple[Outcome, Record]:
    """Return the outcome and the sink of a reply that comes in `pieces` and then ends."""
    sink = Record()
    terms = Terms(RelayLimits(), Timeouts(), time.monotonic)
    exchange = Exchange(cast(WorkerConnection, Wire(pieces)), "POST", sink, terms)
    return await exchange.run(b"", b""), sink


@patient
@given(REPLIES, BENDS, st.lists(st.integers(0, 1000), max_size=6))
async def test_any_reply_gives_calls_in_a_valid_order(
    reply: bytes, bends: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    for place, bend in bends:
        at = place % (len(reply) + 1)
        reply = reply[:at] + bend + reply[at + len(bend) :]
    outcome, sink = await relayed(cut(reply, cuts))
    assert sink.calls in (
        [],
        ["head", "finish"],
        ["head", "data", "finish"],
        ["head", "data", "abort"],
    )
    assert len(sink.body) == outcome.bytes_to_client
    if outcome.error is None:
        if outcome.held is not None:  # a refusal that another worker may contradict
            assert sink.calls == []
            outcome.held.deliver(cast(ReplySink, sink))
        assert sink.calls[-1] == "finish"
    else:
        assert isinstance(outcome.error, WorkerError)
        assert outcome.retryable == (sink.calls == [])
    # However the bytes are cut the verdict is the same; what the client saw before it may differ.
    whole, _ = await relayed([reply])
    assert getattr(outcome.error, "kind", None) == getattr(whole.error, "kind", None)
    assert outcome.status == whole.status


async def test_a_finished_exchange_needs_no_garbage_collector() -> None:
    """A finished exchange is freed without the garbage collector; cycles of references would cause
    a collection every few hundred requests.
    """
    wire = Wire([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", b"lo you"])
    terms = Terms(RelayLimits(), Timeouts(), time.monotonic)
    exchange = Exchange(cast(WorkerConnection, wire), "POST", Record(), terms)
    assert (await exchange.run(b"", b"")).error is None
    gone = weakref.ref(exchange)
    gc.disable()
    try:
        del exchange
        assert gone() is None
    finally:
        gc.enable()


async def test_a_connection_lost_before_its_exchange_is_an_early_close() -> None:
    connection = WorkerConnection(lambda _: None, time.monotonic)
    connection.connection_made(_Closed())
    connection.connection_lost(None)
    terms = Terms(RelayLimits(), Timeouts(), time.monotonic)
    outcome = await Exchange(connection, "POST", Record(), terms).run(b"GET", b"")
    assert isinstance(outcome.error, WorkerError)
    assert outcome.error.kind == "early_close"


class _Closed(asyncio.Transport):
    """A transport whose peer has closed the connection."""

    def is_closing(self) -> bool:
        return True
