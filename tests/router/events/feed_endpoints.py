"""Makes endpoints for tests to which event feeds connect, or which they bind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq

from router.events.sources import ZmqSource
from tests.router.events.feed_wire import (
    Publisher,
    Rig,
    publisher,
)


def free_endpoint() -> str:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        return f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"


@asynccontextmanager
async def connecting(one: Rig, live: str, topic: bytes) -> AsyncIterator[Publisher]:
    """Yield an engine whose event publisher connects to the router, as vLLM's does if the endpoint
    has no wildcard.
    """
    async with publisher(one.context, topic) as engine:
        engine.pub.close(linger=0)
        engine.pub = one.context.socket(zmq.XPUB)
        engine.pub.setsockopt(zmq.SNDHWM, 0)  # loses nothing, however slow the machine
        engine.pub.connect(live)
        engine.live = live
        await engine.until_subscribed()
        yield engine


def bound(live: str, topic: str, replay: str | None = None) -> ZmqSource:
    return ZmqSource(live, replay, topic=topic, bind=True)
