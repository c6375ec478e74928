"""Tests of a real, tiny model behind the router: many streams at once each get the tokens that they
get alone.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from engine.model.tiny import TinySettings, make_tiny
from engine.sampling.params import choice_seed
from tests.effort import QUICK
from tests.engine.real import Reference
from tests.live.stack import MODEL, Stack, metric_sum, running

STREAMS = 24 if QUICK else 64
OUTPUT_TOKENS = 16


# Qwen3's own parts are compared by their logits in tests/engine.
@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
async def test_many_concurrent_streams_have_the_same_text_as_each_alone(
    tmp_path: Path, arch: str
) -> None:
    make_tiny(tmp_path / "model", TinySettings(arch=arch))
    reference = Reference(tmp_path / "model")
    chance = random.Random(1)
    trunk = [chance.randrange(256) for _ in range(96)]
    prompts = [
        trunk[: chance.randrange(96)] + [chance.randrange(256) for _ in range(12)]
        for _ in range(STREAMS)
    ]
    async with running(tmp_path, workers=2, model=tmp_path / "model") as stack:

        async def answer_text(prompt: list[int]) -> list[int]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}
            body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                *events, done, end = (await reply.read()).decode().split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            parts = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
            return [token for part in parts for token in part["token_ids"]]

        answers = await asyncio.gather(*map(answer_text, prompts))
        await stack.assert_idle()
        rows = await stack.rows()
    assert len(rows) == 2
    assert answers == [reference.greedy(prompt, OUTPUT_TOKENS) for prompt in prompts]


async def test_a_chat_ends_at_the_end_token_and_choices_share_their_prompt(
    tmp_path: Path,
) -> None:
    make_tiny(tmp_path / "model")
    async with running(tmp_path, workers=1, model=tmp_path / "model") as stack:
        await assert_choices_share_the_prompt_and_equal_separate_requests(stack)
        url = f"{stack.url}/v1/chat/completions"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "good day"}]}
        async with stack.http.post(url, json=body | {"max_tokens": 400, "seed": 5}) as reply:
            assert reply.status == 200, await reply.text()
            answer = await reply.json()
    (choice,) = answer["choices"]
    # A random model gives one of its two end tokens within 400 tokens, almost surely.
    assert choice["finish_reason"] == "stop"
    assert 0 < answer["usage"]["completion_tokens"] < 400


async def assert_choices_share_the_prompt_and_equal_separate_requests(stack: Stack) -> None:
    chance = random.Random(2)
    prompt = [chance.randrange(256) for _ in range(400)]
    terms = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    terms |= {"return_token_ids": True}
    status, shared = await stack.complete(prompt, **terms, n=3, seed=11)
    assert status == 200, shared
    hits = await metric_sum(stack.http, stack.workers[0].url, "vllm:prefix_cache_hits_total")
    for index, choice in enumerate(shared["choices"]):
        _, alone = await stack.complete(prompt, **terms, seed=choice_seed(11, index))
        assert choice["token_ids"] == alone["choices"][0]["token_ids"]
    await stack.assert_idle()
    assert len({tuple(choice["token_ids"]) for choice in shared["choices"]}) == 3
    # Two of the three found all whole blocks of the prompt, except the last token.
    assert hits == 2 * 384
    assert shared["usage"]["prompt_tokens_details"]["cached_tokens"] == hits
