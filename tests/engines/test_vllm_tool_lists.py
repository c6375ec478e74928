"""Tests of chats with a leaderboard's tool lists on real vLLM: equal token ids and exact hits."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.wire.hf import HfTokenizer
from engine.wire.tokens import Chat
from tests.effort import QUICK
from tests.engines.pool import Pool
from tests.engines.tool_lists import LIVE, Tool, ToolList, tool_lists
from tests.engines.tool_styles import STYLES
from tests.engines.vllm_server import BLOCK_SIZE, MODEL, Server
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOW_S = 1_700_000_000.0  # the template asks for no date
EVENT_WAIT_S = 0.05  # vLLM publishes a step's blocks in its own thread, and answers may overtake it
EACH = 10 if QUICK else 1  # one of this many lists is tested
VARIED = 20  # lists
AT_ONCE = 8  # renderings
Body = dict[str, Any]
Noted = Callable[[str, object], None]


@pytest.fixture(scope="module")
def lists() -> list[ToolList]:
    return tool_lists()


@pytest.fixture(scope="module")
def ours(tooled: Pool) -> HfTokenizer:
    return HfTokenizer(tooled.model)


def body_of(one: ToolList, style: str = STYLES[0], **fields: Any) -> Body:
    kwargs = {"style": style}
    return {
        "model": MODEL, "messages": one.messages, "tools": one.tools, "max_tokens": 1,
        "chat_template_kwargs": kwargs, **fields,
    }  # fmt: skip


async def differing(
    server: Server, ours: HfTokenizer, bodies: list[Body], drops: bool = False
) -> list[str]:
    """Return the requests whose token ids differ from the server's. `drops`: the server leaves out
    tools that must not be called.
    """
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(body: Body) -> str | None:
        async with turns:
            status, told = await server.post("/v1/chat/completions/render", body)
        assert status == 200, (told, body)
        dropped = {"tools": None} if drops and body.get("tool_choice") == "none" else {}
        chat = msgspec.json.decode(json.dumps(body | dropped), type=Chat)
        same = ours.encode_chat(chat, NOW_S) == told["token_ids"]
        return None if same else json.dumps(body)[:2000]

    found = await asyncio.gather(*(one(body) for body in bodies))
    return [body for body in found if body is not None]


async def test_token_ids_of_every_tool_list_equal_the_servers(
    tooled: Pool, ours: HfTokenizer, lists: list[ToolList], record_property: Noted
) -> None:
    assert (len(lists), sum(one.source == LIVE for one in lists)) == (2131, 351)
    bodies = [body_of(one, style) for style in STYLES for one in lists[::EACH]]
    wrong = await differing(tooled.servers[0], ours, bodies)
    record_property("tool lists", f"{len(bodies) - len(wrong)} of {len(bodies)} equal")
    assert not wrong, f"{len(wrong)} of {len(bodies)}: {wrong[0]}"


def varied(one: ToolList, draw: random.Random) -> Iterator[Body]:
    """Yield requests that describe the same tools in other ways, or in more detail."""

    def changed(change: Callable[[Tool], Tool]) -> list[Tool]:
        return [change(tool) for tool in one.tools]

    def of_function(**fields: Any) -> list[Tool]:
        return changed(lambda tool: tool | {"function": tool["function"] | fields})

    def without(name: str) -> list[Tool]:
        left = [{k: v for k, v in tool["function"].items() if k != name} for tool in one.tools]
        return [{"type": "function", "function": function} for function in left]

    def shuffled(tool: Tool) -> Tool:
        function = list(tool["function"].items())
        draw.shuffle(function)
        return {"function": dict(function), "type": "function"}

    named = {"type": "function", "function": {"name": one.tools[0]["function"]["name"]}}
    for style in STYLES:
        for choice in ("none", "auto", "required", named):
            yield body_of(one, style, tool_choice=choice)
        for effort in ("none", "low", "high"):
            yield body_of(one, style, reasoning_effort=effort)
        yield body_of(one, style, parallel_tool_calls=False)
        for tools in (
            changed(shuffled),
            changed(lambda tool: tool | {"defer_loading": True, "unknown": {"a": 1}}),
            of_function(strict=True),
            of_function(strict=None, defer_loading=None),
            of_function(defer_loading=False, strict=False),
            of_function(unknown=[1], returns={"type": "string"}),
            of_function(description=None),
            without("description"),
            without("parameters"),
        ):
            yield body_of(one, style, tools=tools)


async def test_token_ids_with_other_tool_fields_equal_the_servers(
    tooled: Pool, ours: HfTokenizer, lists: list[ToolList]
) -> None:
    draw = random.Random(1)
    bodies = [body for one in draw.sample(lists, VARIED) for body in varied(one, draw)]
    wrong = await differing(tooled.servers[0], ours, bodies)
    assert not wrong, f"{len(wrong)} of {len(bodies)}: {wrong[0]}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dropping(tooled: Pool, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """Yield a renderer with another tool parser, which leaves out tools that must not be called."""
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    flags += ("--exclude-tools-when-tool-choice-none",)
    folder: Path = tmp_path_factory.mktemp("renderer")
    server = Server(tooled.environment, tooled.model, folder, renders=True, flags=flags)
    await server.start()
    try:
        await server.until_healthy()
        yield server
    finally:
        await server.stop()


async def test_token_ids_without_excluded_tools_equal_the_servers(
    dropping: Server, ours: HfTokenizer, lists: list[ToolList]
) -> None:
    draw = random.Random(2)
    bodies = [body for one in draw.sample(lists, VARIED) for body in varied(one, draw)]
    wrong = await differing(dropping, ours, bodies, drops=True)
    assert not wrong, f"{len(wrong)} of {len(bodies)}: {wrong[0]}"


async def test_hits_of_chats_with_tool_lists_are_exact(
    tooled: Pool, lists: list[ToolList], record_property: Noted
) -> None:
    """Hits of chats with these tool lists are exact when each list is sent a second time with
    another question.
    """
    before, sent = len(tooled.logged()), 0
    for one in [one for one in lists if one.source == LIVE][::EACH]:
        style = STYLES[sent // 2 % len(STYLES)]
        for asked in (one.messages, [{"role": "user", "content": f"And what of {sent}?"}]):
            await asyncio.sleep(EVENT_WAIT_S)
            body = body_of(one, style, messages=asked)
            status, answer = await tooled.ask("/v1/chat/completions", body)
            assert status == 200, answer
            sent += 1

    async def written() -> bool:
        return len(tooled.logged()) == before + sent

    await until(written, "all lines of the access log")
    lines = tooled.logged()[before:]
    seen = [(line["expected_hit_tokens"], line["cached_tokens"]) for line in lines]
    unequal = [one for one in seen if one[0] // BLOCK_SIZE != one[1] // BLOCK_SIZE]
    found = sum(cached > 0 for _, cached in seen)
    record_property("hits", f"{sent - len(unequal)} of {sent} equal; {found} found something")
    assert found > sent / 3
    assert not unequal
    assert (await tooled.router.row(0))["hits"]["mode"] == "exact"
