"""Tests that a new engine needs only one file and one line: the router recognizes, routes to,
measures, disaggregates and drains it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio

from engine.timed import continuation
from simulator.live.processes import Programs
from tests.live.seventh.router import FILE, LINE
from tests.live.seventh.server import BLOCK_TOKENS, KV_TOKENS, SeventhServer, kv_field_of, serving
from tests.live.stack import Stack, engine_arguments, until

FILE_LINES_MAX = 150
ROLES = ("prefill", "decode")
VOCABULARY = 32_000


def prompt_of(serial: int) -> list[int]:
    """Return a prompt of 300 tokens that depends on `serial`."""
    draw = random.Random(serial)
    return [draw.randrange(VOCABULARY) for _ in range(300)]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker and a decode worker of the engine "seventh" behind a router."""

    stack: Stack
    urls: list[str]
    servers: list[SeventhServer]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as ends:
        programs = await ends.enter_async_context(Programs(tmp_path_factory.mktemp("logs")))
        http = await ends.enter_async_context(aiohttp.ClientSession())
        workers, urls, servers = [], list[str](), list[SeventhServer]()
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--disaggregation", "always"]
        for role in ROLES:
            flags = [*engine_arguments(), "--role", role]
            workers.append(await programs.start(role, "engine", flags))
            url, server = await ends.enter_async_context(serving(workers[-1].url, role))
            urls.append(url)
            servers.append(server)
            arguments += ["--worker", url]
        router = await programs.start("router", "tests.live.seventh.router", arguments)
        stack = Stack(programs, router, workers, http)
        for worker_id in range(len(ROLES)):
            await stack.until_state(worker_id, "ready")
        yield Pair(stack, urls, servers)


def test_an_adapter_needs_one_short_file_and_one_line_of_registration() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= FILE_LINES_MAX
    assert LINE.count("\n") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_the_seventh_engine_is_recognized(pair: Pair) -> None:
    rows = await pair.stack.rows()
    assert [(row["kind"], row["role"]) for row in rows] == [("seventh", role) for role in ROLES]
    # Without events the router follows it in longer blocks than its own.
    assert [row["block_size"] % BLOCK_TOKENS for row in rows] == [0, 0]
    assert [row["kv_capacity_tokens"] for row in rows] == [KV_TOKENS] * 2
    assert all("/generate" in row["lacks"] for row in rows)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_is_split_into_two_legs(pair: Pair) -> None:
    for server in pair.servers:
        server.asked.clear()
    prompt = prompt_of(1)
    status, answer = await pair.stack.complete(prompt, max_tokens=8, return_token_ids=True)
    assert status == 200
    assert answer["choices"][0]["token_ids"] == continuation(prompt, 8, VOCABULARY)
    assert "seventh_kv" not in answer
    (first,), (second,) = (server.asked for server in pair.servers)
    assert kv_field_of(first) == '{"keep": true}'
    assert "remote_block_ids" in kv_field_of(second)
    assert (first["max_tokens"], second["max_tokens"]) == (1, 8)
    await pair.stack.assert_idle()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_may_not_set_the_kv_field(pair: Pair) -> None:
    status, answer = await pair.stack.complete([1, 2], seventh_kv={"remote_host": "10.0.0.1"})
    assert status == 400
    assert answer["error"]["code"] == "transfer_field"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_seventh_engines_load_is_measured(pair: Pair) -> None:
    async def ask() -> int:
        return (await pair.stack.complete(prompt_of(2), max_tokens=2_000))[0]

    asking = asyncio.create_task(ask())

    async def loaded() -> bool:
        return bool((await pair.stack.row(1))["kv_used_tokens"])

    await until(loaded, "its KV in use to be reported")
    assert await asking == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_the_seventh_engine_is_drained_and_removed(pair: Pair) -> None:
    async with pair.stack.http.post(f"{pair.stack.admin}/workers/1/drain") as reply:
        assert reply.status == 200
    assert (await pair.stack.row(1))["state"] == "draining"
    asked = len(pair.servers[1].asked)
    # The other worker serves alone, because a draining worker gets nothing new.
    assert (await pair.stack.complete(prompt_of(3)))[0] == 200
    assert len(pair.servers[1].asked) == asked
    async with pair.stack.http.post(f"{pair.stack.admin}/workers/1/undrain") as reply:
        assert reply.status == 200
    assert (await pair.stack.complete(prompt_of(4)))[0] == 200
    assert len(pair.servers[1].asked) == asked + 1
    await pair.stack.remove(1)
    assert len(await pair.stack.rows()) == 1
