"""An engine of several data-parallel ranks: one HTTP server, and one event publisher for
each rank.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from aiohttp import web

from engine.wire.events import BlockStored, encode_batch, live_frames
from tests.served_app import served_by

BLOCK_TOKENS, BLOCKS = 16, 1_000
_FIGURES = """\
vllm:num_requests_running{{engine="{rank}",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} 0
vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} 0.5
vllm:cache_config_info{{block_size="16",num_gpu_blocks="1000",engine="{rank}"}} 1
"""


@dataclass
class RankedEngine:
    """An engine with several data-parallel ranks, and the requests that it got. Lifetime: test."""

    publishers: list[zmq.asyncio.Socket]
    ports: list[int]
    ranks: int
    busy: int = 10  # requests running at each rank, and its number more
    url: str = ""
    open: Counter[str] = field(default_factory=Counter)  # requests without an answer, by path
    answers: asyncio.Event = field(default_factory=asyncio.Event)  # unset: none is answered
    wanted: list[str | None] = field(default_factory=list)  # rank header of each completion
    published: int = 0

    @property
    def metrics(self) -> str:
        return "".join(
            _FIGURES.format(rank=r, running=self.busy and self.busy + r) for r in range(self.ranks)
        )

    @property
    def sources(self) -> dict[str, dict[str, str]]:
        ports = self.ports[: self.ranks]
        return {str(rank): {"endpoint": f"tcp://*:{port}"} for rank, port in enumerate(ports)}

    async def publish(self, rank: int, tokens: tuple[int, ...]) -> None:
        """Publish an event that the rank `rank` has stored the blocks of these tokens."""
        names = tuple(range(1, len(tokens) // BLOCK_TOKENS + 1))
        event = BlockStored(hashes=names, parent=None, tokens=tokens, block_size=BLOCK_TOKENS)
        payload = encode_batch(time.time(), [event], rank)
        frames = live_frames("", self.published, payload)
        self.published += 1
        await self.publishers[rank].send_multipart(frames)

    async def answer(self, request: web.Request) -> web.Response:
        self.open[request.path] += 1
        try:
            await self.answers.wait()
            return self._answer(request)
        finally:
            self.open[request.path] -= 1

    def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/v1/completions":
            named = request.headers.getall("X-data-parallel-rank", [])
            assert len(named) <= 1
            self.wanted.append(named[0] if named else None)
            return web.json_response({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1}})
        match request.path:
            case "/v1/models":
                return web.json_response({"data": [{"id": "m"}]})
            case "/metrics":
                return web.Response(text=self.metrics)
            case "/kv_event_sources":
                return web.json_response(self.sources)
            case "/health":
                return web.Response()
        return web.Response(status=404)


@asynccontextmanager
async def ranked_engine(ranks: int = 2, most: int = 3) -> AsyncIterator[RankedEngine]:
    """Yield an engine with `ranks` ranks, which can grow to `most` ranks."""
    context = zmq.asyncio.Context()
    publishers = [context.socket(zmq.PUB) for _ in range(most)]
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in publishers]
    one = RankedEngine(publishers, ports, ranks)
    one.answers.set()
    try:
        async with served_by(one.answer) as one.url:
            yield one
    finally:
        context.destroy(linger=0)
