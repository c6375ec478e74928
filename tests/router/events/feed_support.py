"""A publisher of KV events with real ZMQ sockets, and a feed between it and a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

from engine.wire.events import (
    BlockStored,
    encode_batch,
    encode_snapshot,
    live_frames,
    parse_replay_request,
    replay_end,
    replay_frames,
)
from policies.facts import KvEvents, ReplayEnd
from router.core.contract.actions import Resync
from router.core.core import take
from router.events.delivery import FeedContext, FeedFact, SharedReaders
from router.events.feed import Feed, open_feed
from router.events.sources import ZmqSource
from tests.router.core.core_world import BLOCK, World, stored

DEADLINE_S = 10.0
Answer = Callable[["Publisher", bytes, int], Awaitable[None]]


def payload(n: int) -> bytes:
    """Return the batch of events numbered `n`, which stores block n."""
    event = stored([n])
    return encode_batch(0.0, [wire(event)])


def wire(event) -> BlockStored:
    return BlockStored(
        hashes=event.hashes, parent=event.parent, tokens=event.tokens, block_size=BLOCK
    )


async def in_five_frames(publisher: Publisher, identity: bytes, start: int) -> None:
    for seq in range(start, publisher.next_seq):
        await publisher.router.send_multipart(
            replay_frames(identity, "", seq, publisher.payload(seq))
        )
    await publisher.router.send_multipart(replay_end(identity))


async def in_four_frames(publisher: Publisher, identity: bytes, start: int) -> None:
    """Answer a replay request in four frames without the topic, as vLLM before 0.27."""
    for seq in range(start, publisher.next_seq):
        frames = [identity, b"", seq.to_bytes(8, "big"), publisher.payload(seq)]
        await publisher.router.send_multipart(frames)
    end = (2**64 - 1).to_bytes(8, "big")
    await publisher.router.send_multipart([identity, b"", end, b""])


async def with_garbage(publisher: Publisher, identity: bytes, start: int) -> None:
    await publisher.router.send_multipart([identity, b"", b"", b"short", b"\xc1\xc1"])


async def without_end(publisher: Publisher, identity: bytes, start: int) -> None:
    """Answer a replay request with the same old batch forever."""
    while True:
        await publisher.router.send_multipart(replay_frames(identity, "", 0, payload(0)))
        await asyncio.sleep(0)


async def without_answer(publisher: Publisher, identity: bytes, start: int) -> None:
    return


@dataclass
class Publisher:
    """A worker's live and replay sockets and, on demand, its snapshot. Lifetime: test."""

    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    answer: Answer = in_five_frames
    next_seq: int = 0
    replays: list[int] = field(default_factory=list)  # start of each one asked for
    snapshots: int = 0
    others: dict[int, bytes] = field(default_factory=dict)  # payloads that are not `payload`'s

    def payload(self, seq: int) -> bytes:
        """Return the bytes of a batch as it was published."""
        return self.others.get(seq) or payload(seq)

    async def publish(self, lost: bool = False) -> None:
        """Publish the next batch; a `lost` one gets a number and is not sent."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        if not lost:
            await self.pub.send_multipart(live_frames("", seq, self.payload(seq)))

    async def serve(self) -> None:
        while True:
            identity, start = parse_replay_request(await self.router.recv_multipart())
            self.replays.append(start)
            await self.answer(self, identity, start)

    def snapshot(self) -> bytes:
        self.snapshots += 1
        events = [wire(stored([n])) for n in range(self.next_seq)]
        return encode_snapshot(self.next_seq - 1, 0.0, events)


@dataclass
class FeedLine:
    """An event feed between a publisher and a core. Lifetime: test."""

    publisher: Publisher
    world: World
    feed: Feed
    told: list[FeedFact]

    @property
    def kv(self):
        return self.world.core.workers.get(0).kv

    def holds(self, *blocks: int) -> bool:
        return all(self.world.hits([block]) == [1] for block in blocks)

    async def subscribed(self) -> None:
        """Publish batches until one arrives, because a subscription takes a moment."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not any(isinstance(f, KvEvents) and f.source == "live" for f in self.told):
            assert time.monotonic() < deadline_s, "the feed heard nothing"
            await self.publisher.publish()
            await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """Wait until the core knows everything published exactly."""
        await until(
            lambda: self.kv.known and self.holds(*range(self.publisher.next_seq)),
            "everything to be known",
        )


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:g} s for {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def feed_line(
    answer: Answer = in_five_frames,
    replay: bool = True,
    snapshot: bool = False,
    published: int = 0,
    timeout_s: float = 0.3,
    subscribed_s: float = 60.0,
) -> AsyncIterator[FeedLine]:
    context = zmq.asyncio.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    publisher = Publisher(pub, router, answer, next_seq=published)
    live_port = pub.bind_to_random_port("tcp://127.0.0.1")
    replay_port = router.bind_to_random_port("tcp://127.0.0.1")
    app = web.Application()

    async def give(request: web.Request) -> web.Response:
        return web.Response(body=publisher.snapshot())

    app.router.add_get("/kv_snapshot", give)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    world = World(workers=1)
    told: list[FeedFact] = []

    def tell(fact: FeedFact) -> None:
        told.append(fact)
        for action in take(world.core, fact):
            if isinstance(fact, ReplayEnd):
                return
            if isinstance(action, Resync):
                feed.resync(action.from_seq)

    source = ZmqSource(
        f"tcp://127.0.0.1:{live_port}",
        f"tcp://127.0.0.1:{replay_port}" if replay else None,
        f"http://127.0.0.1:{runner.addresses[0][1]}/kv_snapshot" if snapshot else None,
    )
    async with aiohttp.ClientSession() as http:
        shared = FeedContext(
            *(http, context, time.monotonic, tell, SharedReaders(), timeout_s, 1000, subscribed_s),
            wants_snapshot=lambda: world.core.caches.wants_snapshot(0),
        )
        feed = open_feed(source, 0, "m", shared)
        tasks = [asyncio.create_task(feed.run()), asyncio.create_task(publisher.serve())]
        try:
            yield FeedLine(publisher, world, feed, told)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await runner.cleanup()
            context.destroy(linger=0)
