"""Hundreds of publishers that look like engines to a router's event subscriptions: real event
sockets, and HTTP that identifies each engine.

They serve no inference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio
from aiohttp import web

from kvkernels import chain_hashes
from tests.live.stack import MODEL

BLOCK = 16
END = b"\xff" * 8
_METRICS = (
    'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000000"} 1\n'
)
_MODELS = msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "owned_by": "vllm"}]})


@dataclass
class Publisher:
    """One publisher's event sockets, its batches, and its count of batches that it left out.
    Lifetime: test.
    """

    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    live: str
    replay: str
    batches: list[bytes] = field(default_factory=list)  # all numbered batches, also for replays
    chains: list[npt.NDArray[np.uint64]] = field(default_factory=list)  # that they store
    lost: int = 0
    asked: int = 0  # requests for replays

    def add(self, prompt: npt.NDArray[np.int32], ts_s: float = 0.0) -> None:
        """Append a batch that stores this prompt's blocks, which have small numbers as names."""
        first = sum(len(chain) for chain in self.chains)
        chain = chain_hashes(prompt, BLOCK)
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(first, first + len(chain))),
            "parent_block_hash": None,
            "token_ids": prompt.tolist(),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        self.batches.append(msgspec.msgpack.encode([ts_s, [event], 0]))
        self.chains.append(chain)

    async def subscribed(self) -> None:
        """Wait until the router has subscribed; batches sent before that are lost."""
        while await self.pub.recv() != b"\x01":
            pass

    async def send(self, number: int) -> None:
        await self.pub.send_multipart([b"", number.to_bytes(8, "big"), self.batches[number]])

    async def serve(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            identity, _, start = await self.router.recv_multipart()
            self.asked += 1
            for number in range(int.from_bytes(start, "big"), len(self.batches)):
                frames = [identity, b"", b"", number.to_bytes(8, "big"), self.batches[number]]
                await self.router.send_multipart(frames)
            await self.router.send_multipart([identity, b"", b"", END, b""])


@dataclass
class Publishers:
    """All publishers of a test and the URL of their common HTTP server. Lifetime: test."""

    url: str
    all: list[Publisher]

    @property
    def specs(self) -> list[str]:
        """The publishers as values of the router's `--worker`."""
        return [
            f"{self.url}/{number},kind=vllm,events={one.live},replay={one.replay}"
            for number, one in enumerate(self.all)
        ]


@asynccontextmanager
async def publishing(count: int) -> AsyncIterator[Publishers]:
    """Run `count` publishers and their HTTP server until the block ends."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 64)
    made = [_publisher(context) for _ in range(count)]
    runner = web.AppRunner(_http_app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    tasks = [asyncio.create_task(one.serve()) for one in made]
    try:
        yield Publishers(f"http://127.0.0.1:{runner.addresses[0][1]}", made)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        context.destroy(linger=0)


def _publisher(context: zmq.asyncio.Context) -> Publisher:
    # An XPUB is a PUB that reports its subscribers.
    pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    pub.setsockopt(zmq.SNDHWM, 100_000)  # vLLM's
    router.setsockopt(zmq.SNDHWM, 0)
    ends = [f"tcp://127.0.0.1:{s.bind_to_random_port('tcp://127.0.0.1')}" for s in (pub, router)]
    return Publisher(pub, router, *ends)


def _http_app() -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.Response(body=_MODELS, content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=_METRICS)

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/{number}/v1/models", models)
    app.router.add_get("/{number}/metrics", metrics)
    app.router.add_get("/{number}/health", health)
    return app


def all_chains(publisher: Publisher) -> Sequence[int]:
    """Return the chain hashes of all blocks that the publisher ever stored, in ascending order."""
    held: Sequence[int] = np.unique(np.concatenate(publisher.chains))
    return held
