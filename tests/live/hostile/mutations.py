"""Makes endless requests with faults in them, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.live.hostile.corpus import PRIVATE, refused, served, sized

_SNIPPETS = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b";", b",", b"\0", b"\x7f", b"\x80", b"_", b"-"),
    *(b"0", b"1", b"9" * 30, b"ffffffffffffffff", b"-1", b"+", b"0x", b"%00", b"%0d%0a", b".."),
    *(b"0\r\n\r\n", b"\r\n\r\n", b"Content-Length: 5\r\n", b"Content-Length: 1000\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: x\r\n", b"Expect: 100-continue\r\n"),
    *(b"Connection: keep-alive\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Host: y\r\n"),
    *(b" HTTP/1.0\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"[" * 200, b'"' * 3, b"{}", b"\xff"),
)


def faults(seed: int) -> Iterator[bytes]:
    """Yield endless requests, each with up to five faults, most of which are small."""
    rng = random.Random(seed)
    parts = [data for _, data in served()]
    parts += [data for _, _, data in refused() if len(data) < 4_000]
    parts += [sized(line) for line in PRIVATE]
    while True:
        data = bytearray(rng.choice(parts))
        for _ in range(rng.randrange(6)):
            harm(rng, data, parts)
        yield bytes(data)


def harm(rng: random.Random, data: bytearray, parts: list[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            data[at:at] = rng.choice(_SNIPPETS)
        case 1:
            del data[at : at + rng.randrange(1, 20)]
        case 2:
            data[at : at + 1] = bytes([rng.randrange(256)])
        case 3:
            other = rng.choice(parts)
            data[at:] = other[rng.randrange(len(other)) :]
        case 4:
            lines = bytes(data).split(b"\r\n")
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            data[:] = b"\r\n".join(lines)
        case 5:
            data[at:at] = rng.randbytes(rng.randrange(1, 30))
        case _:
            data[at:] = b""
