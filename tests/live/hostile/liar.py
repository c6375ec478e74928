"""An engine that reports whatever a test wants about its cache, ranks and event sockets.

It has a real HTTP server and real event sockets, and no cache behind them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from engine.wire.events import (
    AllBlocksCleared,
    BlockStored,
    encode_batch,
    live_frames,
)
from tests.live.stack import MODEL
from tests.served_app import served_by

_FIGURES = """\
vllm:num_requests_running{{engine="{rank}"}} 0
vllm:num_requests_waiting{{engine="{rank}"}} 0
vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}",engine="{rank}"}} 1
"""


@dataclass
class Liar:
    """An engine that reports false facts about its cache. Lifetime: test."""

    pub: zmq.asyncio.Socket
    endpoint: str  # the endpoint of its events
    blocks: int = 1_000  # the cache's size that it states
    block_size: int = 16
    ranks: int = 1
    sources: dict[str, dict[str, str]] | None = None  # None: the one endpoint of its events
    cached: Callable[[Sequence[int]], int] = len  # cached tokens of a prompt that it states
    url: str = ""
    answered: int = 0
    published: int = 0
    named: int = 0  # blocks that it has named

    async def subscribed(self) -> None:
        """Wait until a router has subscribed to the events; events sent before that are lost."""
        while await self.pub.recv() != b"\x01":
            pass

    async def claim(self, *prompts: Sequence[int]) -> None:
        """Publish one batch of events that says these prompts are in the cache."""
        await self._publish(self._stored(prompt) for prompt in prompts)

    async def clear(self) -> None:
        """Publish an event that says that the cache is empty."""
        await self._publish([AllBlocksCleared()])

    def _stored(self, prompt: Sequence[int]) -> BlockStored:
        blocks = len(prompt) // self.block_size
        names = tuple(range(self.named, self.named + blocks))
        self.named += blocks
        tokens = tuple(prompt[: blocks * self.block_size])
        return BlockStored(hashes=names, parent=None, tokens=tokens, block_size=self.block_size)

    async def _publish(self, events: Iterable[Any]) -> None:
        payload = encode_batch(time.time(), list(events), 0)
        await self.pub.send_multipart(live_frames("", self.published, payload))
        self.published += 1

    async def answer(self, request: web.Request) -> web.Response:
        match request.path:
            case "/v1/models":
                return web.json_response({"data": [{"id": MODEL, "owned_by": "vllm"}]})
            case "/metrics":
                known = {"size": self.block_size, "blocks": self.blocks}
                figures = (_FIGURES.format(rank=rank, **known) for rank in range(self.ranks))
                return web.Response(text="".join(figures))
            case "/kv_event_sources":
                return web.json_response(self.sources or {"0": {"endpoint": self.endpoint}})
            case "/health":
                return web.Response()
            case "/v1/completions":
                prompt = (await request.json())["prompt"]
                self.answered += 1
                details = {"cached_tokens": self.cached(prompt)}
                usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
                usage |= {"completion_tokens": 1, "total_tokens": len(prompt) + 1}
                choice = {"text": "x", "index": 0, "finish_reason": "length"}
                return web.json_response({"choices": [choice], "usage": usage})
        return web.Response(status=404)


@asynccontextmanager
async def lying(events_at: str = "tcp://127.0.0.1", **told: Any) -> AsyncIterator[Liar]:
    """Yield a lying engine at 127.0.0.1; its events are at a free port of `events_at` or at an ipc
    path.
    """
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)  # an XPUB is a PUB that reports its subscribers
    pub.setsockopt(zmq.SNDHWM, 0)
    if events_at.startswith("ipc"):
        pub.bind(events_at)
        one = Liar(pub, events_at, **told)
    else:
        one = Liar(pub, f"{events_at}:{pub.bind_to_random_port(events_at)}", **told)
    try:
        async with served_by(one.answer, client_max_size=1 << 26) as one.url:
            yield one
    finally:
        context.destroy(linger=0)


@dataclass
class Prompts:
    """Makes prompts of `tokens` ids that have no common prefix. Lifetime: test."""

    tokens: int
    made: int = field(default=0)

    def next(self) -> list[int]:
        self.made += 1
        return [(self.made * 7_919 + i * (self.made + 1)) % 30_000 for i in range(self.tokens)]
