"""The part of `trtllm-serve` that serves KV events over real HTTP; each event can be read once.

Forms: NVIDIA TensorRT-LLM `tensorrt_llm/serve/openai_server.py` and
`cpp/tensorrt_llm/executor/jsonSerialization.cpp`, 1.0 to 2026-08.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from router.events.feed import Feed
from router.events.sources import PollSource
from tests.router.events.feed_wire import Rig, chain_of, rig
from tests.served_app import served_app

SIZE = 4
TOKENS = list(range(10, 22))
CHAIN = chain_of(TOKENS, SIZE)
NAMES: list[Any] = [6052439777046529588, 2**64 - 7, 3]
HEX_NAMES: list[Any] = ["ab" * 24 + f"{name:016x}" for name in (1, 2**63, 3)]


def block(name: Any, tokens: list[Any], level: int = 0, **fields: Any) -> dict[str, Any]:
    ids = [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens]
    known = {"type": "stored_block", "block_hash": name, "cache_level": level, "priority": 35}
    return known | {"mm_keys": [], "cache_salt": None, "tokens": ids} | fields


def stored(parent: Any, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*names: Any) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(names)}


def moved(name: Any, old: int, new: int) -> dict[str, Any]:
    diff = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": name, "cache_level": diff, "priority": None}


CREATED = {"type": "created", "num_blocks_per_cache_level": [100, 50]}


@dataclass
class Engine:
    """A `trtllm-serve` server with its queue of events. Lifetime: test."""

    url: str = ""
    numbers: dict[int | None, int] = field(default_factory=dict)  # next one, by rank
    waiting: list[dict[str, Any]] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)
    polls: int = 0
    spoil: Callable[[], web.Response] | None = None  # the next answer instead

    def emit(
        self, *datas: dict[str, Any], window: int | None = 4096, rank: int | None = None
    ) -> None:
        for data in datas:
            number = self.numbers.get(rank, 0)
            self.numbers[rank] = number + 1
            event: dict[str, Any] = {"event_id": number, "data": data}
            if window is not None:
                event["window_size"] = window
            if rank is not None:
                event["attention_dp_rank"] = rank
            self.waiting.append(event)
        self.some.set()

    async def answer(self, request: web.Request) -> web.Response:
        """Return all queued events; if there are none, wait a moment first."""
        self.polls += 1
        assert await request.read() == b""
        try:
            async with asyncio.timeout(0.2):
                await self.some.wait()
        except TimeoutError:
            pass
        self.some.clear()
        if self.spoil is not None:
            spoil, self.spoil = self.spoil, None
            self.waiting = []
            return spoil()
        taken, self.waiting = self.waiting, []
        return web.Response(text=json.dumps(taken), content_type="application/json")


@asynccontextmanager
async def serving() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.router.add_post("/kv_cache_events", engine.answer)
    async with served_app(app, shutdown_timeout=0) as url:
        engine.url = f"{url}/kv_cache_events"
        yield engine


@asynccontextmanager
async def polled() -> AsyncIterator[tuple[Rig, Engine, Feed]]:
    async with (
        serving() as engine,
        rig() as one,
        one.following(PollSource(engine.url), block_size=SIZE) as feed,
    ):
        yield one, engine, feed
