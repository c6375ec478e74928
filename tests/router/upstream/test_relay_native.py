"""Tests of the relay's own thread: the guarantees that it alone gives, and when the Python
implementation is used instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time

import pytest

from router.http.messages import Answer, Request
from router.http.reply import RelayLimits, Timeouts
from router.upstream.client_reply import ClientReply, upstream_request
from router.upstream.native import NativeRelay, NativeUpstream
from tests.router import relay_support
from tests.router.relay_support import (
    EVENT,
    OK,
    STREAM,
    WorkerCall,
    fetch,
    kind,
    post,
    relay,
    send_ok,
    served,
    until,
    upstreams_to,
    worker,
)

pytestmark = pytest.mark.skipif(not NativeRelay.usable(), reason="the native relay was not built")


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_support, "PATH", "native")


def read_until(sock: socket.socket, end: bytes) -> bytes:
    """Return the bytes read from the socket up to and including `end`."""
    got = b""
    while not got.endswith(end):
        data = sock.recv(65_536)
        assert data, got
        got += data
    return got


class Dripping(threading.Thread):
    """A worker in a thread of its own that sends one event of its stream whenever the test allows
    it.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.go = threading.Semaphore(0)
        self.events = 5

    def run(self) -> None:
        sock, _ = self.listener.accept()
        with sock, self.listener:
            read_until(sock, b"\r\n\r\n{}")
            sock.sendall(STREAM + EVENT)
            for _ in range(self.events):
                self.go.acquire()
                sock.sendall(EVENT)
            self.go.acquire()
            sock.sendall(b"0\r\n\r\n")


async def test_events_flow_while_the_event_loop_is_busy() -> None:
    """Events reach the client while the event loop is busy: the loop is blocked until the client
    has read events that were sent after the blocking began.
    """
    held, seen = threading.Event(), threading.Event()
    engine = Dripping()
    engine.start()
    got = b""

    def client(port: int) -> None:
        nonlocal got
        with socket.create_connection(("127.0.0.1", port), relay_support.DEADLINE_S) as sock:
            sock.sendall(post())
            got += read_until(sock, EVENT)
            assert held.wait(relay_support.DEADLINE_S)
            for _ in range(engine.events):
                engine.go.release()
                got += read_until(sock, EVENT)
            seen.set()
            engine.go.release()
            while data := sock.recv(65_536):
                got += data

    async with relay(engine.port) as r:
        reading = threading.Thread(target=client, args=(r.port,))
        reading.start()
        await until(lambda: bool(r.first_bytes_s), "the stream runs")
        held.set()
        assert seen.wait(relay_support.DEADLINE_S), "nothing came while the loop was held"
        await until(lambda: bool(r.outcomes), "the stream ends")
        await asyncio.to_thread(reading.join)
        assert got.endswith(EVENT * 6 + b"0\r\n\r\n")
        assert (r.outcomes[0].events, r.outcomes[0].error) == (6, None)
        assert r.upstreams[0].idle_connections <= 1


async def test_the_relay_leaks_no_thread_and_no_file() -> None:
    async def script(call: WorkerCall) -> None:
        if call.body == b"{}":
            await call.send(OK)
        elif call.body == b"hang":
            await call.reader.read()
        else:
            await call.send(STREAM + EVENT)
            call.reset()

    async def once() -> None:
        async with worker(script) as w, relay(w.port) as r:
            await fetch(r.port, post())
            await fetch(r.port, post(b"break"))
            _, writer = await asyncio.open_connection("127.0.0.1", r.port)
            writer.write(post(b"hang"))
            await until(lambda: len(w.calls) == 3, "one is under way")
            writer.close()
        await until(lambda: not w.writers, "the worker's side ends")

    await once()
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await once()
    assert len(os.listdir("/proc/self/task")) == threads
    await until(lambda: len(os.listdir("/proc/self/fd")) <= files, "all files are closed")


async def test_stopping_the_thread_ends_running_requests() -> None:
    async def silent(call: WorkerCall) -> None:
        await call.reader.read()

    async with worker(silent) as w:
        thread = NativeRelay()
        upstream = NativeUpstream(thread, "127.0.0.1", w.port, time.monotonic)
        async with relay() as r:
            r.upstreams.append(upstream)
            asking = asyncio.create_task(fetch(r.port, post()))
            await until(lambda: len(w.calls) == 1, "the request is under way")
            thread.stop()
            thread.stop()
            await asking
            assert r.outcomes[0].error is not None
            assert not r.outcomes[0].retryable
            r.upstreams.clear()
        await until(lambda: w.gone == 1, "the worker's connection is closed")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_http_1_0_is_served_by_python(version: bytes) -> None:
    async with worker(send_ok) as w, relay(w.port) as r:
        (upstream,) = r.upstreams
        assert isinstance(upstream, NativeUpstream)
        assert (await fetch(r.port, post(version=version))).endswith(b"ok")
        assert upstream.thread_connections == (version == b"1.1")


