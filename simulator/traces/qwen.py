"""Qwen-Bailian's lines ("KVCache Cache in the Wild", ATC 2025): 16-token ids, chats with parents.

    {"chat_id": 7, "parent_chat_id": 3, "timestamp": 61.5, "input_length": 40, "output_length": 9,
     "type": "text", "turn": 2, "hash_ids": [12, 13, 14]}

Times are seconds. A request's session is the chat at the root of its line of parents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np

from simulator.traces.job import Job, LineError
from simulator.traces.mooncake import (
    DECODE_ERRORS,
    MAX_ARRIVAL_S,
    Id,
    OutputTokens,
    PromptTokens,
    check_count,
)

BLOCK_TOKENS = 16
MAX_CHATS = 1_000_000  # remembered; a child of one forgotten starts a session of its own
NO_PARENT = -1


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A line as it stands in the file; fields that are not named here are ignored."""

    chat_id: int
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_ARRIVAL_S)]
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[Id]
    parent_chat_id: int = NO_PARENT


def parser(block_tokens: int) -> Callable[[bytes], Job]:
    """Makes the function that reads one line, after those before it; it raises `LineError`."""
    decode = msgspec.json.Decoder(_Line).decode
    roots: dict[int, int] = {}

    def parse(raw: bytes) -> Job:
        try:
            line = decode(raw)
        except DECODE_ERRORS as error:
            raise LineError(str(error)) from error
        check_count(line.hash_ids, line.input_length, block_tokens)
        root = line.chat_id
        if line.parent_chat_id != NO_PARENT:
            root = roots.get(line.parent_chat_id, line.parent_chat_id)
        roots[line.chat_id] = root
        if len(roots) > MAX_CHATS:
            del roots[next(iter(roots))]
        return Job(
            round(line.timestamp * 1e9),
            line.input_length,
            line.output_length or 1,
            np.array(line.hash_ids, np.uint64),
            session=str(root),
        )

    return parse
