"""Tests of the way from a request's body to its block hashes: exact ids, text, chats, tokenizers,
seeds, bounds.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.wire.events import BlockStored, encode_batch
from engine.wire.tokens import Chat, PromptError, WordTokenizer
from kvkernels import EventBatch, chain_hashes, chain_seed, media_chain_hashes
from policies.facts import Stored
from router.body.paths import PATHS
from router.body.scan import ScanLimits, Scanned
from router.core.workers.kv_events import WireEvents, chain_of
from router.engines.media import Medium
from router.engines.render_way import Rendered
from router.http.errors import ClientError
from router.request.prompts import Prompt
from router.tokens.rendered_prompts import RenderedPrompt, RenderRequest
from tests.oracles import index as twins
from tests.router.property_support import patient
from tests.router.request.prompt_support import NOW_S, chat, completion, read, reader_of, same


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_token_ids_are_hashed_once_for_each_block_size(executor) -> None:
    ids = list(range(10))
    prompt = await read(completion(ids), executor, sizes=(4, 8, 4))
    assert (prompt.tokens, prompt.approximate) == (10, False)
    assert sorted(prompt.chains) == [4, 8]
    tokens = np.array(ids, dtype=np.int32)
    assert same(prompt.chains[4], chain_hashes(tokens, 4, 0))
    assert same(prompt.chains[8], chain_hashes(tokens, 8, 0))
    assert len((await read(completion(ids), executor, sizes=())).chains) == 0


IDS = st.integers(0, 9) | st.integers(0, 2**63 - 1) | st.sampled_from([2**31 - 1, 2**31, 2**62])


@patient
@given(ids=st.lists(IDS, min_size=1, max_size=24), repeats=st.sampled_from([1, 4_000]))
@example(ids=[5, 2**62, 7, 8], repeats=1)
@example(ids=[1, 2, 3, 4, 2**31, 6, 7, 8], repeats=4_000)
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/completions", "prompt"),
        ("/generate", "input_ids"),
        ("/inference/v1/generate", "token_ids"),
        ("/v1/embeddings", "input"),
    ],
)
async def test_token_ids_beyond_int32_are_hashed_as_in_kv_events(path, name, ids, repeats) -> None:
    ids = ids * repeats  # of 4,000: a body that is read without Python's lock
    body = json.dumps({name: ids}).encode()
    event = Stored(tuple(range(len(ids) // 4)), None, tuple(ids[: len(ids) // 4 * 4]), 4)
    with ThreadPoolExecutor(1) as executor:
        reader = reader_of(None, executor)
        scanned = await reader.scan(body, PATHS[path], ScanLimits())
        prompt = await reader.read(scanned, "m", (4, 3), body_bytes=len(body))
    assert (prompt.tokens, prompt.approximate) == (len(ids), False)
    assert same(prompt.chains[4], chain_of(event, 0))
    assert same(prompt.chains[3], twins.wide_chain_hashes(np.array(ids, np.int64), 3))


async def test_long_prompts_get_the_same_hashes_in_a_thread(executor) -> None:
    ids = list(range(40_000))
    prompt = await read(completion(ids), executor)
    assert same(prompt.chains[4], chain_hashes(np.array(ids, dtype=np.int32), 4, 0))


async def test_the_first_of_several_prompts_gives_the_chain_and_all_count_tokens(executor) -> None:
    prompt = await read(completion([[1, 2, 3, 4], [5] * 7]), executor)
    assert (prompt.tokens, prompt.longest_tokens) == (11, 7)
    alone = await read(completion([1, 2, 3, 4]), executor)
    assert same(prompt.chains[4], alone.chains[4])
    texts = await read(completion(["x" * 40, "y" * 80]), executor)
    assert (texts.tokens, texts.longest_tokens, texts.approximate) == (30, 20, True)


async def test_salts_models_and_text_give_distinct_hashes(executor) -> None:
    ids = [0x20202020] * 8  # the bytes of blanks
    seen = [
        (await read(completion(ids), executor)).chains[4],
        (await read(completion(ids, cache_salt="a"), executor)).chains[4],
        (await read(completion(ids, cache_salt="b"), executor)).chains[4],
        (await read(completion(ids, cache_salt="a"), executor, model="n")).chains[4],
        (await read(completion(" " * 32), executor)).chains[4],
        (await read(completion(" " * 32, cache_salt="a"), executor)).chains[4],
    ]
    assert len({hashes.tobytes() for hashes in seen}) == len(seen)
    assert same(seen[1], chain_hashes(np.array(ids, np.int32), 4, chain_seed("m", None, "a")))


@patient
@given(shared=st.text(max_size=60), one=st.text(max_size=20), other=st.text(max_size=20))
def test_texts_with_a_common_prefix_share_its_blocks(shared, one, other) -> None:
    async def chains() -> list[list[int]]:
        with ThreadPoolExecutor(1) as executor:
            prompts = [await read(completion(f"x{shared}{end}"), executor) for end in (one, other)]
        return [prompt.chains[4].tolist() for prompt in prompts]

    first, second = asyncio.run(chains())
    common = len(f"x{shared}".encode()) // 16
    assert first[:common] == second[:common]


async def test_the_next_turn_of_a_chat_begins_with_the_blocks_of_the_last_one(executor) -> None:
    first = await read(chat("how are you today, my dear old friend?"), executor)
    second = await read(chat("how are you today, my dear old friend?", "and now?"), executor)
    assert first.approximate
    assert len(first.chains[4]) >= 2
    assert same(second.chains[4][: len(first.chains[4])], first.chains[4])
    tools = await read(chat("hi", tools=[{"type": "function"}]), executor)
    assert not same(tools.chains[4][:1], (await read(chat("hi" * 20), executor)).chains[4][:1])


async def test_unusual_text_is_no_error(executor) -> None:
    for text in ("", "\ud800", "ü", "\x00" * 9):
        scanned = Scanned(prompts=(text,)) if text else Scanned(messages=({"role": "user"},))
        assert (await read(scanned, executor)).tokens >= 1


async def test_text_and_chats_are_exact_with_a_tokenizer(executor) -> None:
    words = WordTokenizer(1000)
    prompt = await read(completion("one two three four"), executor, words)
    ids = np.array(words.encode("one two three four"), dtype=np.int32)
    assert (prompt.tokens, prompt.approximate) == (4, False)
    assert same(prompt.chains[4], chain_hashes(ids, 4, 0))
    talk = await read(chat("one two"), executor, words)
    chat_ids = words.encode_chat(Chat(messages=[{"role": "user", "content": "one two"}]), NOW_S)
    assert talk.tokens == len(chat_ids)
    assert same(talk.chains[4], chain_hashes(np.array(chat_ids, dtype=np.int32), 4, 0))
    several = await read(completion(["one two", "three"]), executor, words)
    assert (several.tokens, several.longest_tokens) == (3, 2)


async def test_a_template_that_refuses_is_counted_and_the_text_is_used_instead(executor) -> None:
    class Refusing(WordTokenizer):
        def encode_chat(self, chat: Chat, now_s: float) -> list[int]:
            raise PromptError("roles must alternate")

    reader = reader_of(Refusing(1000), executor)
    prompt = await reader.read(chat("hello there, how are you"), "m", (4,))
    assert prompt.approximate
    assert reader.template_refusals == 1
    plain = await read(chat("hello there, how are you"), executor)
    assert same(prompt.chains[4], plain.chains[4])


async def test_the_fields_that_shape_a_chat_reach_its_template(executor) -> None:
    seen: list[Chat] = []

    class Noting(WordTokenizer):
        def encode_chat(self, chat: Chat, now_s: float) -> list[int]:
            assert now_s == NOW_S
            seen.append(chat)
            return [1]

    fields = {
        "tools": [{"type": "function"}],
        "documents": [{"title": "t"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "add_special_tokens": True,
    }
    await read(chat("x", **fields), executor, Noting(1000))
    (noted,) = seen
    assert {name: getattr(noted, name) for name in fields} == fields


async def test_a_full_tokenizer_queue_refuses_the_request_with_429(executor) -> None:
    release = threading.Event()

    class Slow(WordTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            release.wait(10)
            return [1]

    reader = reader_of(Slow(1000), executor, 3)
    waiting = [asyncio.create_task(reader.read(completion("x"), "m", (4,))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ClientError) as refused:
        await reader.read(completion("x"), "m", (4,))
    assert (refused.value.status, refused.value.code) == (429, "router_full")
    assert (await reader.read(completion([1, 2]), "m", (4,))).tokens == 2  # needs no thread
    waiting[2].cancel()  # its client left
    release.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in done] == [Prompt, Prompt, asyncio.CancelledError]
    assert (await reader.read(completion("x"), "m", (4,))).tokens == 1


async def test_an_adapter_has_its_own_hashes_equal_to_those_of_its_events(
    executor,
) -> None:
    ids = list(range(8))
    reader = reader_of(None, executor)
    base = await reader.read(completion(ids), "m", (4,))
    adapted = await reader.read(completion(ids), "m", (4,), "tuned")
    tokens = np.array(ids, dtype=np.int32)
    assert not same(adapted.chains[4], base.chains[4])
    assert same(adapted.chains[4], chain_hashes(tokens, 4, chain_seed("m", "tuned")))
    event = BlockStored((1,), None, tuple(ids[:4]), 4, lora_name="tuned")
    (stored,) = WireEvents(EventBatch(encode_batch(0.0, [event])), "m")
    assert isinstance(stored, Stored)
    assert same(adapted.chains[4][:1], chain_hashes(tokens[:4], 4, stored.seed))
    texts = [await reader.read(completion("x" * 64), "m", (4,), name) for name in (None, "tuned")]
    assert not same(texts[0].chains[4], texts[1].chains[4])


class BeginningKnown:
    """A stand-in for render servers, whose memo has the beginning of the prompt."""

    def kind(self, model: str) -> str:
        return "vllm"

    def can(self, asked: RenderRequest) -> bool:
        return True

    async def of(self, asked: RenderRequest, in_thread: Any) -> RenderedPrompt:
        ids = np.arange(8, dtype=np.int32)
        return RenderedPrompt([Rendered(ids, (Medium("cat", 2, 4),))], "", rest_tokens=900)


async def test_an_estimated_length_never_makes_a_prompt_too_long(
    executor: ThreadPoolExecutor,
) -> None:
    """A prompt is never refused as too long because of an estimated length: the tokens after the
    known beginning are estimated from bytes, and the beginning has images.
    """
    reader = reader_of(None, executor, rendered=BeginningKnown())
    asked = RenderRequest("/v1/chat/completions", b"{}", "m", None)
    prompt = await reader.read(chat("hi"), "m", (4,), asked=asked)
    assert (prompt.tokens, prompt.longest_tokens, prompt.approximate) == (908, 8, False)
    ids = np.arange(8, dtype=np.int32)
    assert same(prompt.chains[4], media_chain_hashes(ids, 4, 0, [("cat", 2, 4)]))
