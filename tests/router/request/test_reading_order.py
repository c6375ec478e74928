"""Tests that long prompts which arrive together are read completely one after the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from router import assembly
from router.assembly import Router
from router.body.paths import PATHS
from router.http.parser import Fields
from router.keys.key_file import KeyTerms
from router.settings.schema import Config
from tests.router.steps import Steps, run_until_all_wait
from tests.tokenizer_folder import write_model

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TEXT_BYTES = 160_000  # 40,000 tokens, where four bytes are one
TOKENIZED_BYTES = 40_000  # as many tokens with a tokenizer that knows no words


def body_of(path: str, number: int, text_bytes: int = TEXT_BYTES) -> bytes:
    text = f"{number} {'The quick brown fox jumps. ' * (text_bytes // 27)}"
    if path == COMPLETIONS:
        return json.dumps({"model": "m", "prompt": text}).encode()
    name = "messages" if path == CHAT else "input"
    return json.dumps({"model": "m", name: [{"role": "user", "content": text}]}).encode()


@asynccontextmanager
async def router_of(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Path | None, short: Executor, long: Executor
) -> AsyncIterator[Router]:
    """Yield a router that reads prompts with the given threads, one pool for short and one for long
    prompts.
    """
    monkeypatch.setattr(assembly, "_reading_threads", lambda: (short, long))
    named = None if tokenizer is None else str(tokenizer)
    async with aiohttp.ClientSession() as http:
        router = Router(Config(port=0, admin_port=0, tokenizer=named), http)
        yield router
        await router.aclose()


async def ends(router: Router, steps: Steps, path: str, bodies: list[bytes]) -> list[int]:
    """Return for each request, in order of arrival, how many jobs the threads had done when it was
    completely read.
    """
    ended: dict[int, int] = {}
    done = 0

    async def read(number: int, body: bytes) -> None:
        headers = Fields(b"POST / HTTP/1.1\r\n\r\n")
        await router.inference.reader.arrival(body, PATHS[path], headers, KeyTerms())
        ended[number] = done

    tasks = [asyncio.create_task(read(*numbered)) for numbered in enumerate(bodies)]
    await run_until_all_wait()
    while steps.step():
        done += 1
        await run_until_all_wait()
    await asyncio.gather(*tasks)
    return [ended[number] for number in range(len(bodies))]


@pytest.mark.parametrize(
    ("path", "requests"), [(CHAT, 16), (CHAT, 64), (COMPLETIONS, 16), (RESPONSES, 16)]
)
@pytest.mark.parametrize("tokenizer", [False, True], ids=["text", "tokens"])
async def test_half_of_the_long_prompts_are_read_in_half_of_the_time(
    monkeypatch, tmp_path: Path, path: str, requests: int, tokenizer: bool
) -> None:
    model = write_model(tmp_path) if tokenizer else None
    text_bytes = TOKENIZED_BYTES if tokenizer else TEXT_BYTES
    bodies = [body_of(path, number, text_bytes) for number in range(requests)]
    steps = Steps()
    async with router_of(monkeypatch, model, Steps(), steps) as router:
        ended = await ends(router, steps, path, bodies)
    assert ended == sorted(ended), "first come, first served"
    assert ended[requests // 2 - 1] <= 0.5 * ended[-1]


async def test_a_short_prompt_does_not_wait_for_a_long_one(monkeypatch, tmp_path: Path) -> None:
    long, short = Steps(), Steps()
    async with router_of(monkeypatch, write_model(tmp_path), short, long) as router:
        headers = Fields(b"POST / HTTP/1.1\r\n\r\n")
        tasks = [
            asyncio.create_task(
                router.inference.reader.arrival(body, PATHS[COMPLETIONS], headers, KeyTerms())
            )
            for body in (body_of(COMPLETIONS, 1), b'{"model": "m", "prompt": "hi"}')
        ]
        await run_until_all_wait()
        assert short.step()
        await run_until_all_wait()
        assert [task.done() for task in tasks] == [False, True]
        while long.step():
            await run_until_all_wait()
        await asyncio.gather(*tasks)
