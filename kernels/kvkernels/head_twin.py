"""Plain requests' heads: what is said of them, and the reading where there is no C++ build."""

from __future__ import annotations

from typing import Protocol


class PlainHead(Protocol):
    """A head that goes on as it came, which only the native reading makes. Lifetime: request."""

    def get(self, name: str) -> str | None:
        """The first value under a name, whose letters count without case."""

    def fields(self) -> tuple[tuple[bytes, bytes], ...]:
        """Names and values as they came, blanks round the values left out."""


def plain_head(text: bytes) -> tuple[PlainHead, str, str, int, bool] | None:
    """Read a client's head with its empty line, or None: read it in another way.

    Without the C++ build every head is left to whoever can read any.

    With the head come its method, its target, the length of the body in bytes, and whether the
    connection ends after it. The native reading takes just those heads of HTTP/1.1 whose target
    begins with "/" that `router.http.door.head` takes and does not rewrite.
    """
    return None
