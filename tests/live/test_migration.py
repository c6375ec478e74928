"""Tests of workers that break off in the middle of streams: clients get the whole stream without
noticing.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engine.timed import continuation
from simulator.live.processes import Program, Programs
from tests.engine.model_dirs import write_model
from tests.live.cutter import Fate, cutter
from tests.live.stack import MODEL, Stack, engine_arguments, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOVES = 2
ROUTER = ["--migration-moves", str(MOVES), "--timeouts-between-bytes-s", "0.4"]
# The tests kill many workers, so these flags eject none and limit no retries.
PATIENT = ["--ejection-failures", "1000", "--ejection-requests", "100000"]
PATIENT += ["--retries-budget-per-s", "100000", "--retries-attempts", "10"]
TOKENS = 6
PROMPT = [5, 6, 7]
PATHS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": PROMPT},
    "chat/completions": {"messages": [{"role": "user", "content": "Good day"}]},
}
_MADE_UP = re.compile(rb'"id":"[^"]*"|"created":\d+')


@dataclass
class Cut:
    """A router and its workers, each behind a proxy that cuts replies off. Lifetime: test
    module.
    """

    stack: Stack
    fates: deque[Fate]

    async def stream(self, path: str, *fates: Fate, **fields: Any) -> bytes:
        """Send a request and return the bytes of its stream; each worker's reply to it is cut by
        the next of these fates.
        """
        body = {"model": MODEL, "max_tokens": TOKENS, "stream": True, **PATHS[path], **fields}
        self.fates.extend(fates)
        try:
            async with self.stack.http.post(f"{self.stack.url}/v1/{path}", json=body) as reply:
                assert reply.status == 200, await reply.text()
                return await reply.read()
        finally:
            self.fates.clear()

    async def breaks(self, path: str, *fates: Fate, **fields: Any) -> bool:
        """Send a request whose replies are cut off as `fates` say; return whether the client sees
        that its stream broke off.
        """
        try:
            await self.stream(path, *fates, **fields)
        except aiohttp.ClientError:
            return True
        return False

    async def count(self, **labels: str) -> float:
        """Return the count of migrations with these labels (result, reason)."""
        async with self.stack.http.get(f"{self.stack.admin}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        own = [line for line in lines if line.startswith("warmroute_migrations_total{")]
        found = [line for line in own if all(label in line for label in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cut(tmp_path_factory):
    async with AsyncExitStack() as exits:
        programs = await exits.enter_async_context(Programs(tmp_path_factory.mktemp("logs")))
        http = await exits.enter_async_context(aiohttp.ClientSession())
        fates: deque[Fate] = deque()
        arguments = ["serve", "--port", "0", "--admin-port", "0", *ROUTER, *PATIENT]
        workers = []
        for n in range(4):
            workers.append(await programs.start(f"w{n}", "engine", engine_arguments(speed=5)))
            url = await exits.enter_async_context(cutter(workers[n].url, fates))
            arguments += ["--worker", url]
        router = await programs.start("router", "router", arguments)
        stack = Stack(programs, router, workers, http)
        for worker_id in range(4):
            await stack.until_state(worker_id, "ready")
        yield Cut(stack, fates)
        await stack.assert_idle()


def normalized(stream: bytes) -> bytes:
    """Return the stream without the fields that engines generate, such as ids and times."""
    return _MADE_UP.sub(b"", stream)


def chunks(stream: bytes) -> list[dict[str, Any]]:
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("how", ["reset", "close", "garbage", "half", "end"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_complete_when_its_worker_dies_after_any_event(
    cut: Cut, path: str, how: Any
) -> None:
    whole = await cut.stream(path, **USAGE)
    for events in range(whole.count(b"\n\n") + 1):
        stream = await cut.stream(path, Fate(events, how), **USAGE)
        said = chunks(stream)
        assert len({chunk["id"] for chunk in said}) == 1
        usage, whole_usage = said[-1].pop("usage"), chunks(whole)[-1]["usage"]
        usage.pop("prompt_tokens_details", None)  # the cached tokens at a dead worker are unknown
        whole_usage.pop("prompt_tokens_details")
        assert usage == whole_usage
        assert (
            normalized(stream).partition(b'"usage"')[0]
            == normalized(whole).partition(b'"usage"')[0]
        )
    await cut.stack.assert_idle()


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_survives_two_worker_deaths_and_breaks_at_the_third(
    cut: Cut, path: str
) -> None:
    whole = await cut.stream(path)
    moved = await cut.count(result="moved")
    for first, second in ((1, 1), (2, 3), (3, 1)):
        stream = await cut.stream(path, Fate(first, "reset"), Fate(second, "close"))
        assert normalized(stream) == normalized(whole)
    assert await cut.count(result="moved") == moved + 6
    assert await cut.breaks(path, *[Fate(1, "reset")] * (MOVES + 1))
    assert await cut.count(result="unfit", reason="early_close") >= 1
    await cut.stack.assert_idle()


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_moves_from_a_worker_that_stalls(cut: Cut, path: str) -> None:
    whole = await cut.stream(path)
    moved = await cut.count(result="moved", reason="timeout_between")
    assert normalized(await cut.stream(path, Fate(3, "stall"))) == normalized(whole)
    assert await cut.count(result="moved", reason="timeout_between") == moved + 1


async def test_requested_token_ids_are_complete_after_a_move(cut: Cut) -> None:
    said = continuation(PROMPT, TOKENS, 32_000)
    for events in range(TOKENS):
        stream = await cut.stream("completions", Fate(events, "reset"), return_token_ids=True)
        choices = [chunk["choices"][0] for chunk in chunks(stream)]
        assert [choice["token_ids"] for choice in choices] == [[token] for token in said]
        prompts = [choice.get("prompt_token_ids") for choice in choices]
        assert prompts == [PROMPT] + [None] * (TOKENS - 1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"logprobs": 1}),
        ("completions", {"stop": ["x"]}),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_streams_that_cannot_move_break_off(
    cut: Cut, path: str, fields: dict[str, Any]
) -> None:
    assert not await cut.breaks(path, **fields)
    assert await cut.breaks(path, Fate(3, "reset"), **fields)
    await cut.stack.assert_idle()


async def test_several_prompts_and_plain_answers_pass_unchanged(cut: Cut) -> None:
    whole = await cut.stream("completions", prompt=[[1, 2], [3, 4]])
    assert whole.count(b"\n\n") == 2 * TOKENS + 1
    status, answer = await cut.stack.complete(PROMPT, max_tokens=3)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    status, answer = await cut.stack.complete(PROMPT, max_tokens=10**6, stream=True)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_the_migratable_header_shows_whether_a_stream_can_move(cut: Cut) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 2}
    url = f"{cut.stack.url}/v1/completions"
    async with cut.stack.http.post(url, json=body) as reply:
        assert reply.headers["x-warmroute-migratable"] == "1"
    async with cut.stack.http.post(url, json=body | {"stop": ["x"]}) as reply:
        assert "x-warmroute-migratable" not in reply.headers


@pytest.mark.parametrize(
    ("ending", "options"), [(signal.SIGKILL, ["tokenizer"]), (signal.SIGSTOP, [])]
)
async def test_a_stream_moves_from_an_engine_that_dies_or_freezes(
    tmp_path: Any, ending: signal.Signals, options: list[str]
) -> None:
    """Another worker continues the stream of one that dies or freezes, also with a tokenizer whose
    tokens are parts of characters.
    """
    more = {name: write_model(tmp_path / "model") for name in options}
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 40}
    probed = ["--migration-moves", "1", "--intervals-health-s", "0.1", "--timeouts-probe-s", "0.4"]
    async with running(tmp_path, workers=3, router=probed, speed=1, **more) as stack:
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body) as reply:
            whole = await reply.read()
        hit = None
        async with stack.http.post(url, json=body) as reply:
            stream = b""
            async for piece in reply.content.iter_any():
                stream += piece
                if hit is None and stream.count(b"\n\n") >= 5:
                    hit = stack.workers[int(reply.headers["x-warmroute-worker"])]
                    hit.process.send_signal(ending)
        assert hit is not None
        assert normalized(stream) == normalized(whole)
        assert await stack.metric("warmroute_migrations_total") == 1
        assert await stack.metric("warmroute_migration_gap_seconds_count") == 1
        assert await stack.metric("warmroute_migration_kept_tokens") == 0
        if ending is signal.SIGSTOP:
            hit.process.send_signal(signal.SIGCONT)


async def test_all_streams_of_a_killed_worker_are_complete(tmp_path: Any) -> None:
    streams, tokens = 60, 200

    async with running(tmp_path, workers=3, router=["--migration-moves", "2"], speed=1) as stack:
        killed: list[Program] = []

        async def ask(n: int) -> list[int]:
            body = {"model": MODEL, "prompt": [n] * 40, "max_tokens": tokens, "stream": True}
            said = b""
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                async for piece in reply.content.iter_any():
                    said += piece
                    if not killed and said.count(b"\n\n") >= 20:
                        killed.append(stack.workers[int(reply.headers["x-warmroute-worker"])])
                        killed[0].process.kill()
            texts = [chunk["choices"][0]["text"] for chunk in chunks(said)]
            return [int(word[1:]) for word in "".join(texts).split()]

        answers = await asyncio.gather(*map(ask, range(streams)))
        for n, answer in enumerate(answers):
            assert answer == continuation([n] * 40, tokens, 32_000), n
        assert await stack.metric("warmroute_migrations_total") >= 1
        await killed[0].process.wait()
        await stack.assert_idle()
