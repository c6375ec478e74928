"""Tests of clients that read slowly or not at all, and of workers that must wait for them."""

from __future__ import annotations

import asyncio

import pytest

from router.http.errors import ClientError
from router.http.reply import RelayLimits, ReplyHead, Timeouts, UpstreamRequest
from tests.router.relay_support import (
    DEADLINE_S,
    STREAM,
    Worker,
    WorkerCall,
    post,
    relay,
    send_ok,
    until,
    worker,
)

pytestmark = pytest.mark.usefixtures("every_path")


async def held_up(w: Worker) -> None:
    """Wait until the relay stops reading from the worker, so that the worker's write
    buffer fills.
    """

    def is_held_up() -> bool:
        return any(c.writer.transport.get_write_buffer_size() > 65_536 for c in w.calls)

    await until(is_held_up, "the worker is held up")


async def test_a_slow_client_pauses_the_worker() -> None:
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    total = 600
    sent = 0

    async def script(call: WorkerCall) -> None:
        nonlocal sent
        await call.send(STREAM)
        for _ in range(total):
            await call.send(chunk)
            sent += 1
        await call.send(b"0\r\n\r\n")

    async with worker(script) as w, relay(w.port, buffer_bytes=65_536) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post())
        await held_up(w)
        client = r.replies[0].client_transport
        assert client is not None
        assert client.get_write_buffer_size() < 1_000_000
        assert sent < total
        assert not r.outcomes
        async with asyncio.timeout(DEADLINE_S):
            got = 0
            while data := await reader.read(1 << 20):
                got += len(data)
                assert client.get_write_buffer_size() < 1_000_000
        writer.close()
        assert got > total * 65_536
        assert r.outcomes[0].error is None
        assert r.outcomes[0].bytes_to_client == total * len(chunk) + 5


async def test_a_reply_that_ends_at_a_full_buffer_keeps_its_connection() -> None:
    class Congested:
        """A sink whose client reads too slowly."""

        dechunk = False
        movable = False
        congested = True
        finished = 0

        def head(self, head: ReplyHead) -> None: ...
        def data(self, data: bytes) -> None: ...
        async def drain(self) -> None: ...
        def abort(self) -> None: ...

        def finish(self) -> None:
            self.finished += 1

    sink = Congested()
    async with worker(send_ok) as w, relay(w.port) as r:
        (upstream,) = r.upstreams
        for _ in range(3):
            request = UpstreamRequest("POST", "/", body=b"abc")
            assert (await upstream.send(request, sink, Timeouts())).error is None
        assert (sink.finished, w.connections, upstream.idle_connections) == (3, 1, 1)
        w.calls[0].hang_up()
        await until(lambda: upstream.open_connections == 0, "the idle connection is being read")


async def test_a_client_that_stops_reading_is_disconnected() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(STREAM)
        while True:
            await call.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    async with worker(script) as w, relay(w.port, timeouts=Timeouts(client_s=0.1)) as r:
        _, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post())
        await until(lambda: bool(r.outcomes), "the relay gives up")
        error = r.outcomes[0].error
        assert isinstance(error, ClientError)
        assert error.code == "slow_client"
        assert not r.outcomes[0].retryable
        await until(lambda: w.gone == 1, "the worker's connection is closed")
        writer.close()


async def test_the_wait_for_a_slow_client_is_not_charged_to_the_worker() -> None:
    async def script(call: WorkerCall) -> None:
        await call.send(STREAM)
        for _ in range(400):
            await call.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
        await call.send(b"0\r\n\r\n")

    times = Timeouts(between_s=0.1)
    async with worker(script) as w, relay(w.port, timeouts=times) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post())
        await held_up(w)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 3 * times.between_s
        await until(lambda: loop.time() > end_s, "the worker's time passes several times over")
        assert not r.outcomes
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(1 << 20):
                pass
        writer.close()
        assert r.outcomes[0].error is None


async def test_a_worker_that_reads_and_writes_by_turns_does_not_block() -> None:
    """A worker that reads the request and writes the reply by turns does not block: neither
    direction waits for the other.
    """
    body = b"x" * (1 << 24)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM)
        for _ in range(len(body) >> 16):
            writer.write(b"10000\r\n" + await reader.readexactly(65_536) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    limits = RelayLimits(write_bytes=65_536)
    async with server, relay(server.sockets[0].getsockname()[1], limits=limits) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port, limit=4096)
        writer.write(post(body))
        got = 0
        async with asyncio.timeout(DEADLINE_S):
            while data := await reader.read(1 << 16):
                got += len(data)
        writer.close()
        assert got > len(body)
        assert r.outcomes[0].error is None
