"""Tests of the pure parts of the relay: heads, body framing, counting and usage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvkernels import plain_head
from router.http.bodies import ChunkedBody, CloseBody, LengthBody, follow
from router.http.errors import ClientError, WorkerError
from router.http.forwarding import end_to_end
from router.http.framing import parse_head, request_head
from router.http.parser import Fields
from router.http.reply import Framing, RelayLimits, ReplyHead, UpstreamRequest
from tests.oracles import reply_head
from tests.router.property_support import cut, patient

LIMITS = RelayLimits()


def decode_pieces(
    body: ChunkedBody | LengthBody | CloseBody, pieces: list[bytes]
) -> tuple[bytes, int]:
    """Give all pieces to the body reader; return its payload and the number of bytes that
    it took.
    """
    payload = b""
    taken = 0
    for piece in pieces:
        payload += body.feed(piece)
        taken += body.taken
    return payload, taken


EXTENSIONS = st.sampled_from([b"", b";x=1", b' ; q="a b"', b"\t"])
TRAILERS = st.lists(st.sampled_from([b"X-A: 1\r\n", b"Digest:\r\n"]), max_size=3)
CHUNKS = st.lists(
    st.tuples(
        st.one_of(
            st.binary(min_size=1, max_size=40), st.sampled_from([b"0\r\n\r\n", b"\r\n", b"a\r\n"])
        ),
        EXTENSIONS,
    ),
    max_size=8,
)
CUTS = st.lists(st.integers(0, 10_000), max_size=30)


@patient
@given(CHUNKS, EXTENSIONS, TRAILERS, CUTS, st.binary(max_size=10))
def test_a_chunked_body_is_decoded_however_it_is_cut(
    chunks: list[tuple[bytes, bytes]],
    last: bytes,
    trailers: list[bytes],
    cuts: list[int],
    surplus: bytes,
) -> None:
    raw = b"".join(b"%X%s\r\n%s\r\n" % (len(data), ext, data) for data, ext in chunks)
    raw += b"000" + last + b"\r\n" + b"".join(trailers) + b"\r\n"
    body = ChunkedBody(LIMITS.chunk_line_bytes, LIMITS.header_bytes)
    payload, taken = decode_pieces(body, cut(raw, cuts))
    assert payload == b"".join(data for data, _ in chunks)
    assert taken == len(raw)
    assert body.done
    whole = ChunkedBody(LIMITS.chunk_line_bytes, LIMITS.header_bytes)
    assert whole.feed(raw + surplus) == payload
    assert whole.taken == len(raw)


@patient
@given(st.binary(max_size=200), CUTS)
def test_any_bytes_are_read_as_chunks_or_as_garbage_however_cut(
    data: bytes, cuts: list[int]
) -> None:

    def result_of(pieces: list[bytes]) -> object:
        body = ChunkedBody(64, 64)
        payload = b""
        taken = 0
        try:
            for piece in pieces:
                if not body.done:
                    payload += body.feed(piece)
                    taken += body.taken
        except WorkerError as error:
            return error.kind
        return payload, taken, body.done

    assert result_of(cut(data, cuts)) == result_of([data])


@pytest.mark.parametrize(
    "raw",
    [
        b"xyz\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"\r\n",
        b" 5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\r\nhello!\r\n",
        b"5\r\nhello\n",
        b"1_0\r\n",
        b"5;\x00\r\nhello\r\n",
        b"fffffffffffffffff\r\n",
        b"5" + b";" + b"x" * 5000,
        b"0\r\nno header\r\n\r\n",
        b"0\r\n" + b"A: b\r\n" * 20_000,
    ],
)
def test_broken_chunks_are_a_worker_error(raw: bytes) -> None:
    with pytest.raises(WorkerError) as caught:
        ChunkedBody(LIMITS.chunk_line_bytes, LIMITS.header_bytes).feed(raw)
    assert caught.value.kind == "garbage"


def test_a_length_body_does_not_take_the_bytes_after_it() -> None:
    body = LengthBody(5)
    assert decode_pieces(body, [b"ab", b"cde--"]) == (b"abcde", 5)
    assert body.done
    assert LengthBody(0).done


def test_follow_chooses_the_body_class_by_framing() -> None:
    kinds = {framing: type(follow(ReplyHead(200, b"", (), framing), LIMITS)) for framing in Framing}
    assert kinds == {
        Framing.NONE: LengthBody,
        Framing.LENGTH: LengthBody,
        Framing.CHUNKED: ChunkedBody,
        Framing.CLOSE: CloseBody,
    }


@pytest.mark.parametrize(
    ("head", "method", "framing", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n", "POST", Framing.LENGTH, True),
        (
            b"HTTP/1.1 200\r\ncontent-length:5\r\nContent-Length:\t5 \r\n",
            "POST",
            Framing.LENGTH,
            True,
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n", "POST", Framing.CHUNKED, True),
        (b"HTTP/1.1 200 OK\r\n", "POST", Framing.CLOSE, False),
        (b"HTTP/1.1 204 No Content\r\n", "POST", Framing.NONE, True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n", "GET", Framing.NONE, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n", "HEAD", Framing.NONE, True),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n",
            "GET",
            Framing.LENGTH,
            False,
        ),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n", "GET", Framing.LENGTH, False),
        (
            b"HTTP/1.0 200 OK\r\nConnection: x, Keep-Alive\r\nContent-Length: 9\r\n",
            "GET",
            Framing.LENGTH,
            True,
        ),
    ],
)
def test_the_framing_of_a_reply_follows_from_its_head(
    head: bytes, method: str, framing: Framing, reusable: bool
) -> None:
    parsed = parse_head(head, method)
    assert (parsed.framing, parsed.reusable) == (framing, reusable)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK\r\n",
        b"HTTP/1.1 20 OK\r\n",
        b"HTTP/1.1 2000 OK\r\n",
        b"HTTP/1.1 200 OK\n",
        b"HTTP/1.1 101 Switching Protocols\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n",
        b"HTTP/1.1 200 OK\r\nA : space before colon\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n",
        b"HTTP/1.1 200 OK\r\nA: nul\x00\r\n",
        b"HTTP/1.1 200 OK\r\nA: bare\rcr\r\n",
        b"HTTP/1.1 200 OK\r\nA: bare\nB: lf\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_ambiguous_heads_are_a_worker_error(head: bytes) -> None:
    with pytest.raises(WorkerError) as caught:
        parse_head(head, "POST")
    assert caught.value.kind == "garbage"


@patient
@given(
    st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(lambda b: b"HTTP/1.1 200 " + b))
)
def test_any_bytes_are_read_as_a_head_or_as_garbage(data: bytes) -> None:
    with contextlib.suppress(WorkerError):
        assert parse_head(data, "POST").status >= 100


STATUS_LINES = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200\r\n", b"HTTP/1.1 204 \r\n", b"HTTP/1.1 304 x\r\n"),
        *(b"HTTP/1.1 101 Switching\r\n", b"HTTP/1.1 100 Go\r\n", b"HTTP/2 200\r\n", b"\r\n"),
    ]
)
NAMES = st.sampled_from(
    [
        *(b"Content-Length", b"content-length", b"Transfer-Encoding", b"Connection", b"X-A"),
        *(b"Content-Type", b"Content-Encoding", b"X-Warmroute-Worker", b"Bad Name", b""),
    ]
)
VALUES = st.sampled_from(
    [
        *(b"5", b" 5 ", b"6", b"+5", b"chunked", b"Chunked\t", b"gzip", b"close", b"x, Keep-Alive"),
        *(b"text/event-stream; x", b"TEXT/event-stream", b"identity", b"", b"a\x00", b"caf\xe9"),
    ]
)
REPLY_HEADS = st.tuples(
    STATUS_LINES,
    st.lists(st.tuples(NAMES, VALUES).map(lambda field: b"%b:%b\r\n" % field), max_size=5),
    st.sampled_from([b"", b"\r\n", b"X: no end", b" folded\r\n", b"bare\n"]),
).map(lambda parts: parts[0] + b"".join(parts[1]) + parts[2])


def read_by(reader: Callable[[bytes, str], ReplyHead], head: bytes, method: str) -> object:
    try:
        return reader(head, method)
    except WorkerError as error:
        return error.kind, error.message


@patient
@given(st.one_of(REPLY_HEADS, st.binary(max_size=60)), st.sampled_from(["POST", "HEAD"]))
def test_the_native_and_the_python_reader_agree_on_reply_heads(head: bytes, method: str) -> None:
    assert read_by(parse_head, head, method) == read_by(reply_head.parse_head, head, method)


@patient
@given(
    st.lists(st.tuples(st.sampled_from([b"A", b"aB", b"Te", b"Accept"]), VALUES), max_size=5),
    st.frozensets(st.sampled_from([b"a", b"ab", b"te", b"host"])),
)
def test_native_and_python_heads_give_the_same_lines(fields, skip) -> None:
    lines = b"".join(b"%b: %b\r\n" % field for field in fields)
    text = b"POST / HTTP/1.1\r\nHost: x\r\n%b\r\n" % lines
    plain = plain_head(text)
    assume(plain is not None)
    assert plain is not None
    assert plain[0].lines(skip) == Fields(text).lines(skip)


def test_request_head_keeps_client_headers_and_drops_hop_by_hop_ones() -> None:
    request = UpstreamRequest(
        "POST",
        "/v1/completions?a=%20b",
        (
            (b"HOST", b"public.example"),
            (b"Authorization", b"Bearer k"),
            (b"X-Twice", b"1"),
            (b"x-twice", b"2"),
            (b"Connection", b"keep-alive, X-Hop"),
            (b"X-Hop", b"gone"),
            (b"Transfer-Encoding", b"chunked"),
            (b"TE", b"trailers"),
            (b"Upgrade", b"h2c"),
            (b"Expect", b"100-continue"),
            (b"Content-Length", b"99"),
            (b"X-Warmroute-Internal-Role", b"admin"),
        ),
        b"body",
        ((b"x-warmroute-internal-id", b"7"),),
    )
    assert request_head(request, b"w:8000", "/base") == (
        b"POST /base/v1/completions?a=%20b HTTP/1.1\r\nHost: w:8000\r\n"
        b"Authorization: Bearer k\r\nX-Twice: 1\r\nx-twice: 2\r\n"
        b"x-warmroute-internal-id: 7\r\nContent-Length: 4\r\n\r\n"
    )


def test_request_head_adds_a_zero_length_to_post_and_put() -> None:
    def lengths(method: str) -> int:
        return request_head(UpstreamRequest(method, "/"), b"w", "").count(b"Content-Length: 0")

    assert [lengths(method) for method in ("GET", "HEAD", "POST", "PUT")] == [0, 0, 1, 1]


@pytest.mark.parametrize("target", ["", "*", "x", "/a b", "/a\r\nX: y", "/\u00e9", "/\x7f"])
def test_a_target_that_breaks_the_request_line_is_refused(target: str) -> None:
    with pytest.raises(ClientError):
        request_head(UpstreamRequest("GET", target), b"w", "")


def test_headers_listed_in_connection_are_dropped_both_ways() -> None:
    headers = [(b"A", b"1"), (b"connection", b" close , a"), (b"b", b"2"), (b"Keep-Alive", b"3")]
    assert list(end_to_end(headers)) == [(b"b", b"2")]


def test_a_limit_of_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="idle_s"):
        RelayLimits(idle_s=0)
