"""Tests of request heads that are parsed natively: exactly those that the server's parser accepts
unchanged, with the same result.
"""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvkernels import plain_head
from router.http import parser
from router.http.parser import PRIVATE, RefusedError
from tests.effort import examples
from tests.live.hostile.corpus import refused, served

NAMES = [
    *(b"Host", b"Content-Length", b"content-type", b"User-Agent", b"Authorization", b"ETag"),
    *(b"Connection", b"Accept", b"X-Request-Id", b"x_request-id", b"X-Mine", b"Expect", b"expec"),
    *(b"Content-Location", b"content-range", b"Max-Forwards", b"Server", b"Upgrade", b"TE"),
    *(b"Transfer-Encoding", b"transfer_encoding", b"content_length", b"http2-settings", b"Keep"),
    *PRIVATE,
    *(name.replace(b"-", b"_") + b"a" for name in PRIVATE),
    *(name[:-1] for name in PRIVATE),
]
VALUES = [
    *(b"", b" ", b"x", b" x ", b"\t12\t", b"12", b"+1", b"1" * 15, b"1" * 16, b"close"),
    *(b"keep-alive", b"Close ", b"close, x", b"a___prefill_addr_b", b"a___b", b"\xe9", b"a:b"),
]
LINES = [
    *(b"POST /v1/completions HTTP/1.1", b"GET / HTTP/1.1", b"POST /a?b=%20 HTTP/1.1"),
    *(b"DELETE /x HTTP/1.1", b"POST http://h/x HTTP/1.1", b"POST / HTTP/1.0", b"TRACE / HTTP/1.1"),
    *(b"POST /a#b HTTP/1.1", b"POST  / HTTP/1.1", b"POST /\x80 HTTP/1.1", b"POSTS / HTTP/1.1"),
]
SNIPPETS = [b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\0", b"\x80", b"\x7f", b"_", b"-", b"1"]


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Draw a request head; in a third of all cases, some bytes are changed."""
    fields = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=5))
    lines = [draw(st.sampled_from(LINES[: draw(st.sampled_from([3, 3, len(LINES)]))])), b"Host: x"]
    lines += [name + draw(st.sampled_from([b": ", b":"])) + value for name, value in fields]
    data = bytearray(b"\r\n".join(lines) + b"\r\n\r\n")
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.sampled_from(SNIPPETS))
    return bytes(data)


def check(text: bytes) -> bool:
    """Check that both parsers agree on a head; return whether the native one accepts it."""
    found = plain_head(text)
    try:
        with patch.object(parser, "_closely", wraps=parser._closely) as closely:
            head = parser.read_head(text, trusted=False)
    except RefusedError:
        assert found is None
        return False
    line, *rows = text[:-4].split(b"\r\n")
    usual = re.fullmatch(rb"([A-Z]+) (/\S*) HTTP/1\.1", line)
    if closely.called or usual is None:
        assert found is None
        return False
    assert found is not None
    plain, method, target, length, last = found
    assert (method.encode(), target.encode()) == usual.groups()
    assert (length, last) == (head.length, head.last)
    fields = tuple(
        (name, value.strip(b" \t")) for name, _, value in (r.partition(b":") for r in rows)
    )
    assert plain.fields() == fields
    for name, _ in fields:
        value = next(value for other, value in fields if other.lower() == name.lower())
        for written in (name.lower(), name.upper(), name):
            assert plain.get(written.decode()) == value.decode("utf-8", "surrogateescape")
    assert plain.get("x-nobody-sends-this") is None
    return True


@settings(max_examples=examples(1500), deadline=None)
@given(heads())
@example(LINES[0] + b"\r\nHost: x" + b"\r\na: b" * 127 + b"\r\n\r\n")
@example(LINES[0] + b"\r\nHost: x" + b"\r\na: b" * 128 + b"\r\n\r\n")
def test_native_and_python_parsers_agree_on_generated_heads(text: bytes) -> None:
    check(text)


def test_native_and_python_parsers_agree_on_the_corpus() -> None:
    requests = [data for _, data in served()] + [data for _, _, data in refused()]
    for data in requests:
        check(data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", VALUES)
def test_native_and_python_parsers_agree_on_each_name_and_value(name: bytes, value: bytes) -> None:
    head = LINES[0] + b"\r\nHost: x\r\n%s:%s\r\n"
    check(head % (name, value) + b"\r\n")
    check(head % (name, value) + name.lower() + b": 12\r\n\r\n")


def test_a_typical_client_head_is_parsed_natively() -> None:
    assert check(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: router:8000\r\nUser-Agent: OpenAI/1.0\r\n"
        b"Accept-Encoding: gzip, deflate\r\nAccept: application/json\r\nConnection: keep-alive\r\n"
        b"Authorization: Bearer key\r\nX-Stainless-Lang: python\r\nContent-Type: application/json"
        b"\r\nContent-Length: 2048\r\n\r\n"
    )


def test_the_native_parser_accepts_only_bytes() -> None:
    with pytest.raises(TypeError, match="text"):
        plain_head("POST / HTTP/1.1\r\n\r\n")  # type: ignore[arg-type]
    assert plain_head(b"") is None
    found = plain_head(LINES[0] + b"\r\nHost: x\r\n\r\n")
    assert found is not None
    for name in (None, b"host", "\ud800"):
        with pytest.raises(TypeError, match="name"):
            found[0].get(name)  # type: ignore[arg-type]