async def test_a_host_name_is_resolved_and_all_its_addresses_are_tried() -> None:
    async with worker(send_ok) as w, relay() as r:
        thread = NativeRelay()
        # Usually ::1 and 127.0.0.1, and the worker listens at the latter only.
        named = NativeUpstream(thread, "localhost", w.port, time.monotonic)
        unknown = NativeUpstream(thread, "no.such.host.invalid", w.port, time.monotonic)
        r.upstreams[:] = [unknown, named]
        assert (await fetch(r.port, post())).endswith(b"ok")
        assert kind(r.outcomes[0].error) == "connect"
        assert named.thread_connections == 1
        for upstream in (named, unknown):
            await upstream.aclose()
        thread.stop()


async def test_silent_exchanges_are_given_up_and_others_continue() -> None:
    go = asyncio.Event()

    async def script(call: WorkerCall) -> None:
        if call.body == b"stream":
            await call.send(STREAM + EVENT)
            await go.wait()
            await call.send(b"0\r\n\r\n")
        else:
            await call.reader.read()

    async with worker(script) as w, relay(w.port) as r:
        stream = asyncio.create_task(fetch(r.port, post(b"stream")))
        await until(lambda: bool(r.first_bytes_s), "one stream runs")
        silent = asyncio.create_task(fetch(r.port, post()))
        await until(lambda: len(w.calls) == 2, "another request waits")
        r.upstreams[0].abandon_silent()
        assert b" 502 " in await silent
        assert kind(r.outcomes[0].error) == "early_close"
        go.set()
        assert (await stream).endswith(EVENT + b"0\r\n\r\n")


async def test_pending_bytes_are_sent_after_the_end_of_the_reply() -> None:
    """The rest of a reply that a client has not taken is sent after the reply's end: the worker is
    free at once, and the rest waits in the event loop's transport, not in the relay's thread.
    """
    body = bytes(range(256)) * (1 << 15)

    async def script(call: WorkerCall) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with worker(script) as w, relay(w.port, buffer_bytes=1 << 26) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post(close=False))
        await until(lambda: bool(r.outcomes), "the worker is through")
        assert r.upstreams[0].idle_connections == 1
        assert r.outcomes[0].error is None
        writer.write(post())
        got = await reader.read(-1)
        writer.close()
        assert got.count(body) == 2


async def test_bytes_on_an_idle_connection_are_never_taken_for_a_reply() -> None:
    """Bytes that already lie on an idle connection are never taken for the next request's reply."""
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"

    async def script(call: WorkerCall) -> None:
        await call.send(OK)
        await call.send(evil)

    async with worker(script) as w, relay(w.port, limits=RelayLimits()) as r:
        for _ in range(20):
            assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")


async def test_no_bytes_are_written_after_a_cancelled_send() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(STREAM)
        while True:
            await call.send(EVENT)
            await asyncio.sleep(0)

    read = asyncio.Event()
    written: list[int] = []

    async def handle(request: Request) -> Answer:
        reply = ClientReply(request)
        sent = upstream_request(request, request.body)
        sending = asyncio.create_task(upstream.send(sent, reply, Timeouts()))
        await read.wait()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        written.append(reply.body_length)
        await until(lambda: w.gone == 1, "the worker's connection is closed")
        transport = reply.client_transport
        assert transport is not None
        transport.write_eof()
        return reply

    async with worker(script) as w, served(handle) as port, upstreams_to(w.port) as (upstream,):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post())
        got = await reader.readuntil(EVENT)
        read.set()
        got += await reader.read()
        writer.close()
        assert written == [len(got)]


async def test_a_fallback_to_python_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(send_ok) as w, relay(w.port) as r:
        await fetch(r.port, post())
        await fetch(r.port, post(version=b"1.0"))
        await until(lambda: len(r.outcomes) == 2, "both are answered")
        assert [outcome.fallback_reason for outcome in r.outcomes] == ["", "http_1_0"]
    monkeypatch.setattr(relay_support, "PATH", "python")
    async with worker(send_ok) as w, relay(w.port) as r:
        await fetch(r.port, post())
        await until(lambda: bool(r.outcomes), "it is answered")
        assert [outcome.fallback_reason for outcome in r.outcomes] == ["off"]
