"""Tests of the end of a connection: the router stops, or the client leaves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from router.http.messages import Answer, Request
from router.http.reply import Framing, ReplyHead
from router.upstream.client_reply import ClientReply
from tests.live.hostile.corpus import BODY, sized
from tests.router.server.clients import connect, echo_body, only_connection, statuses
from tests.router.server_support import ServerUnderTest, serving
from tests.router.waiting import until


class GatedHandler:
    """A handler that answers once the test opens its gate; some answers are written as the relay
    writes.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    async def handle(self, request: Request) -> Answer:
        self.begun += 1
        reply = ClientReply(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reply.head(ReplyHead(200, b"OK", ((b"Content-Length", b"2"),), Framing.LENGTH, 2))
        reply.data(b"ok")
        reply.finish()
        return reply


async def draining(use: Callable[[ServerUnderTest, GatedHandler], Awaitable[None]]) -> GatedHandler:
    gated = GatedHandler()
    async with serving(gated.handle) as it:
        await use(it, gated)
        await until(lambda: it.server.connections == 0, "all connections end")
    return gated


async def test_idle_connections_are_closed_immediately_at_shutdown() -> None:
    async def use(it: ServerUnderTest, gated: GatedHandler) -> None:
        reader, writer = await connect(it.port)
        await only_connection(it)
        async with asyncio.timeout(10.0):
            await it.server.aclose(30.0)
        assert await reader.read() == b""
        writer.close()

    await draining(use)


async def test_a_request_on_a_kept_connection_is_answered_during_shutdown() -> None:
    async def use(it: ServerUnderTest, gated: GatedHandler) -> None:
        gated.gate.set()
        reader, writer = await connect(it.port)
        await only_connection(it)
        ending = asyncio.create_task(it.server.aclose(30.0))
        await asyncio.sleep(0)
        writer.write(sized())
        got = await reader.read()
        await ending
        assert statuses(got) == [b"200"]
        assert b"Connection: close\r\n" in got
        writer.close()

    await draining(use)


async def test_a_running_request_ends_and_is_the_last_of_its_connection() -> None:
    async def use(it: ServerUnderTest, gated: GatedHandler) -> None:
        reader, writer = await connect(it.port)
        writer.write(sized() + sized())
        await until(lambda: gated.begun == 1, "a request")
        draining = asyncio.create_task(it.server.aclose(30.0))
        await asyncio.sleep(0)
        gated.gate.set()
        await draining
        got = await reader.read()
        assert statuses(got) == [b"200"]
        assert b"Connection: close\r\n" in got
        writer.close()

    assert (await draining(use)).begun == 1


async def test_a_request_beyond_the_shutdown_time_is_cut_off() -> None:
    async def use(it: ServerUnderTest, gated: GatedHandler) -> None:
        reader, writer = await connect(it.port)
        writer.write(sized())
        await until(lambda: gated.begun == 1, "a request")
        await it.server.aclose(0.0)
        assert await reader.read() == b""
        writer.close()

    assert (await draining(use)).cancelled == 1


async def test_a_client_that_leaves_cancels_its_request() -> None:
    gated = GatedHandler()
    async with serving(gated.handle) as it:
        before = asyncio.all_tasks()
        _, writer = await connect(it.port)
        writer.write(sized() + sized())
        await until(lambda: gated.begun == 1, "a request")
        writer.transport.abort()
        await until(lambda: gated.cancelled == 1, "it is cancelled")
        await until(lambda: asyncio.all_tasks() <= before, "no task is left")
        assert it.server.connections == 0
        assert gated.begun == 1


async def test_if_another_process_listens_each_answer_closes_its_connection() -> None:
    async with serving(echo_body) as it:
        reader, writer = await connect(it.port)
        writer.write(sized())
        assert b"close" not in await reader.readuntil(BODY)
        it.server.closing = True
        writer.write(sized() + sized())
        got = await reader.read()
        assert statuses(got) == [b"200"]
        assert b"Connection: close\r\n" in got
        writer.close()


async def test_if_another_process_listens_idle_connections_end_after_two_checks() -> None:
    """If another process listens on the same socket, idle connections end after two checks without
    a request; a connection with a request in between is answered, and that answer closes it.
    """
    async with serving(echo_body) as it:
        idle, silent, busy = [await connect(it.port) for _ in range(3)]
        for reader, writer in (idle, busy):
            writer.write(sized())
            assert b"close" not in await reader.readuntil(BODY)
        await until(lambda: it.server.connections == 3, "all are connected")
        it.server.look()
        assert it.server.connections == 3
        it.server.closing = True
        it.server.look()
        busy[1].write(sized())
        got = await busy[0].read()
        assert statuses(got) == [b"200"]
        it.server.look()
        for reader, _ in (idle, silent):
            assert await reader.read() == b""
        await until(lambda: it.server.connections == 0, "all connections end")


async def test_an_unread_request_keeps_its_connection_open() -> None:
    async with serving(echo_body) as it:
        reader, writer = await connect(it.port)
        writer.write(sized())
        await reader.readuntil(BODY)
        it.server.closing = True
        it.server.look()
        connection = await only_connection(it)
        number = writer.get_extra_info("socket").fileno()
        os.write(number, sized())  # and the loop has not turned since
        it.server.look()
        assert not connection.transport.is_closing()
        assert statuses(await reader.read()) == [b"200"]


async def test_a_lent_socket_is_given_back_before_it_is_closed() -> None:
    """The code that took over a connection's socket gives it back before the socket is closed,
    because its number could belong to another client afterwards.
    """
    open_then: list[bool] = []

    async def lend(request: Request) -> Answer:
        connection = request.connection
        assert connection.transport is not None
        file = connection.transport.get_extra_info("socket").fileno()
        lent = os.fstat(file).st_ino
        connection.lent_to = lambda: open_then.append(os.fstat(file).st_ino == lent)
        return await asyncio.get_running_loop().create_future()

    async with serving(lend) as it:
        _, writer = await connect(it.port)
        writer.write(sized())
        connection = await only_connection(it)
        await until(lambda: connection.lent_to is not None, "the socket to be lent")
        writer.transport.abort()
        await until(lambda: it.server.connections == 0, "the connection ends")
    assert open_then == [True]
