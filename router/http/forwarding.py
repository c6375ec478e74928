"""Decides which headers are forwarded between clients and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Protocol

from router.http.reply import Header

# Headers that belong to one connection and are not passed on (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Headers that the relay writes itself, or that the server in front has already answered.
REPLACED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
INTERNAL_PREFIX = b"x-warmroute-internal-"


class ReadHeaders(Protocol):
    """Gives access to the parsed headers of a client's request. Lifetime: request."""

    def fields(self) -> tuple[Header, ...]: ...  # all of them, in order
    def lines(self, skip: frozenset[bytes]) -> bytes: ...  # as `lines_of`


class ForwardedHeaders:
    """The headers of a client's request that are forwarded to the worker. Lifetime: request."""

    __slots__ = ("_hidden", "_read")

    def __init__(self, read: ReadHeaders, hidden: frozenset[bytes] = frozenset()) -> None:
        """Wrap the headers `read`, without those whose lower-case names are in `hidden`."""
        self._read = read
        self._hidden = hidden

    def __iter__(self) -> Iterator[Header]:
        """Yield the headers that are not hidden, as pairs of a name and a value."""
        return (header for header in self._read.fields() if header[0].lower() not in self._hidden)

    def lines(self) -> bytes:
        """Return the headers to forward as lines, each ending with CRLF.

        Hop-by-hop headers and headers that the relay writes itself are left out, too.
        """
        return self._read.lines(_with_replaced(self._hidden))


@lru_cache(maxsize=64)  # of names that the configuration gives
def _with_replaced(hidden: frozenset[bytes]) -> frozenset[bytes]:
    return hidden | REPLACED


def lines_of(headers: Iterable[Header], skip: frozenset[bytes]) -> bytes:
    """Return the headers that may be forwarded, as lines that each end with CRLF.

    Left out are the headers named in `skip` (lower case), those that a `Connection` header lists,
    and the router's internal headers.
    """
    skip = _of_connection(headers, skip)
    return b"".join(
        [
            b"%b: %b\r\n" % header
            for header in headers
            if (lower := header[0].lower()) not in skip and not lower.startswith(INTERNAL_PREFIX)
        ]
    )


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Return `headers` without hop-by-hop headers, in the same order and letter case."""
    skip = _of_connection(headers, HOP_BY_HOP)
    return [header for header in headers if header[0].lower() not in skip]


def _of_connection(headers: Iterable[Header], known: frozenset[bytes]) -> frozenset[bytes]:
    """Return the lower-case names of the headers that belong to one connection only.

    These are the names in `known` and the names that `Connection` headers list. Such headers must
    not be forwarded.
    """
    values = [value for name, value in headers if len(name) == 10 and name.lower() == b"connection"]
    return known | _options(values) if values else known


def _options(values: Iterable[bytes]) -> frozenset[bytes]:
    """Return the header names that these values of `Connection` headers list, in lower case."""
    return frozenset(one.strip() for value in values for one in value.lower().split(b","))
