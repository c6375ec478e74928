"""Why the door turns a request away, and what its client is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Refusal:
    """Lifetime: process."""

    reason: str  # as the metric and the error's `code` name it
    status: int
    message: str  # never repeats what the client wrote


_ALL = (
    Refusal("bad_request_line", 400, "the request line is not `METHOD /path HTTP/1.1`"),
    Refusal("bad_version", 400, "only HTTP/1.0 and HTTP/1.1 are spoken here"),
    Refusal("bad_header", 400, "a header is not `name: value`, or has forbidden characters"),
    Refusal("bad_line_end", 400, "lines of a head end with CRLF"),
    Refusal("folded_header", 400, "a header goes on over several lines"),
    Refusal("bad_host", 400, "HTTP/1.1 asks for one Host header"),
    Refusal("repeated_header", 400, "a header that may occur once occurs twice"),
    Refusal("bad_length", 400, "Content-Length is not one number"),
    Refusal("two_framings", 400, "Content-Length and Transfer-Encoding are both given"),
    Refusal("bad_coding", 400, "Transfer-Encoding is understood as `chunked` and in HTTP/1.1 only"),
    Refusal("bad_connection", 400, "Connection is not a list of names"),
    Refusal("lookalike_header", 400, "a header's name differs from a framing one by an underscore"),
    Refusal("bad_chunk", 400, "the chunked body has no readable size, or does not keep to it"),
    Refusal("tiny_chunks", 400, "the chunked body consists of very small chunks"),
    Refusal("bad_method", 405, "TRACE, CONNECT and unknown methods are not served"),
    Refusal("bad_expectation", 417, "Expect is understood as `100-continue` only"),
    Refusal("head_too_large", 431, "the head is too large or has too many headers"),
    Refusal("body_too_large", 413, "the body is larger than this router takes"),
    Refusal("bodies_full", 503, "too many bodies are arriving at once; try again"),
    Refusal("late_head", 408, "the head did not arrive in time"),
    Refusal("late_body", 408, "the body did not arrive in time"),
    Refusal("too_many_connections", 503, "too many connections; try again"),
    Refusal("too_many_of_address", 503, "too many connections from this address"),
)
REFUSALS: Mapping[str, Refusal] = MappingProxyType({each.reason: each for each in _ALL})
# Reasons for which a connection is closed without a word.
GIVEN_UP = ("silent", "bad_handshake", "slow_reader", "slow_close")
# What each answer of ours says, so that no browser takes it for a page.
NO_SNIFFING = ("X-Content-Type-Options", "nosniff")
