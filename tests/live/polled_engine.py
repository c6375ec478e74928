"""An engine like TensorRT-LLM, whose KV events are gone once one client has read them.

It serves no inference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from tests.live.stack import MODEL
from tests.router.events.trtllm_serve import CREATED, SIZE, Engine, block, chain_of, removed, stored
from tests.served_app import served_app

OPTIONS = f"kind=trtllm,events=poll,block_size={SIZE},kv_tokens=1e6"


@dataclass
class Cache:
    """The cache of the polled engine: its blocks are named by numbers, in sequences without a
    parent. Lifetime: test.
    """

    engine: Engine = field(default_factory=Engine)
    url: str = ""
    begun: bool = False
    chains: dict[int, int] = field(default_factory=dict)

    def store(self, first: int, count: int) -> None:
        """Publish one event that stores a new sequence of `count` blocks."""
        if not self.begun:
            self.begun = True
            self.engine.emit(CREATED)
        tokens = [first + i for i in range(count) for _ in range(SIZE)]
        chain = chain_of(tokens, SIZE)
        blocks = [block(first + i, tokens[i * SIZE : (i + 1) * SIZE]) for i in range(count)]
        self.engine.emit(stored(None, *blocks))
        self.chains.update(zip(range(first, first + count), chain, strict=True))

    def remove(self, *names: int) -> None:
        self.engine.emit(removed(*names))
        for name in names:
            del self.chains[name]

    @property
    def truth(self) -> list[int]:
        return sorted(self.chains.values())


@asynccontextmanager
async def polled_engine() -> AsyncIterator[Cache]:
    """Serve the engine over HTTP during the block; yield its cache."""
    cache = Cache()
    models = {"object": "list", "data": [{"id": MODEL, "owned_by": "tensorrt_llm"}]}
    app = web.Application()
    app.router.add_post("/kv_cache_events", cache.engine.answer)
    for path, content in (("/v1/models", models), ("/health", {}), ("/metrics", [])):
        app.router.add_get(path, partial(_json, content))
    async with served_app(app, shutdown_timeout=0) as cache.url:
        yield cache


async def _json(content: object, _: web.Request) -> web.Response:
    return web.json_response(content)
