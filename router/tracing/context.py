"""W3C Trace Context, level 1 (w3.org/TR/trace-context): read strictly, written again."""

from __future__ import annotations

import re
from collections.abc import Iterable

from policies.contract import record
from router.upstream.reply import Header

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1  # of the flags

_MAX_STATE_CHARS, _MAX_MEMBERS = 512, 32
_MAX_PARENT_BYTES = 512  # of a later version, which may say more
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


@record
class TraceContext:
    """Whose part a request is."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0: of the caller's span
    sampled: bool
    state: str = ""  # what vendors say of it, canonical; "": nothing


def read_context(headers: Iterable[Header]) -> TraceContext | None:
    """Of a request's headers; None where `traceparent` is missing, there twice, or none.

    A `tracestate` that is wrong or too long counts as none.
    """
    parents, states = [], []
    for name, value in headers:
        if len(name) == 11 and name.lower() == TRACEPARENT:
            parents.append(value)
        elif len(name) == 10 and name.lower() == TRACESTATE:
            states.append(value)
    if len(parents) != 1 or len(parents[0]) > _MAX_PARENT_BYTES:
        return None
    found = _PARENT.fullmatch(parents[0].strip(b" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    ids = int(trace_id, 16), int(span_id, 16)
    if not all(ids):
        return None
    return TraceContext(*ids, bool(int(flags, 16) & SAMPLED), _state(b",".join(states)))


def headers_of(trace_id: int, span_id: int, sampled: bool, state: str = "") -> tuple[Header, ...]:
    """As a request carries them, our span its parent."""
    parent: Header = (TRACEPARENT, b"00-%032x-%016x-%02x" % (trace_id, span_id, sampled))
    return (parent, (TRACESTATE, state.encode())) if state else (parent,)


def _state(said: bytes) -> str:
    """The list in its one form; "" for one that is wrong."""
    members = [member.strip(" \t") for member in said.decode("latin-1").split(",")]
    members = [member for member in members if member]
    joined = ",".join(members)
    keys = {member.partition("=")[0] for member in members}
    if len(joined) > _MAX_STATE_CHARS or len(members) > _MAX_MEMBERS or len(keys) < len(members):
        return ""
    return joined if all(map(_MEMBER.fullmatch, members)) else ""
