"""Tests of the relay's parser of replies with hostile input."""

from pathlib import Path

from tests.effort import EFFORT
from tests.kernels.fuzz.fuzzing import fuzz

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
SEEDS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive, X-H\r\nX-H: 1\r\n\r\nhello",
    EVENTS + b'9;a="b"\r\ndata: 1\n\n\r\n6\r\ndata:2\r\n0\r\nX-T: 1\r\n\r\n',
    b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.0 200 OK\r\n\r\n" + b'{"usage": {"a": 1}}',
    b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nbusy",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    EVENTS + b'24\r\ndata: {"choices":[{"delta":{"role":""}}]}\n\n\r\n0\r\n\r\n',
    EVENTS + b': ping\n\ndata: {"error":{"code":500}}\n\ndata: [DONE]\n\n',
    b'HTTP/1.1 200 OK\r\n\r\n{"choices":[{"text":"","finish_reason":"stop"}],"usage":{}}',
    b'HTTP/1.1 200 OK\r\n\r\nno JSON, "usage":{}}',
    b"HTTP/1.1 200 OK\r\nA: " + b"a" * 279 + b"\r\n\r\n",  # with as long a head as may be
    STREAM + b'\r\ndata: {"b_reason":"a"}\n\ndata:\n\n',
)


def test_mutated_replies_do_not_crash_the_relay(clang: None, tmp_path: Path) -> None:
    """The relay survives a fixed number of mutated inputs that start from replies of each kind, cut
    in two ways.
    """
    cuts = (b"\x00", b"\x06", b"\x80", b"\x46")
    seeds = {f"{n}-{cut[0]}": cut + reply for n, reply in enumerate(SEEDS) for cut in cuts}
    fuzz("replies", seeds, tmp_path, 8_000 * EFFORT)
