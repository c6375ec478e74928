"""Workers that fail: the client never sees a clean end that is none, and blame is exact."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

import pytest
from aiohttp import web

from router.http.client_reply import SERVER_OPTIONS, ClientReply, upstream_request
from router.http.errors import ClientError, WorkerError
from router.http.relay.reply import RelayLimits, Timeouts, UpstreamRequest
from router.http.relay.upstream import Upstream
from tests.router.relay_support import (
    DEADLINE_S,
    WorkerCall,
    ask,
    chunked,
    post,
    read_reply,
    relay,
    until,
    worker,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: 1\n\n\r\n"


def kind(error: Exception | None) -> str:
    assert isinstance(error, WorkerError), error
    return error.kind


async def good(call: WorkerCall) -> None:
    await call.say(OK)


def unused_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"", "early_close"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "early_close"),
        (STREAM, "early_close"),  # head at once, then death during the prefill
        (b"SSH-2.0-OpenSSH_9\r\n", "garbage"),
        (b"\x16\x03\x01", "garbage"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "garbage"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, "garbage"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "garbage"),
        (STREAM + b"zz\r\n", "garbage"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nboo", "status_5xx"),
        (
            b"HTTP/1.1 503 Oh\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nboo\r\n0\r\n\r\n",
            "status_5xx",
        ),
        (b"HTTP/1.1 502 Oh\r\nContent-Length: 300\r\n\r\nboo", "status_5xx"),
        (b"HTTP/1.1 504 Oh\r\n\r\nuntil the end", "status_5xx"),
    ],
)
async def test_before_the_first_byte_another_worker_takes_over(reply: bytes, expected: str) -> None:
    async def bad(call: WorkerCall) -> None:
        await call.say(reply)
        call.hang_up()

    async with worker(bad) as b, worker(good) as g, relay(b.port, g.port) as r:
        assert (await ask(r.port, post())).endswith(b"\r\n\r\nok")
        first, second = r.outcomes
        assert kind(first.error) == expected
        assert first.retryable
        assert (first.bytes_to_client, second.error) == (0, None)
        assert (len(b.calls), len(g.calls)) == (1, 1)


async def test_a_worker_that_cannot_be_reached() -> None:
    async with worker(good) as g, relay(unused_port(), g.port) as r:
        assert (await ask(r.port, post())).endswith(b"\r\n\r\nok")
        assert kind(r.outcomes[0].error) == "connect"
        assert r.outcomes[0].status is None


async def test_a_connect_that_hangs_is_given_up() -> None:
    # A listener whose backlog is full lets further connections hang.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            async with relay(port, timeouts=Timeouts(connect_s=0.05)) as r:
                assert b" 502 " in await ask(r.port, post())
                assert kind(r.outcomes[0].error) == "connect"
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("head", [OK[:-2], STREAM + EVENT, b"HTTP/1.1 200 OK\r\n\r\nabc"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_reply_that_breaks_off_never_ends_cleanly(head: bytes, version: bytes) -> None:
    started = asyncio.Event()

    async def script(call: WorkerCall) -> None:
        await call.say(head + (b"" if STREAM in head or b"\r\n\r\nabc" in head else b"o"))
        await started.wait()
        call.reset()

    async with worker(script) as w, relay(w.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(post(version=version))
        got = await reader.read(1)
        started.set()
        try:
            async with asyncio.timeout(DEADLINE_S):
                got += await reader.read()
            clean = True
        except ConnectionResetError:
            clean = False
        writer.close()
        assert kind(r.outcomes[0].error) == "early_close"
        assert not r.outcomes[0].retryable
        if b"Content-Length" in got:
            assert got.endswith(b"\r\n\r\no")  # one byte of two
        elif b"Transfer-Encoding" in got:
            assert got.endswith(EVENT)  # no last chunk
        else:
            assert not clean  # its end is the connection's end: only a reset tells


async def test_garbage_in_mid_stream_ends_the_client() -> None:
    async def script(call: WorkerCall) -> None:
        await call.say(STREAM + EVENT)
        await until(lambda: bool(r.first_bytes_s), "the client has its first byte")
        await call.say(b"not hex\r\n")

    async with worker(script) as w, relay(w.port) as r:
        got = await ask(r.port, post())
        assert got.endswith(EVENT)
        assert kind(r.outcomes[0].error) == "garbage"
        assert r.outcomes[0].events == 1
        await until(lambda: w.gone == 1, "the worker's connection is closed")


async def test_a_silent_worker_is_left_after_the_time_allowed() -> None:
    async def script(call: WorkerCall) -> None:
        await call.reader.read()

    times = Timeouts(first_byte_s=0.05)
    async with worker(script) as w, worker(good) as g, relay(w.port, g.port, timeouts=times) as r:
        assert (await ask(r.port, post())).endswith(b"\r\n\r\nok")
        assert kind(r.outcomes[0].error) == "timeout_first_byte"
        await until(lambda: w.gone == 1, "the worker's connection is closed")


async def test_a_stream_that_stalls_is_broken_off() -> None:
    async def script(call: WorkerCall) -> None:
        await call.say(STREAM + EVENT)
        await call.reader.read()

    async with worker(script) as w, relay(w.port, timeouts=Timeouts(between_s=0.05)) as r:
        assert (await ask(r.port, post())).endswith(EVENT)
        assert kind(r.outcomes[0].error) == "timeout_between"
        assert not r.outcomes[0].retryable


async def test_the_last_workers_own_words_reach_the_client() -> None:
    async def script(call: WorkerCall) -> None:
        reply = b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        await call.say(reply + chunked(b"over", b"loaded"))

    async with worker(script) as w, relay(w.port) as r:
        got = await ask(r.port, post())
        assert got.startswith(b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Length: 10\r\n")
        assert got.endswith(b"\r\n\r\noverloaded")
        assert r.upstreams[0].idle_connections == 1


@pytest.mark.parametrize("body", [b"Content-Length: 90000\r\n\r\n" + b"x" * 90_000, b"\r\nslow"])
async def test_an_error_reply_too_long_or_too_slow_is_not_kept(body: bytes) -> None:
    async def script(call: WorkerCall) -> None:
        await call.say(b"HTTP/1.1 500 Oh\r\n" + body)
        await call.reader.read()

    limits = RelayLimits(held_bytes=1000, held_s=0.05)
    async with worker(script) as w, relay(w.port, limits=limits) as r:
        assert b" 502 " in await ask(r.port, post())
        assert kind(r.outcomes[0].error) == "status_5xx"
        assert r.outcomes[0].held is None
        await until(lambda: w.gone == 1, "the worker's connection is closed")


@pytest.mark.parametrize("how", ["hang_up", "reset"])
async def test_a_connection_that_went_stale_is_replaced_silently(how: str) -> None:
    async def script(call: WorkerCall) -> None:
        if call.serial == 0:
            await call.say(OK)
        else:
            getattr(call, how)()  # closed just when the next request came

    async with worker(script) as w, relay(w.port) as r:
        for _ in range(3):
            assert (await ask(r.port, post())).endswith(b"\r\n\r\nok")
        assert [outcome.error for outcome in r.outcomes] == [None] * 3
        assert (w.connections, len(w.calls)) == (3, 5)


async def test_all_connections_in_use_is_said_and_harms_nobody() -> None:
    go = asyncio.Event()

    async def slow(call: WorkerCall) -> None:
        await go.wait()
        await call.say(OK)

    async with worker(slow) as w, relay(w.port, limits=RelayLimits(max_connections=2)) as r:
        tasks = [asyncio.create_task(ask(r.port, post())) for _ in range(2)]
        await until(lambda: len(w.calls) == 2, "two requests are under way")
        assert b" 502 " in await ask(r.port, post())
        assert kind(r.outcomes[0].error) == "busy"
        go.set()
        assert all(got.endswith(b"ok") for got in await asyncio.gather(*tasks))


async def test_an_old_idle_connection_is_not_used() -> None:
    async with worker(good) as w, relay(w.port, limits=RelayLimits(idle_s=1e-6)) as r:
        for _ in range(2):
            await ask(r.port, post())
        await until(lambda: w.connections == 2 and w.gone >= 1, "a fresh one was made")


async def test_closing_an_upstream_ends_what_is_under_way() -> None:
    async def silent(call: WorkerCall) -> None:
        await call.reader.read()

    async with worker(silent) as w, relay(w.port) as r:
        task = asyncio.create_task(ask(r.port, post()))
        await until(lambda: len(w.calls) == 1, "the request is under way")
        await r.upstreams[0].aclose()
        assert b" 502 " in await task
        assert b" 502 " in await ask(r.port, post())
        assert [kind(outcome.error) for outcome in r.outcomes] == ["early_close", "connect"]


async def test_an_early_refusal_of_a_large_body() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")  # the body stays unread
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await until(lambda: bool(r.outcomes), "the relay has its answer")
        writer.transport.abort()

    server = await asyncio.start_server(script, "127.0.0.1", 0, limit=1024)
    async with server, relay(server.sockets[0].getsockname()[1]) as r:
        got = await ask(r.port, post(b"x" * (1 << 25)))
        assert got.startswith(b"HTTP/1.1 413 Too Large\r\n")
        assert r.upstreams[0].idle_connections == 0, "half a request was sent on it"


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * (1 << 15)

    async with worker(good) as w, relay(w.port) as r:
        assert (await ask(r.port, post(body))).endswith(b"\r\n\r\nok")
        assert w.calls[0].body == body


async def test_our_own_faults_are_loud_and_not_the_workers() -> None:
    def broken(now_s: float) -> None:
        raise ZeroDivisionError("a bug of ours")

    async def script(call: WorkerCall) -> None:
        await call.say(STREAM + EVENT)
        await call.reader.read()

    caught: list[Exception] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = ClientReply(request)
        sent = upstream_request(request, await request.read())
        try:
            await upstream.send(sent, reply, Timeouts(), broken)
        except ZeroDivisionError as error:
            caught.append(error)
            raise
        return reply

    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    async with worker(script) as w:
        upstream = Upstream("127.0.0.1", w.port, time.monotonic)
        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, **SERVER_OPTIONS)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        got = await ask(runner.addresses[0][1], post())
        assert got.endswith(EVENT), "no second reply was written into the first"
        assert (len(caught), len(reported)) == (1, 1)
        assert upstream.open_connections == 0
        await runner.cleanup()
        await upstream.aclose()


async def test_tls_to_the_worker() -> None:
    def context(side: int) -> ssl.SSLContext:
        # Anonymous keys: the way of the bytes is tested here, not the trust in certificates.
        it = ssl.SSLContext(side)
        it.check_hostname = False
        it.verify_mode = ssl.CERT_NONE
        it.maximum_version = ssl.TLSVersion.TLSv1_2
        it.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
        return it

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(STREAM + EVENT * 1000 + b"0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context(ssl.PROTOCOL_TLS_SERVER))
    port = server.sockets[0].getsockname()[1]
    async with server, relay(port) as r:
        r.upstreams[0] = Upstream(
            "127.0.0.1", port, time.monotonic, tls=context(ssl.PROTOCOL_TLS_CLIENT)
        )
        assert (await ask(r.port, post())).endswith(EVENT * 1000 + b"0\r\n\r\n")
        await r.upstreams[0].aclose()


async def test_a_worker_that_speaks_no_tls_is_a_connect_error() -> None:
    async with worker(good) as w, relay() as r:
        context = ssl.create_default_context()
        r.upstreams.append(Upstream("127.0.0.1", w.port, time.monotonic, tls=context))
        w_task = asyncio.create_task(ask(r.port, post()))
        await until(lambda: w.connections == 1, "the worker is reached")
        for writer in tuple(w.writers):
            writer.transport.abort()
        assert b" 502 " in await w_task
        assert kind(r.outcomes[0].error) == "connect"


async def test_a_request_that_cannot_be_written_is_the_clients_fault() -> None:
    upstream = Upstream("127.0.0.1", 1, time.monotonic)
    with pytest.raises(ClientError):
        await upstream.send(UpstreamRequest("GET", "/a b"), _NoSink(), Timeouts())


class _NoSink(ClientReply):
    """A sink that must not be asked anything."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "arguments", [{"port": 0}, {"port": 65_536}, {"base_path": "x"}, {"base_path": "/x/"}]
)
def test_upstream_checks_its_arguments(arguments: dict[str, object]) -> None:
    defaults: dict[str, object] = {"host": "h", "port": 80, "clock": time.monotonic}
    with pytest.raises(ValueError, match=r"port|base_path"):
        Upstream(**(defaults | arguments))  # type: ignore[arg-type]


async def test_keep_alive_client_after_a_hidden_failure() -> None:
    async def bad(call: WorkerCall) -> None:
        call.hang_up()

    async with worker(bad) as b, worker(good) as g, relay(b.port, g.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        for _ in range(3):
            writer.write(post(close=False))
            assert (await read_reply(reader))[1] == b"ok"
        writer.close()
