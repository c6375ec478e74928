"""Opens ZMQ subscriptions, connected or bound, with the limits that all of them have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.wire.events import MAX_PAYLOAD_BYTES
from router.events.delivery import FeedContext, LoopYield, SharedReader
from router.events.sources import ZmqSource
from router.record.logs import worth_a_line

_CONNECTED, _LOST = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
# A publisher whose machine went away sends no end: TCP finds out within half a minute.
_KEEPALIVE = (
    *((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 10)),
    *((zmq.TCP_KEEPALIVE_INTVL, 5), (zmq.TCP_KEEPALIVE_CNT, 3)),
)


@asynccontextmanager
async def watched(
    socket: zmq.asyncio.Socket, connected: Callable[[bool], None]
) -> AsyncIterator[None]:
    """Call `connected` with True whenever the socket gets a connection, and with False whenever it
    loses one. Enter this context before the socket is connected or bound.
    """
    monitor = socket.get_monitor_socket(_CONNECTED | _LOST)
    task = asyncio.create_task(_watch(monitor, connected))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.disable_monitor()
        monitor.close(linger=0)


async def _watch(monitor: zmq.asyncio.Socket, connected: Callable[[bool], None]) -> None:
    """Read the messages of a socket's monitor without pause, because otherwise ZMQ's own thread
    would block.
    """
    while True:
        message = await recv_monitor_message(monitor)
        connected(message["event"] == _CONNECTED)


@contextmanager
def opened(context: FeedContext, kind: int, batches: int) -> Iterator[zmq.asyncio.Socket]:
    """Yield a socket of `kind` (`zmq.SUB`, `zmq.DEALER`), and close it at the end. For each peer,
    at most `batches` batches wait in the socket; further batches wait at the peer. ZMQ drops the
    connection of a peer that sends a frame beyond the size limit.
    """
    socket = context.zmq.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES + 1024)
        socket.setsockopt(zmq.RCVHWM, batches)
        for option, value in _KEEPALIVE:
            socket.setsockopt(option, value)
        yield socket
    finally:
        socket.close(linger=0)


def receiver(socket: zmq.asyncio.Socket) -> Callable[[], Awaitable[Sequence[bytes]]]:
    """Return a function that reads the frames of the socket's next message. A message that has
    already arrived is read without a future and without the event loop, which would cost ten times
    as much as the message itself. In a flood of events every message has already arrived.
    """
    waiting: zmq.Socket[bytes] = zmq.Socket.shadow(socket)

    async def receive() -> Sequence[bytes]:
        try:
            return waiting.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            frames: Sequence[bytes] = await socket.recv_multipart()
            return frames

    return receive


Receive = Callable[[], Awaitable[Sequence[bytes]]]  # the frames of the next message


@asynccontextmanager
async def subscribed(
    source: ZmqSource, context: FeedContext, connected: Callable[[bool], None]
) -> AsyncIterator[Receive]:
    """Yield a function that receives messages from a socket that is connected to the publisher.
    `connected` is called as `watched` describes. Raises zmq.ZMQError if the connection fails.
    """
    with opened(context, zmq.SUB, context.backlog_batches) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        async with watched(sub, connected):
            sub.connect(source.live)
            yield receiver(sub)


log = logging.getLogger(__name__)

_BIND_AGAIN_S = 0.1


@asynccontextmanager
async def joined(
    source: ZmqSource,
    context: FeedContext,
    dropped: Callable[[], None],
    connected: Callable[[bool], None],
) -> AsyncIterator[Receive]:
    """Yield a function that receives this worker's messages at an endpoint that the router binds.
    `connected` is called when any publisher connects or is lost, because only the messages of a
    publisher show to which worker it belongs. Raises ValueError if another worker has the same
    topic.
    """
    limit, read = context.backlog_batches, partial(_read, context)
    queue = context.readers.joined(source.live, source.topic, limit, dropped, read)
    async with queue as own:
        own.connected = connected
        yield own.receive


async def _read(context: FeedContext, shared: SharedReader) -> None:
    """Pass each message to the feed of the worker that has the message's topic."""
    pause = LoopYield(context.clock)
    with opened(context, zmq.SUB, context.backlog_batches) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        async with watched(sub, shared.connected):
            await _bind(sub, shared.address)
            while True:
                frames = await sub.recv_multipart()
                shared.give(frames[0].decode("utf-8", "replace"), frames)
                await pause.over()


async def _bind(sub: zmq.asyncio.Socket, address: str) -> None:
    """Try to bind the socket until this succeeds, because a socket of this process that was just
    closed may still hold the address.
    """
    failures = 0
    while True:
        try:
            sub.bind(address)
            return
        except zmq.ZMQError as error:
            failures += 1
            if failures > 1 and worth_a_line(failures):
                log.warning("events: cannot bind %s, tried %d times: %s", address, failures, error)
        await asyncio.sleep(_BIND_AGAIN_S)
