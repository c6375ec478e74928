"""Tests of which render servers are used, as requests to them fail and as workers come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from router.core.workers.table import WorkerFacts
from router.engines.render_way import CHATS
from router.fleet.recognize import Recognized
from router.tokens.render_calls import RenderTerms
from router.tokens.renderers import Renderers
from tests.router.engines.engine_pages import engine

BODY = b'{"model":"m","messages":[]}'
RENDERED = {"token_ids": [1, 2], "features": None}
PAGES = {
    "/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]},
    f"{CHATS}/render": 405,
    f"POST {CHATS}/render": RENDERED,
}


def worker(url: str, *models: str) -> Any:
    facts = WorkerFacts("w", models or ("m",), 16, 1.0, has_events=True)
    recognized = Recognized("vllm", facts, None)
    return SimpleNamespace(recognized=recognized, ready=True, spec=SimpleNamespace(url=url))


class World:
    """Render servers, the workers that use them, and a clock. Lifetime: test."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *workers: Any,
        given: tuple[str, ...] = (),
        has_tokenizer: bool = True,
    ):
        self.now_s = 0.0
        self.fleet: Any = SimpleNamespace(members=dict(enumerate(workers)))
        terms = RenderTerms(given, True, 1.0, 1.0, 300.0, 1.0, 8)
        self.renderers = Renderers(
            http, self.fleet, lambda: self.now_s, lambda: terms, has_tokenizer
        )

    async def look(self, after_s: float = 1.0) -> str:
        self.now_s += after_s
        await self.renderers.look()
        return self.renderers.state("m")[0]

    async def render(self, body: bytes = BODY) -> str | None:
        found = await self.renderers.render("m", CHATS, body)
        return None if found is None else found[1]


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_failed_requests_alone_do_not_stop_a_renderer() -> None:
    """Failed requests do not stop the use of a render server, because a client can provoke them;
    only the router's own probe decides.
    """
    pages: dict[str, Any] = dict(PAGES)
    async with engine(pages) as url, http() as session:
        world = World(session, worker(url))
        assert await world.look() == "able"
        pages[f"POST {CHATS}/render"] = b"x"
        for _ in range(3):
            assert await world.render() is None
        pages[f"POST {CHATS}/render"] = RENDERED
        assert await world.render() == url
        assert await world.look() == "able"
        pages[f"POST {CHATS}/render"] = 500
        for _ in range(3):
            assert await world.render() is None
        assert await world.look() == "failing"
        pages[f"POST {CHATS}/render"] = RENDERED
        assert await world.look(10.0) == "able"


async def test_a_configured_renderer_is_used_first_and_workers_while_it_fails() -> None:
    pages: dict[str, Any] = dict(PAGES)
    async with engine(pages) as given, engine(dict(PAGES)) as own, http() as session:
        world = World(session, worker(own), given=(given,))
        await world.look()
        assert await world.look() == "able"
        assert await world.render() == given
        pages[f"POST {CHATS}/render"] = 500
        for _ in range(3):
            await world.render()
        await world.look()
        assert await world.render() == own


@pytest.mark.parametrize(("status", "flag"), [(403, "lets it"), (401, "wants an API key")])
async def test_a_renderer_that_refuses_is_probed_again_later(
    status: int, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pages: dict[str, Any] = {**PAGES, f"POST {CHATS}/render": status}
    async with engine(pages) as url, http() as session:
        world = World(session, worker(url))
        assert await world.look() == "refused"
        assert flag in caplog.text
        pages[f"POST {CHATS}/render"] = RENDERED
        assert await world.look() == "refused"
        assert await world.look(300.0) == "able"


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize(("status", "warned"), [(403, True), (200, False)])
async def test_a_router_without_token_ids_logs_one_warning(
    has_tokenizer: bool, status: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pages: dict[str, Any] = {**PAGES, f"POST {CHATS}/render": RENDERED if status == 200 else status}
    async with engine(pages) as url, http() as session:
        world = World(session, worker(url), has_tokenizer=has_tokenizer)
        for _ in range(3):
            await world.look()
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert len(said) == (warned and not has_tokenizer)
        for line in said:
            assert line.startswith("the router has no tokenizer for 'm': it matches text prompts")
            assert "set `tokenizer` to the folder" in line
            assert line.endswith(", or start the engines as `vllm serve --enable-scale-out`")


async def test_a_missing_model_does_not_stop_rendering_of_others() -> None:
    pages: dict[str, Any] = dict(PAGES)
    async with engine(pages) as url, http() as session:
        world = World(session, worker(url, "base", "m"))
        assert await world.look() == "able"
        pages[f"POST {CHATS}/render"] = 404
        assert await world.render() is None
        pages[f"POST {CHATS}/render"] = RENDERED
        await world.look()
        assert world.renderers.state("base")[0] == "able"
        assert world.renderers.state("m")[0] == "none"


async def test_only_another_engine_invalidates_rendered_prompts() -> None:
    """Only another engine at a worker's place makes the memo of rendered prompts invalid; a worker
    that is not ready for a moment still counts as the same engine.
    """
    async with engine(dict(PAGES)) as url, http() as session:
        one, other = worker(url), worker("http://127.0.0.1:9", "other")
        world = World(session, one, other)
        await world.look()
        before = world.renderers.version("m"), world.renderers.version("other")
        for ready in (False, True):
            one.ready = ready
            await world.look()
        assert world.renderers.version("m") == before[0]
        world.renderers.counted(url, "m", 1, 2)
        world.fleet.members[0] = worker(url)
        await world.look()
        assert world.renderers.version("m") == before[0] + 1
        assert world.renderers.version("other") == before[1]
        assert world.renderers.check.mismatches["m by " + url] == 1
