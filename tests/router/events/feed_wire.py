"""Publishers that send documented bytes over real sockets, and an event feed with a core behind it.

They use none of our own encoders or hashes: payloads are packed by hand, and chain hashes are
computed with the `xxhash` package.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
import xxhash
import zmq
import zmq.asyncio

from policies.facts import KvEvents
from router.core.contract.actions import Resync
from router.core.core import take
from router.events.delivery import FeedContext, FeedFact, SharedReaders
from router.events.feed import Feed, open_feed
from router.events.sources import EventSource, ZmqSource
from tests.router.core.core_world import World

DEADLINE_S = 10.0
MODEL = "m"
END = b"\xff" * 8


def chain_of(tokens: Sequence[int], size: int, seed: int = 0, extra: bytes = b"") -> list[int]:
    """Return the chain hashes of the full blocks of `size` tokens; `extra` is hashed with the first
    one.
    """
    chain = []
    for start in range(0, len(tokens) - size + 1, size):
        block = struct.pack(f"<{size}i", *tokens[start : start + size])
        seed = xxhash.xxh3_64_intdigest(struct.pack("<Q", seed) + block + extra)
        chain.append(seed)
        extra = b""
    return chain


def seed_of(lora: str | None = None, salt: str | None = None) -> int:
    """Return the seed of the chain hashes of prompts with this LoRA adapter or salt."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([MODEL, lora, salt]))


def pack(*events: object, rank: int | None = 0) -> bytes:
    """Return a batch with these events, whose time is 1.5 s."""
    return msgspec.msgpack.encode([1.5, list(events), rank])


@dataclass
class Publisher:
    """An engine's sockets, and the batches that it keeps for a replay. Lifetime: test."""

    pub: zmq.asyncio.Socket  # an XPUB says when a subscription has arrived; its bytes are a PUB's
    router: zmq.asyncio.Socket
    live: str
    replay: str
    topic: bytes = b""
    new_form: bool = True  # of the replay: with the topic
    kept: dict[int, bytes] = field(default_factory=dict)  # what a replay has
    asked: list[int] = field(default_factory=list)  # where each replay began

    async def until_subscribed(self) -> None:
        """Wait until a client has subscribed to the publisher."""
        async with asyncio.timeout(DEADLINE_S):
            assert (await self.pub.recv())[:1] == b"\x01"

    async def send(self, seq: int, payload: bytes, lost: bool = False) -> None:
        self.kept[seq] = payload
        if not lost:
            await self.pub.send_multipart([self.topic, struct.pack(">Q", seq), payload])

    async def answer(self) -> None:
        """Answer replay requests until cancelled, as engines' publisher threads do."""
        while True:
            identity, empty, start = await self.router.recv_multipart()
            assert (empty, len(start)) == (b"", 8)
            self.asked.append(first := struct.unpack(">Q", start)[0])
            for seq, payload in sorted(self.kept.items()):
                if seq >= first:
                    await self._reply(identity, self.topic, struct.pack(">Q", seq), payload)
            await self._reply(identity, b"", END, b"")

    async def _reply(self, identity: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        frames = [topic, seq, payload] if self.new_form else [seq, payload]
        await self.router.send_multipart([identity, b"", *frames])


@asynccontextmanager
async def publisher(
    context: zmq.asyncio.Context, topic: bytes = b"", new_form: bool = True
) -> AsyncIterator[Publisher]:
    """Yield a publisher whose live and replay endpoints are bound to free ports."""
    pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (pub, router)]
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    one = Publisher(pub, router, live, replay, topic, new_form)
    try:
        async with running(one.answer()):
            yield one
    finally:
        one.pub.close(linger=0)
        router.close(linger=0)


