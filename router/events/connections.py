"""Each time that a ZMQ socket of ours and a publisher have found one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message


@asynccontextmanager
async def watched(socket: zmq.asyncio.Socket, connected: Callable[[], None]) -> AsyncIterator[None]:
    """Call `connected` at every connection, the first and those after it was lost.

    To be entered before the socket is connected or bound.
    """
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    task = asyncio.create_task(_watch(monitor, connected))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        socket.disable_monitor()
        monitor.close(linger=0)


async def _watch(monitor: zmq.asyncio.Socket, connected: Callable[[], None]) -> None:
    """Read without pause: ZMQ's own thread waits where nobody does."""
    while True:
        await recv_monitor_message(monitor)
        connected()
