"""Tests of what clients see when workers answer that they are full or lack the model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from tests.live.light_engine import LightEngine
from tests.live.stack import MODEL, Stack, running, until
from tests.pauses import measured

REFUSALS = [
    (429, {}, "Rate limit reached"),
    (529, {}, "Overloaded"),
    (503, {"Retry-After": "2"}, "too many requests"),
    (503, {}, "The request queue is full."),
]


@dataclass
class Refusing(LightEngine):
    """An engine that answers requests, or refuses them at once as if it had no room."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    refused: int = 0

    async def _complete(self, request: web.Request) -> web.Response:
        if self.status == 200:
            return await super()._complete(request)
        self.refused += 1
        error = {"error": {"message": self.said, "type": "overloaded", "code": self.status}}
        return web.json_response(error, status=self.status, headers=self.headers)


@asynccontextmanager
async def pool(
    tmp_path: Path, engines: int, *router: str, kind: type[Refusing] = Refusing
) -> AsyncIterator[tuple[Stack, list]]:
    """Yield a router with `engines` engines of this kind."""
    found = [kind() for _ in range(engines)]
    try:
        for engine in found:
            await engine.start()
        async with running(tmp_path, workers=0, router=list(router)) as stack:
            for engine in found:
                await stack.add(engine.url)
            yield stack, found
    finally:
        for engine in found:
            await engine.stop()


async def send_prompt(
    stack: Stack, prompt: list[int], model: str = MODEL
) -> tuple[int, str | None]:
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
        await reply.read()
        return reply.status, reply.headers.get("Retry-After")


@pytest.mark.parametrize(
    ("status", "headers", "said", "policy"),
    [
        pytest.param(*refusal, policy, marks=pytest.mark.full if (n + m) % 2 else ())
        for n, refusal in enumerate(REFUSALS)  # CI takes each of these once
        for m, policy in enumerate(("hybrid", "warmset"))
    ],
)
async def test_a_worker_that_refuses_requests_gets_few_and_no_client_sees_an_error(
    tmp_path: Path, policy: str, status: int, headers: dict[str, str], said: str
) -> None:
    async with pool(tmp_path, 4, "--policy", policy) as (stack, engines):
        prompt = list(range(200))
        assert (await send_prompt(stack, prompt))[0] == 200
        warm = next(engine for engine in engines if engine.asked)
        warm.status, warm.headers, warm.said = status, headers, said
        began_s = time.monotonic()
        for i in range(300):
            assert (await send_prompt(stack, prompt if i % 2 else [*prompt[:64], i]))[0] == 200
        elapsed_s = time.monotonic() - began_s
        # Spells of 0.5 s at least, each twice as long as the one before.
        assert warm.refused <= 2 + elapsed_s / 4 + 3
        log = stack.router.log.read_text()
        assert log.count("says that it is busy") == 1
        assert "keeps failing" not in log
        assert "asking for another worker" not in log


async def test_with_all_workers_busy_clients_get_the_workers_own_refusal(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path, 3) as (stack, engines):
        for engine in engines:
            engine.status, engine.headers, engine.said = 429, {"Retry-After": "900"}, "no room"
        for i in range(60):
            assert await send_prompt(stack, [i]) == (429, "900")
        for engine in engines:
            engine.status = 200
        for i in range(60):
            assert (await send_prompt(stack, [i]))[0] == 200
        assert {engine.asked[MODEL] > 0 for engine in engines} == {True}, "all of them are asked"


async def test_a_busy_only_worker_still_gets_requests_and_is_shown_as_busy(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as (stack, (engine,)):
        engine.status, engine.headers = 429, {"Retry-After": "1"}

        async def shown() -> tuple[str, float | None]:
            assert await send_prompt(stack, [1]) == (429, "1")
            async with stack.http.get(f"{stack.admin}/workers") as reply:
                (row,) = (await reply.json())["workers"]
            return row["state"], row["busy_for_s"]

        state, busy_s = await measured(shown, lambda found: found[0] == "busy")
        assert state == "busy"
        assert busy_s is not None
        assert 0 < busy_s <= 1
        async with stack.http.get(f"{stack.url}/ready") as reply:
            assert reply.status == 200, "it would be asked"
        engine.status = 200
        assert (await send_prompt(stack, [1]))[0] == 200

        async def ready() -> bool:
            async with stack.http.get(f"{stack.admin}/workers") as reply:
                (row,) = (await reply.json())["workers"]
            return row["state"] == "ready" and row["busy_for_s"] is None

        await until(ready, "the end of its time")


@dataclass
class Denying(Refusing):
    """An engine with an adapter: `lists` says whether it lists the adapter among its models, `has`
    whether it serves it.
    """

    lists: bool = True
    has: bool = True
    looks: int = 0

    async def _models(self, request: web.Request) -> web.Response:
        self.looks += 1
        self.adapters = ("lora",) if self.lists else ()
        return await super()._models(request)

    async def _complete(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        if model != "lora" or self.has:
            return await super()._complete(request)
        self.refused += 1
        said = f"The model `{model}` does not exist."
        error = {"error": {"message": said, "type": "NotFoundError", "param": "model", "code": 404}}
        return web.json_response(error, status=404)


@pytest.mark.parametrize("lists", [False, True])
async def test_a_request_for_an_adapter_moves_if_its_worker_has_unloaded_it(
    tmp_path: Path, lists: bool
) -> None:
    async with pool(tmp_path, 3, kind=Denying) as (stack, engines):
        prompt = list(range(100))
        assert (await send_prompt(stack, prompt, "lora"))[0] == 200
        (warm,) = (engine for engine in engines if engine.asked["lora"])
        looks = warm.looks
        warm.lists, warm.has = lists, False
        began_s = time.monotonic()
        for _ in range(200):
            assert (await send_prompt(stack, prompt, "lora"))[0] == 200
        elapsed_s = time.monotonic() - began_s
        # Each list of models that an answer contradicts is believed twice as late: after 1, 2, 4
        # seconds.
        assert 1 <= warm.refused <= (2 + elapsed_s / 2 if lists else 1)

        async def looked() -> bool:
            return warm.looks > looks

        await until(looked, "a look at the worker")
        assert (await send_prompt(stack, prompt))[0] == 200, "its base model is asked for as before"
        log = stack.router.log.read_text()
        assert log.count("does not have the model 'lora'") == 1
        assert "keeps failing" not in log
        for engine in engines:
            engine.has = False
        assert (await send_prompt(stack, prompt, "lora"))[0] == 404, "nobody has it"
        assert (await send_prompt(stack, prompt, "unheard of"))[0] == 404
        for engine in engines:
            engine.has = engine.lists = True

        async def served() -> bool:
            return (await send_prompt(stack, prompt, "lora"))[0] == 200

        await until(served, "it is loaded again")
