"""Tests of valid and invalid answers of servers that render prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.wire.events import WireError
from router.engines.render_way import CHATS, COMPLETIONS, NotRenderedError, Post, RenderWay
from router.engines.rendering import LlamaCppRender, SglangRender, VllmRender

CHAT = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'
TEXT = b'{"model":"m","prompt":"a"}'


def post_function(pages: dict[str, Any], asked: list[tuple[str, bytes]]) -> Post:
    async def post(path: str, body: bytes) -> bytes:
        asked.append((path, body))
        page = pages[path]
        return page if isinstance(page, bytes) else json.dumps(page).encode()

    return post


async def rendered(
    way: RenderWay, pages: dict[str, Any], path: str = CHATS, body: bytes = CHAT
) -> tuple[list[list[int]], list[tuple[str, bytes]]]:
    asked: list[tuple[str, bytes]] = []
    found = await way.render(post_function(pages, asked), path, body)
    return [one.ids.tolist() for one in found], asked


async def test_vllm_gets_the_clients_body_and_renders_without_media_payloads() -> None:
    ids, asked = await rendered(VllmRender(), {f"{CHATS}/render": {"token_ids": [1, 2**31]}})
    assert ids == [[1, 2**31]]
    assert asked == [(f"{CHATS}/render", CHAT[:-1] + b',"mm_payload":"none"}')]
    pages = {f"{COMPLETIONS}/render": [{"token_ids": [1]}, {"token_ids": [2], "features": None}]}
    assert (await rendered(VllmRender(), pages, COMPLETIONS, TEXT))[0] == [[1], [2]]


async def test_media_are_returned_in_the_order_of_their_positions() -> None:
    features = {
        "mm_hashes": {"image": ["b", "a"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 5, "length": 2}, {"offset": 0, "length": 1}],
            "audio": [{"offset": 2, "length": 3}],
        },
    }
    page = {f"{CHATS}/render": {"token_ids": [9] * 8, "features": features}}
    (one,) = await VllmRender().render(post_function(page, []), CHATS, CHAT)
    assert list(one.media) == [("a", 0, 1), ("c", 2, 3), ("b", 5, 2)]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"null",
        b'{"token_ids":[1,',
        {"token_ids": []},
        {"token_ids": "abc"},
        {"token_ids": [-1]},
        {"token_ids": [1.5]},
        {"token_ids": [2**63]},
        {"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}},
        {
            "token_ids": [1],
            "features": {
                "mm_hashes": {"image": ["a"]},
                "mm_placeholders": {"image": [{"offset": 1, "length": 1}]},
            },
        },
    ],
)
async def test_invalid_answers_of_vllm_are_refused(answer: Any) -> None:
    with pytest.raises(WireError):
        await rendered(VllmRender(), {f"{CHATS}/render": answer})


async def test_sglang_tokenizes_chats_and_prompts() -> None:
    assert (await rendered(SglangRender(), {"/v1/tokenize": {"tokens": [3, 4]}}))[0] == [[3, 4]]
    pages = {"/v1/tokenize": {"tokens": [[1, 2], [3]]}}
    assert (await rendered(SglangRender(), pages, COMPLETIONS, TEXT))[0] == [[1, 2], [3]]
    begun = CHAT[:-1] + b',"add_generation_prompt":false}'
    with pytest.raises(NotRenderedError):  # chats do not know this field
        await rendered(SglangRender(), {"/v1/tokenize": {"tokens": [3]}}, CHATS, begun)
    for wrong in ({"tokens": 3}, {"tokens": [[1], "a"]}, {"tokens": [[]]}, b"x"):
        with pytest.raises(WireError):
            await rendered(SglangRender(), {"/v1/tokenize": wrong})


async def test_llamacpp_renders_a_chat_as_text_and_then_tokenizes_it() -> None:
    pages = {"/apply-template": {"prompt": "<a>"}, "/tokenize": {"tokens": [7]}}
    ids, asked = await rendered(LlamaCppRender(), pages)
    assert ids == [[7]]
    assert asked[0] == ("/apply-template", CHAT)
    assert json.loads(asked[1][1])["content"] == "<a>"
    ids, asked = await rendered(LlamaCppRender(), pages, COMPLETIONS, TEXT)
    assert ids == [[7]]
    assert [path for path, _ in asked] == ["/tokenize"]
    for several in (b'{"prompt":["a","b"]}', b'{"prompt":["a"]}', b"{}"):
        with pytest.raises(NotRenderedError):
            await rendered(LlamaCppRender(), pages, COMPLETIONS, several)
