"""Events of a publisher that we connect to: vLLM, SGLang, TensorRT-LLM's push, our engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import zmq

from router.events.connections import watched
from router.events.sockets import opened, receiver
from router.events.source import ZmqSource
from router.events.telling import FeedContext

Receive = Callable[[], Awaitable[Sequence[bytes]]]  # the frames of the next message


@asynccontextmanager
async def subscribed(
    source: ZmqSource, context: FeedContext, connected: Callable[[], None]
) -> AsyncIterator[Receive]:
    """A socket of our own, connected to the publisher. Raises zmq.ZMQError.

    `connected` is called at every connection.
    """
    with opened(context, zmq.SUB, context.backlog_batches) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        async with watched(sub, connected):
            sub.connect(source.live)
            yield receiver(sub)
