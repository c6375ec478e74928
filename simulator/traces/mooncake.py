"""Mooncake's lines (Qin et al., FAST 2025), and those of files made in their image.

    {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]}

`timestamp` is the arrival in ms; an id stands for 512 prompt tokens and names the whole prefix up
to there. Files list every block (the last one usually partial) or full blocks only; `session_id`
is read where a file has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np

from simulator.traces.job import Job, LineError

BLOCK_TOKENS = 512
MAX_PROMPT_TOKENS = 4 << 20
MAX_OUTPUT_TOKENS = 1 << 20
MAX_ARRIVAL_S = 2 * 366 * 86_400

Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
SessionId = Annotated[str, msgspec.Meta(max_length=512)]
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A line as it stands in the file; fields that are not named here are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_ARRIVAL_S * 1000)]
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[Id]
    session_id: SessionId | int | None = None


def parser(block_tokens: int) -> Callable[[bytes], Job]:
    """Makes the function that reads one line; it raises `LineError`.

    An answer of no tokens counts as one of one token: an engine gives at least that.
    """
    decode = msgspec.json.Decoder(_Line).decode
    array, uint64 = np.array, np.uint64

    def parse(raw: bytes) -> Job:
        try:
            line = decode(raw)
        except DECODE_ERRORS as error:
            raise LineError(str(error)) from error
        check_count(line.hash_ids, line.input_length, block_tokens)
        session = line.session_id
        return Job(
            round(line.timestamp * 1e6),
            line.input_length,
            line.output_length or 1,
            array(line.hash_ids, uint64),
            session=session if session is None else str(session),
        )

    return parse


def check_count(hash_ids: list[int], prompt_tokens: int, block_tokens: int) -> None:
    """Raises `LineError` unless there is an id for each full block, and at most one more."""
    full, rest = divmod(prompt_tokens, block_tokens)
    if not full <= len(hash_ids) <= full + (rest > 0):
        raise LineError(
            f"hash_ids: {len(hash_ids)} of them, but input_length {prompt_tokens} has "
            f"{full + (rest > 0)} blocks of {block_tokens} tokens, {full} of them full"
        )
