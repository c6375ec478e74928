"""Events of engines that connect to us: one bound endpoint, workers told apart by their topic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import zmq
import zmq.asyncio

from router.events.connections import watched
from router.events.hub import Hub
from router.events.sockets import opened
from router.events.source import ZmqSource
from router.events.subscription import Receive
from router.events.telling import FeedContext, Turn
from router.lines import worth_a_line

log = logging.getLogger(__name__)

_BIND_AGAIN_S = 0.1


@asynccontextmanager
async def joined(
    source: ZmqSource,
    context: FeedContext,
    dropped: Callable[[], None],
    connected: Callable[[], None],
) -> AsyncIterator[Receive]:
    """This worker's messages of those that reach the endpoint we bind.

    `connected` is called when anybody connects: whose publisher it is, only its messages tell.
    Raises ValueError where another worker has the same topic.
    """
    limit, read = context.backlog_batches, partial(_read, context)
    seat = context.hubs.joined(source.live, source.topic, limit, dropped, read)
    async with seat as own:
        own.connected = connected
        yield own.receive


async def _read(context: FeedContext, hub: Hub) -> None:
    """Hand each message to the worker whose topic it has."""
    turn = Turn(context.clock)
    with opened(context, zmq.SUB, context.backlog_batches) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        async with watched(sub, hub.connected):
            await _bind(sub, hub.address)
            while True:
                frames = await sub.recv_multipart()
                hub.give(frames[0].decode("utf-8", "replace"), frames)
                await turn.over()


async def _bind(sub: zmq.asyncio.Socket, address: str) -> None:
    """Try until it is bound: one of ours that was closed just now may hold the address yet."""
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
