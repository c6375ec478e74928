"""Tests of which prompts are tokenized exactly, depending on options of the body, media, and models
whose tokens are not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from engine.wire.tokens import WordTokenizer
from router.body.scan import scan
from router.tokens.check import TokenCheck
from router.tokens.media import has_media, without_media
from tests.router.request.prompt_support import chat, completion, read, reader_of, same


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_text_is_encoded_with_the_options_of_the_body(executor) -> None:
    class Bounded(WordTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [7] * add_special_tokens + super().encode(text)

    words = Bounded(1000)
    ids = words.encode("one two three", False)

    async def encoded(**fields: Any) -> list[int]:
        prompt = await read(completion("one two three", **fields), executor, words)
        assert not prompt.approximate
        assert prompt.tokens == len(prompt.encoded[0])
        return prompt.encoded[0].tolist()

    assert await encoded() == [7, *ids]
    assert await encoded(add_special_tokens=False) == ids
    assert await encoded(truncate_prompt_tokens=2) == ids[-2:]
    assert await encoded(truncate_prompt_tokens=2, truncation_side="right") == [7, ids[0]]
    assert await encoded(truncate_prompt_tokens=9) == [7, *ids]
    for odd in (0, True, "2", [], -2):
        assert await encoded(truncate_prompt_tokens=odd) == [7, *ids]
    # The engine's own limit is not known here.
    limited = await read(completion("one two", truncate_prompt_tokens=-1), executor, words)
    assert limited.approximate
    given = await read(completion([1, 2, 3, 4, 5], truncate_prompt_tokens=4), executor, words)
    assert same(given.chains[4], (await read(completion([2, 3, 4, 5]), executor)).chains[4])
    assert given.encoded == ()


async def test_unused_tools_are_dropped_if_the_workers_drop_them(executor) -> None:
    fields: dict[str, Any] = {"tools": [{"type": "function"}], "tool_choice": "none"}
    words = WordTokenizer(1000)
    plain = await read(chat("hello"), executor, words)
    kept = await reader_of(words, executor).read(chat("hello", **fields), "m", (4,))
    assert kept.tokens > plain.tokens
    dropping = reader_of(words, executor, drops_unused_tools=True)
    assert (await dropping.read(chat("hello", **fields), "m", (4,))).tokens == plain.tokens
    used = await dropping.read(chat("hello", **fields | {"tool_choice": "auto"}), "m", (4,))
    assert used.tokens == kept.tokens


async def test_a_chat_with_its_own_template_is_read_as_text(executor) -> None:
    reader = reader_of(WordTokenizer(1000), executor)
    assert (await reader.read(chat("hello", chat_template="{{ x }}"), "m", (4,))).approximate
    assert reader.template_refusals == 1


async def test_prompts_of_untrusted_models_are_read_as_text(executor) -> None:
    check = TokenCheck(lambda: 0.0, lambda: 1.0)
    reader = reader_of(WordTokenizer(1000), executor, check=check)
    check.probed("m", 0, "differs")
    assert (await reader.read(chat("hello"), "m", (4,))).approximate
    assert not (await reader.read(chat("hello"), "n", (4,))).approximate
    assert not (await reader.read(chat("hello"), "m", (4,), "tuned")).approximate
    assert reader.template_refusals == 0


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def test_images_are_hashed_by_digest_at_their_position(executor) -> None:
    system = {"role": "system", "content": "Look closely. " * 30}

    async def chain(*parts: Any, tokenizer: Any = None) -> list[int]:
        body = {"messages": [system, {"role": "user", "content": list(parts)}]}
        scanned = scan(json.dumps(body).encode(), "/v1/chat/completions")
        prompt = await read(scanned, executor, tokenizer)
        assert prompt.approximate
        assert prompt.tokens < 500
        return prompt.chains[4].tolist()

    one, other = image("A" * 90_000), image("A" * 89_999 + "B")
    text = {"type": "text", "text": "what is it? " * 20}
    first = await chain(text, one, text)
    second = await chain(text, other, text)
    assert first == await chain(text, one, text, tokenizer=WordTokenizer(1000))
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert shared * 16 > len(json.dumps(system)) + 200  # the same as far as the image
    assert len(first) - shared > 10
    assert first[:shared] == (await chain(text, one, one))[:shared]


def test_digests_replace_only_long_media() -> None:
    long = "x" * 1_000
    audio = {"type": "input_audio", "input_audio": {"data": long, "format": "wav"}, "n": [1, long]}
    messages = [
        {"role": "user", "content": [long, {"type": "text", "text": long}, audio]},
        {"role": "user", "content": long},
        {"role": "assistant"},
    ]
    kept = json.dumps(messages)
    shown = without_media(messages)
    digest = xxhash.xxh3_128_hexdigest(long.encode())
    assert shown[0]["content"][2] == {
        "type": "input_audio",
        "input_audio": {"data": digest, "format": "wav"},
        "n": [1, digest],
    }
    assert shown[0]["content"][:2] == messages[0]["content"][:2]  # type: ignore[index]
    assert shown[1:] == messages[1:]
    assert json.dumps(messages) == kept
    assert has_media(messages)
    assert not has_media(messages[1:])
    assert not has_media([{"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}])
