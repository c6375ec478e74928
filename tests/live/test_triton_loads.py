"""Tests of models loaded and unloaded at all Tritons: which keys may do it, what clients get as
answer, and which requests wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.live.stack import Stack, running, until
from tests.served_app import served_by

LOAD, UNLOAD = ("/v2/repository/models/more/" + verb for verb in ("load", "unload"))
BODY = {"parameters": {"config": "{}"}}


@dataclass
class Fake:
    """A server that looks like Triton, with one model that can be loaded and unloaded. Lifetime:
    test.
    """

    url: str = ""
    models: set[str] = field(default_factory=lambda: {"small"})
    asked: list[tuple[str, Any]] = field(default_factory=list)
    may: asyncio.Event = field(default_factory=asyncio.Event)  # set: a load may continue
    status: int = 200
    drops: bool = False  # it drops the connection instead of answering

    async def page(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in (LOAD, UNLOAD):
            self.asked.append((path, await request.json()))
            await self.may.wait()
            if self.drops and request.transport is not None:
                request.transport.abort()
            if self.status != 200:
                return web.json_response({"error": "no such file"}, status=self.status)
            (self.models.add if path == LOAD else self.models.discard)("more")
            return web.Response()
        config = {"backend": "python", "input": [{"name": "T", "data_type": "TYPE_STRING"}]}
        pages: dict[str, Any] = {
            "/v2": {"name": "triton", "extensions": ["model_repository(unload_dependents)"]},
            "/v2/repository/index": [
                {"name": name, "version": "1", "state": "READY"} for name in sorted(self.models)
            ],
            "/v2/health/ready": {},
            **{f"/v2/models/{name}/config": config for name in self.models},
            **{f"/v2/models/{name}/ready": {} for name in self.models},
        }
        if path not in pages:
            return web.json_response({"error": "Not Found"}, status=404)
        return web.json_response(pages[path])


@asynccontextmanager
async def before(folder: Path, *more: str) -> AsyncIterator[tuple[Stack, Fake, Fake]]:
    """Yield a router that may load models, and two fake Tritons."""
    keys = folder / "keys"
    keys.write_text("sk-all-aaaaaaaa operators\nsk-some-bbbbbbbb others models=small\n")
    terms = ("--api-keys-file", str(keys), "--triton-admin", "load", *more)
    one, other = Fake(), Fake()
    async with (
        served_by(one.page) as one.url,
        served_by(other.page) as other.url,
        running(folder, workers=0, router=terms) as stack,
    ):
        for fake in (one, other):
            fake.may.set()
            await stack.add(fake.url)
        yield stack, one, other


async def ask(
    stack: Stack, path: str, key: str = "sk-all-aaaaaaaa", method: str = "POST", **headers: str
) -> tuple[int, str]:
    """Send a request; return (status, error)."""
    headers = {**headers, **({"Authorization": f"Bearer {key}"} if key else {})}
    url = f"{stack.url}{path}"
    async with stack.http.request(method, url, json=BODY, headers=headers) as reply:
        text = await reply.text()
        return reply.status, (await reply.json())["error"] if text else ""


async def served(stack: Stack) -> list[list[str]]:
    """Return the models of each worker as the router knows them."""
    return [row["models"] for row in await stack.rows()]


async def test_a_model_load_reaches_all_servers_or_the_error_names_the_failed_ones(
    tmp_path: Path,
) -> None:
    async with before(tmp_path) as (stack, one, other):
        assert await ask(stack, LOAD) == (200, "")
        assert one.asked == other.asked == [(LOAD, BODY)]
        assert await served(stack) == [["more", "small"]] * 2
        other.status = 400
        status, error = await ask(stack, UNLOAD)
        assert (status, error) == (
            400,
            f"unload of 'more' failed at 1 of 2 servers: {other.url}: no such file",
        )
        assert await served(stack) == [["small"], ["more", "small"]]
        one.drops = True
        status, error = await ask(stack, LOAD)
        assert status == 500, "one of them is to blame"
        assert f"failed at 2 of 2 servers: {one.url}: " in error
        assert f"; {other.url}: no such file" in error
        assert "unload of 'more' at 2 servers, by key 'operators'" in stack.router.log.read_text()


async def test_only_a_key_for_all_models_may_load_models(tmp_path: Path) -> None:
    peers = ("--trusted-peers", "127.0.0.0/8")
    async with before(tmp_path, *peers) as (stack, one, other):
        assert (await ask(stack, LOAD, key=""))[0] == 401
        assert (await ask(stack, LOAD, key="", **{"x-tenant": "operators"}))[0] == 401
        assert (await ask(stack, LOAD, key="sk-nobody"))[0] == 401
        status, error = await ask(stack, LOAD, key="sk-some-bbbbbbbb")
        assert (status, "for some models only" in error) == (403, True)
        assert (await ask(stack, LOAD, method="PUT"))[0] == 405
        for path in ("/v2/repository/models//load", "/v2/repository/other/models/more/load"):
            assert (await ask(stack, path))[0] in (400, 404)
        assert one.asked == other.asked == []


async def test_a_begun_model_load_continues_when_its_client_disconnects(tmp_path: Path) -> None:
    async with before(tmp_path) as (stack, one, other):
        other.may.clear()
        client = asyncio.create_task(ask(stack, LOAD))

        async def begun() -> bool:
            return len(one.asked) == len(other.asked) == 1

        await until(begun, "both to load")
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        other.may.set()

        async def known() -> bool:
            return await served(stack) == [["more", "small"]] * 2

        await until(known, "the router to know it")
