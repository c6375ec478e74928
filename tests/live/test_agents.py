"""Tests that recorded requests of agents' clients go through a real router to two kinds of workers.

Simulated engines answer the chats. Servers that answer in the shapes of Anthropic's API and of the
Responses API answer the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from simulator.live.processes import Programs
from tests.live.api_engine import message_events, message_usage, responses_events
from tests.live.commands import output_of
from tests.live.stack import MODEL, running, until
from tests.served_app import served_by

RECORDED = Path(__file__).parents[1] / "router" / "request" / "agent_clients"
CHATS = "/v1/chat/completions"
ALIAS = "claude-alias"  # Claude Code shows only names like this one
WORDS = 40  # words that replace one placeholder, so that prompts have blocks


def recorded(client: str, chats: bool) -> Iterator[dict[str, Any]]:
    for row in json.loads((RECORDED / f"{client}.json").read_text()):
        if (row["path"] == CHATS) == chats:
            yield row


def expanded(value: Any) -> Any:
    """Return the value with placeholders replaced by long texts; equal placeholders get the same
    text.
    """
    if isinstance(value, dict):
        long = {name: expanded(part) for name, part in value.items()}
        if isinstance(text := value.get("text"), str) and not text.startswith("x-anthropic"):
            long["text"] = f"{text} " * WORDS
        if isinstance(text := value.get("content"), str):
            long["content"] = f"{text} " * WORDS
        return long
    return [expanded(part) for part in value] if isinstance(value, list) else value


def items(row: dict[str, Any]) -> list[str]:
    """Return the conversation as a list of the items that the model sees."""
    said = row["body"].get("messages") or row["body"].get("input") or []
    return [json.dumps(_seen(item), sort_keys=True) for item in said]


def _seen(item: Any) -> Any:
    if isinstance(item, list):
        return [_seen(part) for part in item]
    if not isinstance(item, dict):
        return item
    shown = {name: _seen(part) for name, part in item.items() if name != "cache_control"}
    content = shown.get("content")
    if isinstance(content, list) and [part.get("type") for part in content] == ["text"]:
        shown["content"] = content[0]["text"]  # the first turn has this as a list of one
    return shown


async def sent(http: aiohttp.ClientSession, url: str, row: dict[str, Any], model: str) -> Any:
    """Send a recorded request; return the router's explanation of its decision, or None if the
    request does not need one.
    """
    headers = [(name, value) for name, value in row["headers"]]
    body = None
    if row["body"] is not None:
        headers.append(("x-warmroute-explain", "1"))
        fields = expanded(row["body"]) | {"model": model}
        if row["path"] == CHATS:
            fields.pop("max_completion_tokens", None)
            fields["max_tokens"] = 4
        body = json.dumps(fields).encode()
    async with http.request(row["method"], url + row["path"], headers=headers, data=body) as answer:
        said = await answer.read()
        assert answer.status == 200, (row["path"], said)
        if row["body"] is None:
            return None
        if row["body"].get("stream"):
            assert answer.content_type == "text/event-stream"
            assert b"error" not in said
        line = answer.headers["x-warmroute-explain"]
        return json.loads(line[line.index("; {") + 2 :])


async def assert_turns_find_their_caches(
    http: aiohttp.ClientSession, url: str, rows: list[dict[str, Any]], model: str
) -> None:
    """Check that each turn goes to the worker of the turn before, and expects most of that turn's
    prompt in its cache.
    """
    before: dict[tuple[Any, ...], tuple[list[str], Any]] = {}
    turns = 0
    for row in rows:
        why = await sent(http, url, row, model)
        if why is None or row["agent"] == "count":
            continue
        agent = row["version"], row["setup"], row["session"], row["agent"]
        now = items(row)
        last, earlier = before.get(agent, ([], None))
        if last and now[: len(last)] == last and len(now) > len(last):
            turns += 1
            assert why["worker"] == earlier["worker"], row
            assert why["expected_hit_tokens"] >= 0.8 * earlier["prompt_tokens"], (row, why, earlier)
        before[agent] = now, why
    assert turns >= 4


async def until_ready(http: aiohttp.ClientSession, url: str, workers: int) -> None:
    async def ready() -> bool:
        async with http.get(f"{url}/health") as answer:
            return bool((await answer.json())["ready_workers"] == workers)

    await until(ready, f"{workers} workers to be ready")


async def answered_without_cached_tokens(request: web.Request) -> web.StreamResponse:
    """Answer as a worker that reports no cached tokens for any prompt."""
    if request.path != "/v1/messages":
        return await answered(request)
    tokens = len(await request.read()) // 4
    usage = {"input_tokens": tokens, "cache_read_input_tokens": 0}
    said = b"".join(message_events(MODEL))
    said = said.replace(json.dumps(message_usage(1)).encode(), json.dumps(usage).encode())
    return web.Response(body=said, headers={"Content-Type": "text/event-stream"})


async def answered(request: web.Request) -> web.StreamResponse:
    """Answer as a worker without KV events and without counts of cached tokens."""
    events = {"/v1/messages": message_events, "/v1/responses": responses_events}
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})
    if request.path == "/v1/messages/count_tokens":
        return web.json_response({"input_tokens": 9})
    if request.path not in events:
        return web.json_response({"detail": "Not Found"}, status=404)
    await request.read()
    said = b"".join(events[request.path](MODEL)).replace(b'"usage"', b'"unused"')
    return web.Response(body=said, headers={"Content-Type": "text/event-stream"})


@pytest.mark.parametrize("client", ["opencode", "pi"])
async def test_chats_of_agents_go_to_the_workers_that_have_their_prefixes(tmp_path, client) -> None:
    flags = ["--names-aliases", f"{ALIAS}={MODEL}"]
    async with running(tmp_path, workers=2, router=flags) as stack:
        rows = list(recorded(client, chats=True))
        await assert_turns_find_their_caches(stack.http, stack.url, rows, MODEL)
        await stack.assert_idle()


@pytest.mark.parametrize("client", ["claude_code", "codex", "opencode", "pi"])
async def test_messages_and_responses_of_agents_go_to_workers_with_their_prefixes(
    tmp_path, client
) -> None:
    async with (
        Programs(tmp_path) as programs,
        aiohttp.ClientSession() as http,
        AsyncExitStack() as engines,
    ):
        arguments = ["serve", "--port", "0", "--admin-port", "0"]
        arguments += ["--names-aliases", f"{ALIAS}={MODEL}"]
        for _ in range(2):
            url = await engines.enter_async_context(served_by(answered))
            arguments += ["--worker", f"{url},kind=openai"]
        router = await programs.start("router", "router", arguments)

        await until_ready(http, router.url, 2)
        rows = list(recorded(client, chats=False))
        model = ALIAS if client == "claude_code" else MODEL
        await assert_turns_find_their_caches(http, router.url, rows, model)
        async with http.get(f"{router.facts['admin']}/explain?last=100") as answer:
            decisions = (await answer.json())["decisions"]
        assert_agents_are_distinguished(decisions, client)


def assert_agents_are_distinguished(decisions: list[dict[str, Any]], client: str) -> None:
    """Check that the decisions show an operator which client and which agent sent each request."""
    parents = {row["parent"] for row in decisions} - {None}
    if client == "pi":  # each of its sub-agents is a program of its own
        assert not parents
        return
    named = [row for row in decisions if row["session"] is not None]
    assert len(named) >= len(decisions) - 2, "only those that count tokens are of no session"
    assert all(row["group"] is not None for row in named)
    assert parents & {row["session"] for row in named}
    children = [row for row in decisions if row["parent"] is not None]
    assert children
    assert all(row["group"] != row["session"] for row in children)


async def test_the_model_list_has_one_alias_that_claude_code_shows(tmp_path) -> None:
    rows = list(recorded("claude_code", chats=False))
    (listing,) = [row for row in rows if row["path"].startswith("/v1/models")]
    flags = ["--names-aliases", f"{ALIAS}={MODEL}"]
    async with running(tmp_path, workers=1, router=flags) as stack:
        url = stack.url + listing["path"]
        async with stack.http.get(url, headers=dict(listing["headers"])) as answer:
            shown = [card["id"] for card in (await answer.json())["data"]]
    assert [name for name in shown if "claude" in name or "anthropic" in name] == [ALIAS]


async def test_the_doctor_names_an_attribution_line_that_changes(tmp_path) -> None:
    """The doctor names an attribution line at the prompt's beginning that changes with each
    request, so that workers do not find what the router expects.
    """
    rows = [row for row in recorded("claude_code", chats=False) if row["version"] == "2.1.170"]
    async with (
        Programs(tmp_path) as programs,
        aiohttp.ClientSession() as http,
        served_by(answered_without_cached_tokens) as url,
    ):
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--worker", f"{url},kind=openai"]
        router = await programs.start("router", "router", arguments)
        await until_ready(http, router.url, 1)
        for row in rows:
            await sent(http, router.url, row, MODEL)
        words = ("doctor", "--routing", router.facts["admin"], "--seconds", "0.2", "--json")
        status, said = await output_of(*words)
    report = json.loads(said)
    assert status == 1
    finding = report["findings"][0]
    assert finding["cause"] == "attribution-changes"
    assert "it changed in 6 of 6 requests" in finding["evidence"][0]["figure"]
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in finding["change"]
    assert report["expected_hit_share"] > 0.3 > report["reported_hit_share"]
