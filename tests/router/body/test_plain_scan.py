"""Tests of the native reader of plain bodies against the reader of all bodies: both give the same
result.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.body import paths
from router.body.scan import ScanLimits, scan
from router.request.prompts import Plain, plain_scan
from router.tokens.media import TEXT_PARTS
from tests.router.body.body_support import ASKED, BESIDES, BODIES
from tests.router.property_support import patient
from tests.router.request.prompt_support import read, reader_of, same

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = st.sampled_from([COMPLETIONS, CHAT, "/tokenize"])
LIMITS = ScanLimits(max_messages=4, max_prompts=3, max_choices=3, max_key_chars=8)
SIZES = (1, 4, 16)
HI = {"role": "user", "content": "hi"}


async def check_agreement(body: bytes, path: str, limits: ScanLimits = LIMITS) -> Plain | None:
    """Read a body with the native and the general reader, and check that they agree; return the
    native result, or None.
    """
    plain = plain_scan(body, path, limits)
    if plain is None:
        return None
    scanned = scan(body, path, limits)  # raises where the short one took what is refused
    for name in (
        "stream",
        "session",
        "cache_salt",
        "priority",
        "max_output_tokens",
        "agent_fields",
    ):
        assert getattr(plain, name) == getattr(scanned, name), name
    assert plain.model == scanned.model
    with ThreadPoolExecutor(1) as executor:
        for adapter in (None, "tuned"):
            reader = reader_of(None, executor)
            prompt = await reader.read(plain, "m", SIZES, adapter)
            wanted = await reader.read(scanned, "m", SIZES, adapter)
            assert (prompt.tokens, prompt.longest_tokens) == (wanted.tokens, wanted.longest_tokens)
            assert prompt.approximate == wanted.approximate
            assert sorted(prompt.chains) == sorted(wanted.chains)
            assert all(same(prompt.chains[size], wanted.chains[size]) for size in SIZES)
    return plain


def body_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": "some text, long enough for a block or two"}, COMPLETIONS),
        ({"prompt": ["a" * 20, "bc" * 30, "d"]}, COMPLETIONS),
        ({"prompt": [0, 1, 2**31 - 1, 5, 6]}, COMPLETIONS),
        ({"prompt": 'h\u00e9\n\t"\\/\u2028\U0001f600\x00\x1f\x7f' * 9}, COMPLETIONS),
        ({"messages": [HI, HI | {"name": '\u00fc\b\f\n\r\t\x0b\x1f"\\'}]}, CHAT),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"n": -7}]}]}, CHAT),
        ({"messages": [HI], "tools": [{"type": "function", "f": {"a": [True, None, {}]}}]}, CHAT),
        ({"tools": [{"type": "function"}], "messages": [HI]}, CHAT),
        ({"tools": [], "messages": [HI]}, CHAT),
        ({"tools": [1], "prompt": "x" * 40, "messages": [HI]}, COMPLETIONS),
        ({"prompt": None, "messages": [HI]}, CHAT),
        ({"prompt": "x", "unknown": [1.5e7, {"a": {}}, [], "\u00e9"]}, COMPLETIONS),
        ({"prompt": "x", "user": "u", "prompt_cache_key": "", "cache_salt": "s"}, COMPLETIONS),
        ({"prompt": "x", "max_tokens": 5, "max_completion_tokens": 0, "priority": -3}, COMPLETIONS),
        ({"prompt": "x", "stream": True, "n": 3, "model": "m\u00fc"}, COMPLETIONS),
        (dict.fromkeys(("model", "stream", "n", "tools", "user")) | {"prompt": "x"}, COMPLETIONS),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1.5}, "truncate_prompt_tokens": None}, "/"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
async def test_plain_bodies_are_scanned_as_by_the_full_reader(
    fields: dict[str, Any], path: str, indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    assert await check_agreement(body, path) is not None


@pytest.mark.parametrize("kind", sorted(TEXT_PARTS))
async def test_text_parts_are_plain_and_media_parts_are_not(kind: str) -> None:
    parts = [{"type": kind, "text": "hello", "more": [1]}, "and a text"]
    assert await check_agreement(body_of(messages=[HI | {"content": parts}]), CHAT) is not None
    medium = [{"type": "image_url", "image_url": {"url": "data:..."}}]
    assert await check_agreement(body_of(messages=[HI | {"content": medium}]), CHAT) is None


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b"", COMPLETIONS),
        (b"{}", COMPLETIONS),
        (b'{"prompt":"x"}', CHAT),
        (b'{"messages":[{"role":"user"}]}', COMPLETIONS),
        (b'{"prompt":"x"} x', COMPLETIONS),
        (b'{"prompt":"x",}', COMPLETIONS),
        (b'{"prompt":"\\ud800"}', COMPLETIONS),
        (b'{"prompt":"\\ud800\\u0041"}', COMPLETIONS),
        (b'{"prompt":"\\udc00\\udc00"}', COMPLETIONS),
        (b'{"prompt":"\xed\xa0\x80"}', COMPLETIONS),
        (b'{"prompt":"\xc0\x80"}', COMPLETIONS),
        (b'{"prompt":"\xf4\x90\x80\x80"}', COMPLETIONS),
        (b'{"prompt":"\xe2\x82"}', COMPLETIONS),
        (b'{"prompt":"a\nb"}', COMPLETIONS),
        (b'{"prompt":"x","prompt":"y"}', COMPLETIONS),
        (b'{"prompt":"x","\\u006dodel":"y"}', COMPLETIONS),
        (b'{"prompt":[1,"a"]}', COMPLETIONS),
        (b'{"prompt":["a",1]}', COMPLETIONS),
        (b'{"prompt":[[1]]}', COMPLETIONS),
        (b'{"prompt":[]}', COMPLETIONS),
        (b'{"prompt":["a","b","c","d"]}', COMPLETIONS),
        (b'{"prompt":[01]}', COMPLETIONS),
        (b'{"prompt":[2147483648]}', COMPLETIONS),
        (b'{"prompt":[1.0]}', COMPLETIONS),
        (b'{"prompt":"x","n":4}', COMPLETIONS),
        (b'{"prompt":"x","user":"123456789"}', COMPLETIONS),
        (b'{"prompt":"x","truncate_prompt_tokens":1}', COMPLETIONS),
        (b'{"prompt":"x","a":' + b"[" * 80 + b"]" * 80 + b"}", COMPLETIONS),
        (b'{"prompt":"x","a":1e999}', COMPLETIONS),
        (b'{"messages":[{"role":"user","a":1,"a":2}]}', CHAT),
        (b'{"messages":[{"role":"user","a":1,"\\u0061":2}]}', CHAT),
        (b'{"messages":[{"role":"user","a":1.5}]}', CHAT),
        (b'{"messages":[{"role":"user","a":-0}]}', CHAT),
        (b'{"messages":[{"role":"user","content":5}]}', CHAT),
        (b'{"messages":[{"role":""}]}', CHAT),
        (b'{"messages":[{"content":"x"}]}', CHAT),
        (b'{"messages":[' + b",".join([b'{"role":"user"}'] * 5) + b"]}", CHAT),
        (b'{"messages":[{"role":"user","content":[{"type":"text"}]}]}', CHAT),
        (b'{"messages":[{"role":"user","content":[{"text":"x"}]}]}', CHAT),
    ],
)
def test_bodies_that_are_not_plain_are_left_to_the_full_reader(body: bytes, path: str) -> None:
    assert plain_scan(body, path, LIMITS) is None


@pytest.mark.parametrize("whole", [10**17, -(10**17), 10**18 - 1, 1 - 10**18])
async def test_integers_of_up_to_18_digits_are_plain(whole: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x", "a": whole}]}).encode()
    assert await check_agreement(body, CHAT) is not None
    assert plain_scan(body.replace(b"%d" % whole, b"%d0" % whole), CHAT, LIMITS) is None


@patient
@given(ASKED, BESIDES, st.booleans(), st.booleans())
async def test_typical_bodies_are_plain(
    asked: dict[str, Any], besides: dict[str, Any], tools_first: bool, ascii_only: bool
) -> None:
    fields = besides | asked if tools_first else asked | besides
    body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    assert await check_agreement(body, CHAT if "messages" in asked else COMPLETIONS) is not None


@patient
@given(BODIES, PATHS, st.booleans(), st.data())
async def test_the_plain_scan_of_any_body_agrees_with_the_full_reader_or_declines(
    fields: dict[str, Any], path: str, ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(fields, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    body = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    await check_agreement(bytes(body), path)


@patient
@given(st.binary(max_size=60), st.booleans())
@example(b"\\u0000", False)
async def test_the_plain_scan_of_any_string_agrees_with_the_full_reader_or_declines(
    inner: bytes, chat: bool
) -> None:
    if chat:
        await check_agreement(b'{"messages":[{"role":"user","content":"' + inner + b'"}]}', CHAT)
    await check_agreement(b'{"prompt":"' + inner + b'"}', COMPLETIONS)


async def test_a_long_body_is_scanned_off_the_event_loop_with_the_same_result() -> None:
    text = "a line of text \u00e9 and more\n" * 8_000
    assert await check_agreement(body_of(prompt=text), COMPLETIONS) is not None
    assert await check_agreement(body_of(messages=[HI | {"content": text}] * 3), CHAT) is not None
    assert await check_agreement(body_of(prompt=list(range(40_000))), COMPLETIONS) is not None


async def test_with_a_tokenizer_the_full_reader_passes_it_the_text() -> None:
    class Counting:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [len(text)]

    with ThreadPoolExecutor(1) as executor:
        body = body_of(prompt="four")
        path = paths.PATHS[COMPLETIONS]
        scanned = await reader_of(Counting(), executor).scan(body, path, LIMITS)
        assert not isinstance(scanned, Plain)
        assert isinstance(await reader_of(None, executor).scan(body, path, LIMITS), Plain)
        prompt = await read(scanned, executor, Counting())
    assert not prompt.approximate


def test_the_error_names_the_wrong_argument() -> None:
    from kvkernels import scan_request

    with pytest.raises(TypeError, match="body must be bytes"):
        scan_request(bytearray(b"{}"), 1, 1, 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="messages"):
        scan_request(b"{}", -1, 1, 1, 1)
    found = scan_request(b'{"prompt":"abcdefgh"}', 1, 1, 1, 1)
    assert found is not None
    with pytest.raises(ValueError, match="block size"):
        found[0].chains((0,), "m", None, None)
    with pytest.raises(TypeError, match="model"):
        found[0].chains((1,), "\ud800", None, None)
    assert np.array_equal(list(found[0].chains((2, 1), "m", None, None)), [1, 2])
