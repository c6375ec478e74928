"""ZMQ sockets with the bounds that all of ours have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq
import zmq.asyncio

from engine.wire.events import MAX_PAYLOAD_BYTES
from router.events.telling import FeedContext


@contextmanager
def opened(context: FeedContext, kind: int, batches: int) -> Iterator[zmq.asyncio.Socket]:
    """A socket of `kind` (`zmq.SUB`, `zmq.DEALER`), closed at the end.

    At most `batches` of each peer wait in it, then more in the peer. ZMQ drops the connection of
    a peer that sends a frame beyond the limit.
    """
    socket = context.zmq.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES + 1024)
        socket.setsockopt(zmq.RCVHWM, batches)
        yield socket
    finally:
        socket.close(linger=0)


def receiver(socket: zmq.asyncio.Socket) -> Callable[[], Awaitable[Sequence[bytes]]]:
    """How to read the frames of `socket`'s next message.

    What waits already is taken without a future and a look at the event loop: those cost ten
    times as much as the message, and in a flood of events every message waits already.
    """
    waiting: zmq.Socket[bytes] = zmq.Socket.shadow(socket)

    async def receive() -> Sequence[bytes]:
        try:
            return waiting.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            frames: Sequence[bytes] = await socket.recv_multipart()
            return frames

    return receive
