"""Tests of the native parser of HTTP heads with hostile input."""

from pathlib import Path

from tests.effort import EFFORT
from tests.kernels.fuzz.fuzzing import fuzz
from tests.live.hostile.corpus import refused, served

PLAIN = (
    b"POST /v1/completions?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length:  12 \r\nconnection: close\r\n"
    b"X-Request-Id: a__b\r\nAuthorization: Bearer \xe9\r\nX-Data: 1\r\n\r\n"
)


def test_mutated_heads_do_not_crash_the_parser(clang: None, tmp_path: Path) -> None:
    """The native parser survives a fixed number of mutated inputs that start from heads of each
    kind.
    """
    requests = [PLAIN, *(data for _, data in served()), *(data for _, _, data in refused())]
    heads = (request.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for request in requests)
    seeds = {f"{number}": head for number, head in enumerate(heads)}
    fuzz("heads", seeds, tmp_path, 50_000 * EFFORT)