@dataclass
class Rig:
    """A core and the event feeds of its workers, with facts as in the router. Lifetime: test."""

    context: zmq.asyncio.Context
    http: aiohttp.ClientSession
    readers: SharedReaders
    world: World
    told: list[FeedFact] = field(default_factory=list)
    feeds: dict[int, Feed] = field(default_factory=dict)
    backlog_batches: int = 1_000
    subscribed_s: float = 60.0
    timeout_s: float = 1.0
    clock: Callable[[], float] = time.monotonic

    def kv(self, worker_id: int = 0) -> Any:
        return self.world.core.workers.get(worker_id).kv

    def tell(self, fact: FeedFact) -> None:
        self.told.append(fact)
        for action in take(self.world.core, fact):
            assert isinstance(action, Resync)
            self.feeds[action.worker_id].resync(action.from_seq)

    def opened(self, source: EventSource, worker_id: int = 0, block_size: int = 2) -> Feed:
        """Return a feed for a worker that joins; the feed is not started."""
        self.world.join(worker_id, block_size=block_size, models=(MODEL,))
        shared = FeedContext(
            self.http,
            self.context,
            self.clock,
            self.tell,
            self.readers,
            timeout_s=self.timeout_s,
            backlog_batches=self.backlog_batches,
            subscribed_s=self.subscribed_s,
        )
        feed = self.feeds[worker_id] = open_feed(source, worker_id, MODEL, shared)
        return feed

    @asynccontextmanager
    async def following(
        self, source: EventSource, worker_id: int = 0, block_size: int = 2
    ) -> AsyncIterator[Feed]:
        """Run the feed of a worker whose events come from this source during the block."""
        feed = self.opened(source, worker_id, block_size)
        async with running(feed.run()):
            yield feed

    def hit(self, chain: Sequence[int], worker_id: int = 0, tier: int = 0) -> int:
        """Return how many leading blocks of a chain the worker holds by its events, in tiers up to
        `tier`.
        """
        slot = self.world.core.workers.get(worker_id).slot
        index = self.world.core.caches.index
        return int(index.longest_prefix_tiers(np.array(chain, dtype=np.uint64))[tier, slot])

    async def until_hit(self, chain: Sequence[int], blocks: int, worker_id: int = 0) -> None:
        await until(
            lambda: self.hit(chain, worker_id) == blocks,
            lambda: f"{blocks} blocks, there are {self.hit(chain, worker_id)}",
        )

    async def until_seq(self, seq: int, worker_id: int = 0) -> None:
        """Wait until the core has received the live batch `seq`."""

        def told() -> bool:
            facts = (f for f in self.told if isinstance(f, KvEvents) and f.worker_id == worker_id)
            return any(fact.seq == seq and fact.source == "live" for fact in facts)

        await until(told, lambda: f"batch {seq}")


@asynccontextmanager
async def rig(**fields: Any) -> AsyncIterator[Rig]:
    """Yield a core without workers, and the things that feeds need."""
    context = zmq.asyncio.Context()
    hubs = SharedReaders()
    try:
        async with aiohttp.ClientSession() as http:
            yield Rig(context, http, hubs, World(workers=0), **fields)
        assert not len(hubs), "a hub outlived its feeds"
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def running(coroutine: Any) -> AsyncIterator[None]:
    """Run a task during the block; an error in the task fails the test."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        broken = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not broken, "it ended by itself"


async def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:g} s for {what()}"
        await asyncio.sleep(0.005)


def source_of(one: Publisher, replay: bool = True) -> ZmqSource:
    """Return the publisher's endpoints, as its engine reports them."""
    return ZmqSource(one.live, one.replay if replay else None, topic=one.topic.decode())


@asynccontextmanager
async def followed_publisher(
    topic: bytes = b"",
    new_form: bool = True,
    replay: bool = True,
    block_size: int = 2,
    **fields: Any,
) -> AsyncIterator[tuple[Rig, Publisher, Feed]]:
    """Yield a publisher to which a feed has subscribed, with its first replay request answered."""
    async with (
        rig(**fields) as one,
        publisher(one.context, topic, new_form) as engine,
        one.following(source_of(engine, replay), block_size=block_size) as feed,
    ):
        await engine.until_subscribed()
        await until(
            lambda: feed.counters.replays + feed.counters.failed_syncs == 1,
            lambda: "the first replay",
        )
        yield one, engine, feed
