"""Tests of long bodies: they are read in pieces with the same result as short ones, and their
memory is counted before they are built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvkernels import body_fields, json_items, json_text, token_ids
from router.body import scan as scanning
from router.body.paths import PATHS
from router.body.scan import SHAPES, ScanLimits, Scanned, scan
from router.http.errors import ClientError
from tests.router.body.body_support import BODIES, IDS, JSON, MESSAGES
from tests.router.property_support import patient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = ScanLimits(max_messages=4, max_prompts=3, max_choices=3, max_key_chars=8)
HI = {"role": "user", "content": "hi"}
PROMPTS = st.text(max_size=20) | IDS | st.lists(st.text(max_size=9) | IDS, max_size=5) | JSON
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.none() | st.text(max_size=5),
        "input": PROMPTS | MESSAGES,
        "messages": st.none() | MESSAGES,
        "system": st.none() | st.text(max_size=9) | MESSAGES,
        "text": PROMPTS,
        "input_ids": PROMPTS,
        "token_ids": PROMPTS,
        "query": PROMPTS,
        "documents": PROMPTS,
        "tools": st.none() | st.lists(JSON, max_size=3),
        "instructions": st.none() | st.text(max_size=9),
        "unknown": JSON,
    },
)


def read(path: str, body: bytes, limits: ScanLimits = LIMITS) -> Scanned:
    shape = SHAPES.get(PATHS[path].reads)
    return scan(body, path, limits) if shape is None else shape(body, limits)


def comparable_parts(result: Scanned) -> tuple[Any, ...]:
    """Return the parts of a scanned body that can be compared."""
    prompts = [one if isinstance(one, str) else one.tolist() for one in result.prompts]
    names = ("model", "stream", "messages", "session", "cache_salt", "priority", "by_text")
    more = (result.max_output_tokens, result.choices, result.options.tools)
    return (prompts, *(getattr(result, name) for name in names), *more)


def outcome(read_it: Callable[[], Scanned]) -> Any:
    """Return what `read_it` reads, or that it refused the body."""
    try:
        return comparable_parts(read_it())
    except ClientError as error:
        return error.status, json.loads(error.body())["error"]["code"] != ""


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_bodies_as_long(monkeypatch)


def treat_bodies_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reader treat every body as a long one from now on."""
    monkeypatch.setattr(scanning, "LONG_BYTES", 0)
    monkeypatch.setattr(scanning, "_LONG_TEXT_BYTES", 0)


