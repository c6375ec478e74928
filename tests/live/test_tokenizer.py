"""Tests of a router and an engine with the model's own tokenizer: chats are placed by their exact
tokens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.live.stack import MODEL, Stack, running, until
from tests.tokenizer_folder import write_model
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM = {"role": "system", "content": "You answer in one word, and never tell why. " * 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    router = ["--tokenizer", str(folder)]
    logs = tmp_path_factory.mktemp("logs")
    async with running(logs, workers=3, router=router, tokenizer=folder) as stack:
        yield stack


async def chat(stack: Stack, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Send a chat; return the answer's text, the expected hits and the worker's cached tokens."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 4} | fields
    headers = {"x-warmroute-explain": "1"}
    url = f"{stack.url}/v1/chat/completions"
    async with stack.http.post(url, json=body, headers=headers) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        explanation = decision_in(reply.headers["x-warmroute-explain"])
    return {
        "text": answer["choices"][0]["message"]["content"],
        "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "prompt": answer["usage"]["prompt_tokens"],
        **explanation,
    }


async def test_the_second_turn_of_a_chat_hits_its_exact_tokens(stack: Stack) -> None:
    turns = [SYSTEM, {"role": "user", "content": "Is water wet?"}]
    first = await chat(stack, turns)
    assert not first["approximate"]
    assert first["prompt_tokens"] == first["prompt"]

    async def resident() -> bool:
        row = await stack.row(first["worker"])
        return bool(row["resident_blocks"] >= first["prompt"] // 16)

    await until(resident, "the first turn's blocks")
    turns += [
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And fire?"},
    ]
    second = await chat(stack, turns)
    assert second["worker"] == first["worker"]
    assert not second["approximate"]
    assert second["expected_hit_tokens"] == second["cached"] >= first["prompt"] // 16 * 16
    await stack.assert_idle()


async def test_text_prompts_are_counted_as_the_engine_counts_them(stack: Stack) -> None:
    text = "Fish swim, birds fly. " * 20
    headers = {"x-warmroute-explain": "1"}
    body = {"model": MODEL, "prompt": text, "max_tokens": 1}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as reply:
        usage = (await reply.json())["usage"]
        explanation = decision_in(reply.headers["x-warmroute-explain"])
    assert explanation["prompt_tokens"] == usage["prompt_tokens"]
    assert not explanation["approximate"]


async def test_a_chat_that_the_template_refuses_is_still_dispatched(stack: Stack) -> None:
    """A chat that the template refuses is still sent to a worker, which decides about it; the
    router counts that it could not tokenize the chat exactly.
    """
    before = await stack.metric("warmroute_template_refusals_total")
    broken = {"role": "assistant", "content": "x", "tool_calls": 5}
    body = {"model": MODEL, "messages": [broken], "max_tokens": 1}
    status, answer = await stack.post(json.dumps(body).encode(), "/v1/chat/completions")
    assert status == 400, answer  # the engine's own answer
    assert await stack.metric("warmroute_template_refusals_total") == before + 1
    await stack.assert_idle()
