"""The router's own request log (`router.record.request_line`) as a workload.

What arrived is what counts: a request that was turned away is in the workload like any other.
Where the log does not know how long an answer would have been, the mean of the known ones so far
stands in. Lines of a model that nobody serves, and of prompts that were never read, are no
workload. A log that went on after a restart has several headings, and each part of a recording
has one; sessions and tenants do not compare across headings of different salts, and are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from router.record.request_line import FORMAT, VERSION, hashes_of
from simulator.traces.job import Job, LineError
from simulator.traces.mooncake import (
    DECODE_ERRORS,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    SessionId,
)

BLOCK_TOKENS = 16
SLACK_S = 3600  # lines stand in order of the requests' ends
MAX_UNIX_S = 1 << 34


class RequestLogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request log can be asked for."""

    model: Annotated[
        str | None, msgspec.Meta(description="requests of this model only; a replay has one pool")
    ] = None


class _Line(msgspec.Struct, frozen=True, gc=False):
    """What a replay needs of a line, and `format`, which headings alone have."""

    format: str | None = None
    version: int | None = None
    salt: str = ""
    at: Annotated[float, msgspec.Meta(ge=0, le=MAX_UNIX_S)] | None = None
    model: str | None = None
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)] | None = None
    chain: bytes = b""
    session: SessionId | None = None
    tenant: SessionId | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] = 0


def block_size_of(raw: bytes, options: RequestLogOptions) -> int | None:
    """Tokens a block of this line's chain stands for, where it says and where it is asked for."""
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except DECODE_ERRORS:
        return None
    return line.block_size if line.chain and options.model in (None, line.model) else None


def parser(block_tokens: int, model: str | None = None) -> Callable[[bytes], Job | None]:
    """Makes the function that reads one line, after those before it; it raises `LineError`."""
    decode = msgspec.json.Decoder(_Line).decode
    headings = known = known_tokens = 0
    names = "0"  # whose names compare: of headings with one salt, or below one heading

    def parse(raw: bytes) -> Job | None:
        nonlocal headings, known, known_tokens, names
        try:
            line = decode(raw)
            chain = hashes_of(line.chain)
        except (*DECODE_ERRORS, ValueError) as error:
            raise LineError(str(error)) from error
        if line.format is not None:
            headings += 1
            _check_heading(line)
            names = line.salt or f"{headings}"
            return None
        if line.at is None or line.prompt_tokens is None:
            raise LineError(f"{'at' if line.at is None else 'prompt_tokens'}: is missing")
        if not line.prompt_tokens or line.model is None or model not in (None, line.model):
            return None
        _check_chain(line, len(chain), block_tokens)
        if line.output_tokens:
            known, known_tokens = known + 1, known_tokens + line.output_tokens
        return Job(
            round(line.at * 1e6) * 1000,  # a float that counts from 1970 tells no more
            line.prompt_tokens,
            line.output_tokens or (known_tokens // known if known else 1),
            chain,
            session=None if line.session is None else f"{names}/{line.session}",
            tenant=None if line.tenant is None else f"{names}/{line.tenant}",
            priority=line.priority,
            cached_tokens=line.cached_tokens,
        )

    return parse


def _check_heading(line: _Line) -> None:
    if line.format != FORMAT or line.version != VERSION:
        raise LineError(
            f"format: {line.format!r} version {line.version}; expected {FORMAT!r} {VERSION}"
        )


def _check_chain(line: _Line, blocks: int, block_tokens: int) -> None:
    if not blocks:
        return
    if line.block_size != block_tokens:
        raise LineError(
            f"block_size: {line.block_size}; expected {block_tokens}, as before it; where models "
            "have blocks of different sizes, choose one: --format 'requests?model=NAME'"
        )
    if blocks > (line.prompt_tokens or 0) // block_tokens:
        raise LineError(f"chain: {blocks} blocks for prompt_tokens {line.prompt_tokens}")
