"""Tests of cutting bytes into requests: the result is the same for any pieces, and the same as that
of another parser.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.parser import RequestLimits, RequestReader, Whole
from tests.effort import examples
from tests.live.hostile.corpus import refused, served

LIMITS = RequestLimits(head_bytes=65_536, header_bytes=32_768, body_bytes=1 << 20)
PARTS = [data for _, data in served()] + [data for _, _, data in refused() if len(data) < 2_000]
SNIPPETS = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"0", b"3", b"a", b"\0", b"\x80", b";", b","),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n", b"0\r\n\r\n"),
    *(b"POST / HTTP/1.1\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"_"),
]


@st.composite
def mutated(draw) -> bytes:
    """Draw some requests in a row, with a few bytes changed, removed or inserted."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        until = at + draw(st.integers(0, 4))
        data[at:until] = draw(st.sampled_from(SNIPPETS))
    return bytes(data)


@st.composite
def cut(draw) -> tuple[bytes, list[bytes]]:
    """Draw the bytes of requests, and the same bytes cut into pieces."""
    data = draw(mutated())
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return data, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def parsed(whole: bytes) -> list[tuple[str, str, tuple, bytes]]:
    """Return the accepted requests as aiohttp reads them; raises what aiohttp raises."""
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(
            _Paused(), loop, 1 << 20, max_line_size=65_536, max_field_size=65_536, max_headers=200
        )
        messages, upgraded, tail = parser.feed_data(whole)
        assert not upgraded
        assert not tail
        found = []
        for message, payload in messages:
            body = b"".join(payload._buffer) if hasattr(payload, "_buffer") else b""
            assert payload.is_eof() or not body
            found.append((message.method, message.path, message.raw_headers, body))
        return found
    finally:
        loop.close()


def texts(whole: list[Whole]) -> bytes:
    """Return the accepted requests as bytes."""
    return b"".join(one.head.text + one.body for one in whole)


class _Paused:
    """The attributes of a protocol that the parser uses."""

    _reading_paused = False

    def pause_reading(self, **options: bool) -> None: ...
    def resume_reading(self, **options: bool) -> None: ...


@settings(max_examples=examples(300), deadline=None)
@given(cut())
def test_the_parser_gives_the_same_result_for_any_pieces(given_bytes) -> None:
    data, pieces = given_bytes
    once = RequestReader(LIMITS, trusted=False)
    whole = texts(once.feed(data))
    piecewise = RequestReader(LIMITS, trusted=False)
    parts = b"".join(texts(piecewise.feed(piece)) for piece in pieces)
    assert parts == whole
    assert piecewise.requests == once.requests
    assert piecewise.held_bytes == once.held_bytes
    if once.refused != piecewise.refused:
        # A head that cannot become one may be refused by its beginning, which gives its reason.
        assert once.refused is not None
        assert piecewise.refused is not None


@pytest.mark.parametrize("cuts", [[1], [2], [3], [4], [1, 2, 3]], ids=str)
def test_empty_lines_before_a_request_may_arrive_separately(cuts: list[int]) -> None:
    data = b"\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    reader = RequestReader(LIMITS, trusted=False)
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert texts([one for part in parts for one in reader.feed(part)]) == data[4:]
    assert not reader.in_head


@settings(max_examples=examples(300), deadline=None)
@given(mutated())
def test_another_parser_reads_the_same_requests(data: bytes) -> None:
    reader = RequestReader(LIMITS, trusted=False)
    whole = reader.feed(data)
    found = parsed(texts(whole))
    assert found == [
        (one.head.method, one.head.target, one.head.headers.fields(), one.body) for one in whole
    ]
    for _, path, headers, body in found:
        names = [name.lower() for name, _ in headers]
        assert path.startswith(("/", "http"))
        assert b"transfer-encoding" not in names
        lengths = [value for name, value in headers if name.lower() == b"content-length"]
        assert len(lengths) <= 1
        assert len(body) == int(lengths[0] if lengths else 0)
        for name, value in headers:
            assert not set(value) & set(b"\0\r\n")
            assert name.replace(b"_", b"-").lower() not in (b"transfer-encoding",)


def test_no_request_is_read_after_a_bad_one() -> None:
    reader = RequestReader(LIMITS, trusted=False)
    good = PARTS[0]
    assert texts(reader.feed(good + b"nonsense\r\n\r\n" + good)) == good
    assert reader.refused == "bad_request_line"
    assert not reader.feed(good)
    assert reader.held_bytes == 0


@pytest.mark.parametrize("size", [999, 1000])
def test_a_body_of_the_limit_is_accepted_and_a_larger_one_is_refused(size: int) -> None:
    limits = replace(LIMITS, body_bytes=999)
    for data in (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (size, b"x" * size),
    ):
        for step in (len(data), 7):
            reader = RequestReader(limits, trusted=False)
            parts = (reader.feed(data[i : i + step]) for i in range(0, len(data), step))
            whole = b"".join(map(texts, parts))
            assert whole.endswith(b"\r\n\r\n" + b"x" * 999) is (size == 999)
            assert reader.refused == (None if size == 999 else "body_too_large")
