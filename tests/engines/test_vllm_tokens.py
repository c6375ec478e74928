"""Tests of gpt-oss and Mistral with real vLLM: the router's token ids of chats equal vLLM's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.wire.tokens import Chat
from router.settings.schema import Config
from router.settings.terms import tokenizer_terms
from router.tokens.encoders import PromptEncoder, encoders_of
from tests.effort import QUICK
from tests.engines.coded_models import DAY, CodedModel
from tests.engines.pool import Pool, routed
from tests.engines.vllm_server import MODEL
from tests.live.stack import until
from tests.router.tokens.chats import chats, text

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHATS = 25 if QUICK else 300
OF_ONE_CONVERSATION = 5
EVENT_WAIT_S = 0.05  # vLLM publishes a step's blocks in its own thread, and answers may overtake it
EXACT_SHARE = 0.99
Noted = Callable[[str, object], None]


Served = tuple[CodedModel, Pool]


def bodies(model: CodedModel, seed: int) -> Iterator[dict[str, Any]]:
    """Yield chats as clients send them: each conversation's turns in order, some edited or
    continued.
    """
    draw = random.Random(seed)
    while True:
        for chat in chats(draw, OF_ONE_CONVERSATION, model.thinks):
            body: dict[str, Any] = {"model": MODEL, "messages": chat.messages, "max_tokens": 1}
            if chat.tools is not None:
                body["tools"] = chat.tools
                if draw.random() < 0.2:
                    body["tool_choice"] = "none"
            if chat.reasoning_effort is not None:
                body["reasoning_effort"] = chat.reasoning_effort
            if draw.random() < 0.15:
                begun = {"role": "assistant", "content": text(draw)}
                body["messages"] = [*chat.messages, begun]
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            yield body


def own_ids(encoder: PromptEncoder, body: dict[str, Any]) -> list[int]:
    names = Chat.__struct_fields__
    chat = Chat(**{name: body[name] for name in names if name in body})
    ids: list[int] = encoder.encode_chat(chat, 0.0).tolist()
    return ids


def encoder_for(pool: Pool) -> PromptEncoder:
    found = encoders_of(tokenizer_terms(Config(tokenizer=str(pool.model), harmony_date=DAY)))
    assert found is not None
    encoder = found.of("vllm")
    assert encoder is not None
    return encoder


async def test_token_ids_of_chats_equal_those_that_vllm_renders(
    coded: Served, record_property: Noted
) -> None:
    model, pool = coded
    encoder, drawn = encoder_for(pool), bodies(model, 1)
    equal = longest = 0
    for _ in range(CHATS):
        body = next(drawn)
        path = "/v1/chat/completions/render"
        status, answer = await pool.servers[0].post(path, body | {"mm_payload": "none"})
        assert status == 200, answer
        equal += answer["token_ids"] == own_ids(encoder, body)
        longest = max(longest, len(answer["token_ids"]))
    record_property(f"{model.name} rendered", f"{equal} of {CHATS} equal, up to {longest} tokens")
    assert equal == CHATS


async def test_hits_of_single_chats_are_as_expected(coded: Served, record_property: Noted) -> None:
    model, pool = coded
    await hits(pool, bodies(model, 2), 3)  # vLLM reports its cache groups with its first blocks
    await asyncio.sleep(2 * EVENT_WAIT_S)
    seen = await hits(pool, bodies(model, 3), CHATS)
    equal = sum(expected == cached for expected, cached in seen)
    found = sum(cached > 0 for _, cached in seen)
    record_property(f"{model.name} hits", f"{equal} of {CHATS} equal; {found} found something")
    assert found > CHATS / 2
    assert equal >= CHATS * EXACT_SHARE, [one for one in seen if one[0] != one[1]]
    row = await pool.router.row(0)
    assert row["hits"]["mode"] == "exact", row["hits"]


async def test_without_exact_token_ids_hits_are_estimates(
    coded: Served, record_property: Noted
) -> None:
    """Without tokenizer and renderer, the router can only guess the hits of similar chats."""
    model, pool = coded
    never = ("--render", "never")
    async with routed(pool, pool.servers[0].spec, tokenizes=False, more=never) as other:
        await other.router.until_state(0, "ready")
        seen = await hits(other, bodies(model, 4), CHATS)
    equal = sum(expected == cached for expected, cached in seen)
    record_property(f"{model.name} by text", f"{equal} of {CHATS} equal")
    assert equal < CHATS * EXACT_SHARE


async def test_hits_are_as_expected_with_vllms_renderer(
    coded: Served, record_property: Noted
) -> None:
    """A router without a tokenizer expects the right hits, because it asks the server for the token
    ids of each chat.
    """
    model, pool = coded
    async with routed(pool, pool.servers[0].spec, tokenizes=False) as other:
        await other.router.until_state(0, "ready")

        async def exact() -> bool:
            return bool((await other.router.row(0))["hits"]["mode"] == "exact")

        await until(exact, "the renderer")
        await hits(other, bodies(model, 5), 3)
        await asyncio.sleep(2 * EVENT_WAIT_S)
        seen = await hits(other, bodies(model, 6), CHATS)
    equal = sum(expected == cached for expected, cached in seen)
    found = sum(cached > 0 for _, cached in seen)
    record_property(f"{model.name} by renderer", f"{equal} of {CHATS} equal; {found} found")
    assert found > CHATS / 2
    assert equal >= CHATS * EXACT_SHARE, [one for one in seen if one[0] != one[1]]


async def hits(pool: Pool, drawn: Iterator[dict[str, Any]], count: int) -> list[tuple[int, int]]:
    """Send `count` chats one at a time; return each one's (expected, cached) tokens."""
    before = len(pool.logged())
    for _ in range(count):
        await asyncio.sleep(EVENT_WAIT_S)
        status, answer = await pool.ask("/v1/chat/completions", next(drawn))
        assert status == 200, answer

    async def written() -> bool:
        return len(pool.logged()) >= before + count

    await until(written, "all lines of the access log")
    lines = pool.logged()[before:]
    return [(line["expected_hit_tokens"], line["cached_tokens"]) for line in lines]
