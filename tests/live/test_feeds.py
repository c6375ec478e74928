"""Tests of our own engine's events over its real sockets, and of engines that connect to a router's
socket.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import aiohttp
import pytest
import zmq
import zmq.asyncio

from policies.facts import KvEvents
from router.events.sources import ZmqSource, kv_event_sources
from simulator.live.processes import Program, Programs
from tests.live.stack import MODEL, Stack, engine_arguments, misbehaving, running, until
from tests.router.events.feed_wire import Rig, chain_of, pack, rig
from tests.told_decision import decision_in

SIZE = 16
PROMPT = [(7 * n) % 100 for n in range(5 * SIZE)]
CHAIN = chain_of(PROMPT, SIZE)
_JSON = b'{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_JSON), _JSON)


@asynccontextmanager
async def engine(log_dir: Path) -> AsyncIterator[tuple[Program, aiohttp.ClientSession]]:
    async with Programs(log_dir) as programs, aiohttp.ClientSession() as http:
        yield await programs.start("engine", "engine", engine_arguments()), http


async def complete(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()


async def source_of(http: aiohttp.ClientSession, url: str) -> ZmqSource:
    """Return the event source that the engine reports."""
    async with http.get(f"{url}/kv_event_sources") as reply:
        return kv_event_sources(await reply.read(), "127.0.0.1").by_rank[0]


@pytest.mark.parametrize("ask", ["live", "replay", "snapshot"])
async def test_block_hashes_of_the_warmroute_engine_are_those_of_xxhash(
    tmp_path: Path, ask: str
) -> None:
    async with engine(tmp_path) as (program, http), rig() as one:
        source = await source_of(http, program.url)
        if ask == "snapshot":
            source = replace(source, replay=None, snapshot=f"{program.url}/kv_snapshot")
        if ask == "live":
            async with one.following(source, block_size=SIZE) as feed:
                await until(replayed(feed.counters), "the first replay")
                await complete(http, program.url, [*PROMPT, 1])
                await one.until_hit(CHAIN, 5)
                assert one.kv().known
            return
        await complete(http, program.url, [*PROMPT, 1])
        async with one.following(source, block_size=SIZE) as feed:
            await one.until_hit(CHAIN, 5)
            assert one.kv().known
            assert feed.counters.snapshots == (1 if ask == "snapshot" else 0)
            await until(received_live(http, program.url, one), "the subscription to take hold")
            await complete(http, program.url, [*PROMPT[:SIZE], *PROMPT])
            branch = chain_of([*PROMPT[:SIZE], *PROMPT], SIZE)
            await one.until_hit(branch, 6)
            assert one.hit(CHAIN) == 5


def received_live(http: aiohttp.ClientSession, url: str, one: Rig):  # type: ignore[no-untyped-def]
    """Return a condition that publishes a batch and is true once a batch was received; batches sent
    before the subscription takes effect are lost.
    """
    told = count(101)

    async def once() -> bool:
        await complete(http, url, [next(told)] * SIZE)
        return any(isinstance(fact, KvEvents) and fact.source == "live" for fact in one.told)

    return once


def replayed(counters: object):  # type: ignore[no-untyped-def]
    async def once() -> bool:
        return bool(counters.replays)  # type: ignore[attr-defined]

    return once


async def test_engines_connect_to_the_endpoint_that_a_router_binds(tmp_path: Path) -> None:
    """A router receives the events of two workers at one endpoint that it binds, and tells their
    engines apart by topic.
    """
    context = zmq.asyncio.Context()
    with context.socket(zmq.PUB) as probe:
        live = f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"
    async with Programs(tmp_path) as programs, aiohttp.ClientSession() as http:
        workers = [
            await programs.start(f"engine-{n}", "engine", engine_arguments()) for n in range(2)
        ]
        arguments = ["serve", "--port", "0", "--admin-port", "0"]
        for n, worker in enumerate(workers):
            spec = f"{worker.url},kind=vllm,events=bind:{live},topic=engine-{n}"
            arguments += ["--worker", spec]
        router = await programs.start("router", "router", arguments)
        stack = Stack(programs, router, workers, http)
        for n in range(2):
            await stack.until_state(n, "ready")
        pub = context.socket(zmq.XPUB)  # serves both engines, since only the topic counts
        pub.connect(live)
        assert (await pub.recv())[:1] == b"\x01"
        stored = ["BlockStored", [1], None, PROMPT[:SIZE], SIZE, None, "GPU", None]
        for n, events in enumerate([[stored], [stored, [*stored[:1], [2], 1, *stored[3:]]]]):
            frames = [f"engine-{n}".encode(), struct.pack(">Q", 0), pack(*events)]

            async def reached(n: int = n, frames: list[bytes] = frames) -> bool:
                await pub.send_multipart(frames)  # a worker is ready before its topic is
                return bool((await stack.row(n))["resident_blocks"] == n + 1)

            await until(reached, f"worker {n} to hold {n + 1} blocks")
        pub.close(linger=0)
    context.destroy(linger=0)


async def test_prompts_with_image_ids_go_to_the_worker_whose_events_have_the_blocks(
    tmp_path: Path,
) -> None:
    """Requests with ids of images go to the worker whose events have the blocks, and their bodies
    pass unchanged.
    """
    wide = [*PROMPT[:SIZE], *[2**62 + 10**6] * SIZE, *PROMPT[:SIZE], 2**31, *PROMPT[1:SIZE]]
    short = b'{"model" : "tiny", "prompt": %s, "max_tokens":1}' % str([*wide, 5]).encode()
    bodies = [short, short.replace(b"}", b" " * 40_000 + b"}"), short.replace(b"[", b"[" * 2)]
    bodies[2] = bodies[2].replace(b"]", b"], [7]]")
    context = zmq.asyncio.Context()
    async with (
        running(tmp_path, workers=0, router=["--policy", "hybrid"]) as stack,
        misbehaving(ANSWER) as (cold, unasked),
        misbehaving(ANSWER) as (warm, asked),
    ):
        await stack.add(f"{cold},kind=vllm,block_size={SIZE}")
        pub = context.socket(zmq.XPUB)
        live = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
        worker = await stack.add(f"{warm},kind=vllm,events={live},block_size={SIZE}")
        assert (await pub.recv())[:1] == b"\x01"
        stored = ["BlockStored", [1, 2, 3, 4], None, wide, SIZE, None, "GPU", None]
        await pub.send_multipart([b"", struct.pack(">Q", 0), pack(stored)])

        async def held() -> bool:
            return bool((await stack.row(worker))["resident_blocks"] == 4)

        await until(held, "the blocks to be known")
        headers = {"Content-Type": "application/json", "x-warmroute-explain": "1"}
        for body in bodies:
            url = f"{stack.url}/v1/completions"
            async with stack.http.post(url, data=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                told = decision_in(reply.headers["x-warmroute-explain"])
            assert (told["worker"], told["expected_hit_tokens"]) == (worker, 4 * SIZE)
        assert (asked, unasked) == (bodies, [])
        for beyond in (-1, 2**63):
            status, answer = await stack.complete([5, beyond])
            assert (status, answer["error"]["code"]) == (400, "integer_out_of_range")
        pub.close(linger=0)
    context.destroy(linger=0)
