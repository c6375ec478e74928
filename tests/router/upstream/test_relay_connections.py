"""Tests of the connections to a worker: they are kept, bounded, replaced when stale, and may use
TLS.
"""

from __future__ import annotations

import asyncio
import ssl
import time

import pytest

from router.http.errors import ClientError
from router.http.reply import RelayLimits, Timeouts, UpstreamRequest
from router.upstream.client_reply import ClientReply
from router.upstream.fallback import Upstream
from tests.router.relay_support import (
    EVENT,
    OK,
    STREAM,
    WorkerCall,
    fetch,
    kind,
    post,
    read_reply,
    relay,
    send_ok,
    until,
    worker,
)

pytestmark = pytest.mark.usefixtures("both_paths")


@pytest.mark.parametrize("how", ["hang_up", "reset"])
async def test_a_stale_connection_is_replaced_silently(how: str) -> None:
    async def script(call: WorkerCall) -> None:
        if call.serial == 0:
            await call.send(OK)
        else:
            getattr(call, how)()  # closed just when the next request came

    async with worker(script) as w, relay(w.port) as r:
        for _ in range(3):
            assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")
        assert [outcome.error for outcome in r.outcomes] == [None] * 3
        assert (w.connections, len(w.calls)) == (3, 5)


@pytest.mark.parametrize("how", ["hang_up", "reset"])
async def test_a_request_to_be_sent_once_is_not_repeated_on_another_connection(how: str) -> None:
    async def script(call: WorkerCall) -> None:
        if call.serial == 0:
            await call.send(OK)
        else:
            getattr(call, how)()

    async with worker(script) as w, relay(w.port) as r:
        r.once = True
        assert (await fetch(r.port, post())).endswith(b"\r\n\r\nok")
        assert b" 502 " in await fetch(r.port, post())
        assert [(kind(o.error), o.stale) for o in r.outcomes[1:]] == [("early_close", True)]
        assert (w.connections, len(w.calls)) == (1, 2)


async def test_a_request_above_the_connection_limit_fails_and_others_continue() -> None:
    go = asyncio.Event()

    async def slow(call: WorkerCall) -> None:
        await go.wait()
        await call.send(OK)

    async with worker(slow) as w, relay(w.port, limits=RelayLimits(max_connections=2)) as r:
        tasks = [asyncio.create_task(fetch(r.port, post())) for _ in range(2)]
        await until(lambda: len(w.calls) == 2, "two requests are under way")
        assert b" 502 " in await fetch(r.port, post())
        assert kind(r.outcomes[0].error) == "busy"
        go.set()
        assert all(got.endswith(b"ok") for got in await asyncio.gather(*tasks))


async def test_an_old_idle_connection_is_not_used() -> None:
    async with worker(send_ok) as w, relay(w.port, limits=RelayLimits(idle_s=1e-6)) as r:
        for _ in range(2):
            await fetch(r.port, post())
        await until(lambda: w.connections == 2 and w.gone >= 1, "a fresh one was made")


async def test_closing_an_upstream_ends_running_requests() -> None:
    async def silent(call: WorkerCall) -> None:
        await call.reader.read()

    async with worker(silent) as w, relay(w.port) as r:
        task = asyncio.create_task(fetch(r.port, post()))
        await until(lambda: len(w.calls) == 1, "the request is under way")
        await r.upstreams[0].aclose()
        assert b" 502 " in await task
        assert b" 502 " in await fetch(r.port, post())
        assert [kind(outcome.error) for outcome in r.outcomes] == ["early_close", "connect"]


async def test_requests_to_a_worker_may_use_tls() -> None:
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
        assert (await fetch(r.port, post())).endswith(EVENT * 1000 + b"0\r\n\r\n")
        await r.upstreams[0].aclose()


async def test_a_worker_without_tls_is_a_connect_error() -> None:
    async with worker(send_ok) as w, relay() as r:
        context = ssl.create_default_context()
        r.upstreams.append(Upstream("127.0.0.1", w.port, time.monotonic, tls=context))
        w_task = asyncio.create_task(fetch(r.port, post()))
        await until(lambda: w.connections == 1, "the worker is reached")
        for writer in tuple(w.writers):
            writer.transport.abort()
        assert b" 502 " in await w_task
        assert kind(r.outcomes[0].error) == "connect"


async def test_an_invalid_request_target_is_a_client_error() -> None:
    upstream = Upstream("127.0.0.1", 1, time.monotonic)
    with pytest.raises(ClientError):
        await upstream.send(UpstreamRequest("GET", "/a b"), _NoSink(), Timeouts())


class _NoSink(ClientReply):
    """A sink for replies whose use fails the test."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "arguments", [{"port": 0}, {"port": 65_536}, {"base_path": "x"}, {"base_path": "/x/"}]
)
def test_upstream_checks_its_arguments(arguments: dict[str, object]) -> None:
    defaults: dict[str, object] = {"host": "h", "port": 80, "clock": time.monotonic}
    with pytest.raises(ValueError, match=r"port|base_path"):
        Upstream(**(defaults | arguments))  # type: ignore[arg-type]


async def test_a_kept_client_connection_survives_a_hidden_failure() -> None:
    async def bad(call: WorkerCall) -> None:
        call.hang_up()

    async with worker(bad) as b, worker(send_ok) as g, relay(b.port, g.port) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        for _ in range(3):
            writer.write(post(close=False))
            assert (await read_reply(reader))[1] == b"ok"
        writer.close()