@patient
@given(
    st.tuples(st.sampled_from([CHAT, COMPLETIONS]), BODIES)
    | st.tuples(st.sampled_from(sorted(PATHS)), OTHERS | OTHERS.map(lambda body: body | HI)),
    st.booleans(),
    st.data(),
)
@example((COMPLETIONS, {"prompt": [[1, 2], [3]]}), True, None)
@example((COMPLETIONS, {"prompt": ["a", [3]]}), True, None)
def test_reading_a_body_in_pieces_gives_the_same_result(
    asked: tuple[str, dict[str, Any]], ascii_only: bool, data: st.DataObject | None
) -> None:
    path, fields = asked
    indent = data.draw(st.sampled_from([None, 1])) if data else None
    text = json.dumps(fields, ensure_ascii=ascii_only, indent=indent)
    body = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 1)) if data else 0):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(32, 126))
    limits = replace(LIMITS, max_messages=6)  # those that nothing is read of count in pieces only
    whole = outcome(lambda: read(path, bytes(body), limits))
    with pytest.MonkeyPatch.context() as patch:
        treat_bodies_as_long(patch)
        pieces = outcome(lambda: read(path, bytes(body), limits))
    # The reader of pieces is the stricter one: ids are digits, and texts are Unicode throughout.
    odd = re.search(rb"\\ud|[0-9][.eE]|-0", body) or "\ufffd" in body.decode(errors="replace")
    strict = pieces == (400, True) and bool(odd)
    assert repr(pieces) == repr(whole) or strict


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        (CHAT, {"messages": [HI] * 5}, 400, "messages", "array_too_long"),
        ("/v1/messages", {"messages": [HI] * 5}, 400, "messages", "array_too_long"),
        ("/v1/responses", {"input": [HI] * 5}, 400, "input", "array_too_long"),
        (COMPLETIONS, {"prompt": ["a"] * 4}, 400, "prompt", "array_too_long"),
        (COMPLETIONS, {"prompt": [[1]] * 4}, 400, "prompt", "array_too_long"),
        ("/v1/embeddings", {"input": ["a"] * 4}, 400, "input", "array_too_long"),
        (CHAT, {"messages": [HI], "tools": [[]] * 40}, 413, "tools", "too_many_values"),
        (CHAT, {"messages": [HI | {"a": [0] * 40}]}, 413, "messages", "too_many_values"),
        (CHAT, {"messages": [HI], "documents": {"a": [0] * 40}}, 413, "documents", None),
        (CHAT, {"messages": [HI | {"content": "\n" * 60}]}, 413, "messages", "text_too_long"),
        (CHAT, {"messages": [HI | {"content": "é" * 60}]}, 413, "messages", "text_too_long"),
        (CHAT, {"messages": [HI | {"é" * 60: 1}]}, 413, "messages", "text_too_long"),
        ("/v1/responses", {"input": "\n" * 60}, 413, "input", "text_too_long"),
        (COMPLETIONS, {"prompt": [1, 2, "a"]}, 400, "prompt[2]", "invalid_type"),
        (COMPLETIONS, {"prompt": [1, 2.5]}, 400, "prompt[1]", "invalid_type"),
        (COMPLETIONS, {"prompt": [1, 2**63]}, 400, "prompt", "integer_out_of_range"),
        (COMPLETIONS, {"prompt": [[1], [-1]]}, 400, "prompt[1]", "integer_out_of_range"),
        (COMPLETIONS, {"prompt": [[1], [True]]}, 400, "prompt[1][0]", "invalid_type"),
        (COMPLETIONS, {"prompt": [{}]}, 400, "prompt[0]", "invalid_type"),
        (COMPLETIONS, {"prompt": [[1], []]}, 400, "prompt", "empty_prompt"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, 400, "prompt", "invalid_type"),
        (COMPLETIONS, {"prompt": {}}, 400, "prompt", "invalid_type"),
        (CHAT, {"messages": [HI, 3]}, 400, "messages[1]", "invalid_type"),
        (CHAT, {"messages": [HI], "x": "deep"}, 400, None, "invalid_json"),
    ],
)
@pytest.mark.usefixtures("in_pieces")
def test_a_body_above_a_limit_is_refused_with_the_field(
    path: str, fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    limits = ScanLimits(4, 3, 3, 8, max_values=30, max_text_bytes=100)
    body = json.dumps(fields).encode().replace(b'"deep"', b"[" * 300 + b"]" * 300)
    with pytest.raises(ClientError) as caught:
        read(path, body, limits)
    error = caught.value
    assert (error.status, error.param) == (status, param), error.message
    assert error.code == (code or "too_many_values")


@pytest.mark.usefixtures("in_pieces")
def test_values_that_are_not_built_do_not_count_towards_limits() -> None:
    limits = ScanLimits(max_values=30, max_text_bytes=100)
    ids = list(range(500))
    scanned = scan(json.dumps({"prompt": ids, "unknown": [[]] * 90}).encode(), COMPLETIONS, limits)
    assert comparable_parts(scanned)[0] == [ids]
    text = "é\n" * 200
    assert scan(json.dumps({"prompt": text}).encode(), COMPLETIONS, limits).prompts == (text,)
    plain = HI | {"content": "x" * 500}
    assert scan(json.dumps({"messages": [plain]}).encode(), CHAT, limits).messages == (plain,)
    each = [HI | {"content": "\n" * 20}] * 4  # each by itself
    assert len(scan(json.dumps({"messages": each}).encode(), CHAT, limits).messages) == 4


@patient
@given(JSON, st.text(max_size=20))
def test_body_fields_and_json_items_give_the_right_offsets(value: Any, name: str) -> None:
    body = json.dumps({"before": [1], name: value, "after": {}}, indent=1).encode()
    if name in ("before", "after") or b"NaN" in body or b"Infinity" in body or b"\\ud" in body:
        return
    fault, _, (field, nothing) = body_fields(body, (name, "none such"))
    assert fault is nothing is None
    assert field is not None
    begin, end, values, items, _ = field
    assert json.loads(body[begin:end]) == value
    assert values == count_values(value)
    found = json_items(memoryview(body)[begin:end], items)
    if isinstance(value, list):
        assert found is not None
        assert [json.loads(body[begin + a : begin + b]) for a, b in found] == value
        assert items == 0 or json_items(body[begin:end], items - 1) is None
    else:
        assert found is None
        assert items == 0


def count_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_values, inner))


def test_token_ids_are_read_as_32_bit_or_64_bit_arrays() -> None:
    ids = token_ids(b" [0 , 2147483647,5 ] ")
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.tolist()) == (np.int32, [0, 2**31 - 1, 5])
    wide = token_ids(b"[1, 2147483648,9223372036854775807]")
    assert isinstance(wide, np.ndarray)
    assert (wide.dtype, wide.tolist()) == (np.int64, [1, 2**31, 2**63 - 1])
    assert token_ids(b"[1, 2, x") == (7, 2)
    assert token_ids(b"[1, 2147483648, x") == (16, 2)


@pytest.mark.parametrize("beyond", [-1, -(2**31), 2**63, -(2**63), 2**64 - 1, 2**64, 2**64 + 5])
@pytest.mark.parametrize("digits", ["", "0", "9" * 30])
def test_an_id_above_64_bits_is_an_error_with_its_offset(beyond: int, digits: str) -> None:
    assert token_ids(b"[1, %d%s]" % (beyond, digits.encode())) == (4, 1)


def test_json_text_decodes_escapes_and_rejects_other_values() -> None:
    assert json_text(b'"a\\u00e9\\n\\ud83d\\ude00"') == "aé\n😀".encode()
    assert json_text(b'"a') is None
    assert json_text(b"5") is None


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"", "no_object"),
        (b"[1]", "no_object"),
        (b'{"a":1', "malformed"),
        (b'{"a":1} x', "malformed"),
        (b'{"a":"\\ud800"}', "malformed"),
        (b'{"a":01}', "malformed"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "too_deep"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", None),
        (b'{"a":-1.5e+999, "b":' + b"9" * 5_000 + b"}", None),
        (b'{"\\u0061":[]}', None),
    ],
)
def test_body_fields_reports_the_fault_of_an_invalid_body(body: bytes, fault: str | None) -> None:
    found, at, fields = body_fields(body, ("a",))
    assert found == fault
    assert at <= len(body)
    assert fault is not None or fields[0] is not None
