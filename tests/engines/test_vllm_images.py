"""Tests of real vLLM with images: the router identifies a chat's blocks by what vLLM's renderer
says of its images.

In one test, chats go directly to the server. The test renders each one first and looks up its chain
hashes among the blocks in the server's KV events. In the other test, chats go through the router.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from kvkernels import EventBatch, PrefixIndex, WorkerBlocks
from router.engines.media import Features, Medium, media_of
from router.tokens.media import media_chains
from tests.effort import QUICK
from tests.engines.hits import above, counted, hits, unequal
from tests.engines.image_names import image_names
from tests.engines.image_traffic import COLOR_AT, RGB, ImageTraffic, images_of
from tests.engines.pool import Pool
from tests.engines.vision_model import END, IMAGE, IMAGE_DIGEST, START
from tests.engines.vllm_server import BLOCK_SIZE, MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALONE = 40 if QUICK else 150
EXACT_SHARE = 0.99
EVENT_WAIT_S = 0.05  # vLLM publishes a step's blocks in its own thread, and answers may overtake it
QUIET_S = 0.05  # after this time without an event, all events of a request have come
Noted = Callable[[str, object], None]


@asynccontextmanager
async def site_of(images: list[bytes]) -> AsyncIterator[str]:
    """Serve images at /N.png; yield the base URL."""

    async def image(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.Response(body=images[number], content_type="image/png")

    app = web.Application()
    app.router.add_get("/{number}.png", image)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass(slots=True)
class ReceivedEvents:
    """The blocks and image identifiers in a server's events so far. Lifetime: test."""

    socket: zmq.asyncio.Socket
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(1))
    identifiers: set[str] = field(default_factory=set)
    blocks: WorkerBlocks = field(init=False)

    def __post_init__(self) -> None:
        """Create the empty record of the server's blocks."""
        self.blocks = WorkerBlocks(self.index, 0, BLOCK_SIZE, MODEL)

    async def listen(self) -> None:
        """Apply all events that have arrived, until no more arrive."""
        while await self.socket.poll(int(1000 * QUIET_S)):
            _, _, payload = await self.socket.recv_multipart()
            batch = EventBatch(payload)
            assert not batch.skipped, batch.skips()
            self.blocks.apply(batch)
            for event in msgspec.msgpack.decode(payload)[1]:
                for keys in event.get("extra_keys") or ():
                    self.identifiers |= {identifier for identifier, _ in keys or ()}


@asynccontextmanager
async def events_received_from(pool: Pool) -> AsyncIterator[ReceivedEvents]:
    """Subscribe to the server's events and empty its cache; yield the record of received events."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.connect(f"tcp://127.0.0.1:{pool.servers[0].events[0]}")
    socket.subscribe(b"")
    try:
        heard = ReceivedEvents(socket)
        await until_joined(pool, heard)
        status, _ = await pool.servers[0].post("/reset_prefix_cache")
        assert status == 200
        await heard.listen()
        yield heard
    finally:
        socket.close(0)
        context.term()


async def until_joined(pool: Pool, heard: ReceivedEvents) -> None:
    """Send prompts until their events arrive, since events before the subscription took effect are
    lost.
    """
    for _ in range(50):
        prompt = [random.randrange(100, 4000) for _ in range(2 * BLOCK_SIZE)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        status, answer = await pool.servers[0].post("/v1/completions", body)
        assert status == 200, answer
        await heard.listen()
        if len(heard.blocks):
            return
    raise AssertionError("no event was heard")


async def rendered(pool: Pool, body: dict[str, Any]) -> tuple[np.ndarray, list[Medium]]:
    """Return the token ids and the media of a chat as the server renders it."""
    asked = {**body, "mm_payload": "none"}
    status, answer = await pool.servers[0].post("/v1/chat/completions/render", asked)
    assert status == 200, answer
    ids = np.array(answer["token_ids"], np.int32)
    told = answer["features"]
    return ids, media_of(msgspec.convert(told, Features), len(ids)) if told else []


def name_of(part: dict[str, Any], file: bytes, model: str) -> str:
    """Return vLLM's name of an image in a chat."""
    if "uuid" in part:
        return str(part["uuid"])
    as_it_is, converted = image_names(file, model, IMAGE_DIGEST)
    return as_it_is if file[COLOR_AT] == RGB else converted


async def test_a_rendering_has_the_same_hashes_and_identifiers_as_events(
    images: Pool, record_property: Noted
) -> None:
    drawn: list[bytes] = []
    unequal, found, named = [], 0, set[str]()
    async with site_of(drawn) as site, events_received_from(images) as heard:
        traffic = ImageTraffic(random.Random(1), site, drawn)
        for _ in range(ALONE):
            body = traffic.body()
            ids, media = await rendered(images, body)
            parts = images_of(body["messages"])
            for medium, part in zip(media, parts, strict=True):
                name = name_of(part, traffic.file_of(part), str(images.model))
                assert medium.identifier == name
                around = ids[medium.offset - 1 : medium.offset + medium.length + 1].tolist()
                assert around == [START, *[IMAGE] * medium.length, END]
            chain = media_chains(ids, media, (BLOCK_SIZE,), model=MODEL)[BLOCK_SIZE]
            most = (len(ids) - 1) // BLOCK_SIZE
            expected = int(heard.index.longest_prefix(chain[:most])[0]) * BLOCK_SIZE
            status, answer = await images.servers[0].post("/v1/chat/completions", body)
            assert status == 200, answer
            traffic.answered(body, answer)
            await heard.listen()
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(ids)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found += cached > 0
            if cached != expected:
                unequal.append((expected, cached))
            named |= {
                m.identifier for m in media if m.offset // BLOCK_SIZE < len(ids) // BLOCK_SIZE
            }
    record_property("images alone", f"{ALONE - len(unequal)} of {ALONE} equal; {found} found")
    assert not unequal
    assert found > ALONE / 3
    assert named <= heard.identifiers
    assert {one for one in named if one.startswith("client-")}


async def test_hits_of_single_chats_are_as_expected(images: Pool, record_property: Noted) -> None:
    drawn: list[bytes] = []
    before = len(images.logged())
    async with site_of(drawn) as site:
        traffic = ImageTraffic(random.Random(2), site, drawn)
        for _ in range(ALONE):
            await asyncio.sleep(EVENT_WAIT_S)
            body = traffic.body()
            status, answer = await images.ask("/v1/chat/completions", body)
            assert status == 200, answer
            traffic.answered(body, answer)
    told = await hits(images, before, ALONE)
    # If all blocks of a prompt of whole blocks are cached, vLLM computes the last block again, and
    # the router expects only the last token to be computed.
    seen = [(expected // BLOCK_SIZE * BLOCK_SIZE, cached) for expected, cached in told]
    record_property("images through a router", counted(seen))
    assert sum(cached > 0 for _, cached in seen) > ALONE / 3
    assert len(unequal(seen)) <= ALONE * (1 - EXACT_SHARE), unequal(seen)
    assert not above(seen)
