"""Mooncake's trace lines (Qin et al., FAST 2025) and files of the same form, and Qwen-Bailian's.

    {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]}

`timestamp` is the arrival in ms; an id stands for 512 prompt tokens and names the whole prefix up
to there. Files list every block (the last one usually partial) or full blocks only; `session_id` is
read if a file has it.

Qwen-Bailian's lines ("KVCache Cache in the Wild", ATC 2025) have ids of 16 tokens, and chats with
parents; times are in seconds, and a request's session is the chat at the root of its chain of
parents:

    {"chat_id": 7, "parent_chat_id": 3, "timestamp": 61.5, "input_length": 40, "output_length": 9,
     "type": "text", "turn": 2, "hash_ids": [12, 13, 14]}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from simulator.traces.job import Job, LineError

BLOCK_TOKENS = 512
QWEN_BLOCK_TOKENS = 16
MAX_PROMPT_TOKENS = 4 << 20
MAX_OUTPUT_TOKENS = 1 << 20
MAX_ARRIVAL_S = 2 * 366 * 86_400
MAX_CHATS = 1_000_000  # remembered; a child of one forgotten starts a session of its own
NO_PARENT = -1

Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
SessionId = Annotated[str, msgspec.Meta(max_length=512)]
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A line of a Mooncake file; fields that are not named here are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_ARRIVAL_S * 1000)]
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[Id]
    session_id: SessionId | int | None = None


class _QwenLine(msgspec.Struct, frozen=True, gc=False):
    """A line of a Qwen-Bailian file; fields that are not named here are ignored."""

    chat_id: int
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_ARRIVAL_S)]
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[Id]
    parent_chat_id: int = NO_PARENT


L = TypeVar("L", _Line, _QwenLine)


def parser(block_tokens: int) -> Callable[[bytes], Job]:
    """Return the function that reads one line of Mooncake's; it raises `LineError`."""

    def session_of(line: _Line) -> str | None:
        return None if line.session_id is None else str(line.session_id)

    return _parser(_Line, 1e6, session_of, block_tokens)


def qwen_parser(block_tokens: int) -> Callable[[bytes], Job]:
    """Return the function that reads one line of Qwen-Bailian's, given in order; it raises
    `LineError`.
    """
    roots: dict[int, int] = {}

    def session_of(line: _QwenLine) -> str:
        root = line.chat_id
        if line.parent_chat_id != NO_PARENT:
            root = roots.get(line.parent_chat_id, line.parent_chat_id)
        roots[line.chat_id] = root
        if len(roots) > MAX_CHATS:
            del roots[next(iter(roots))]
        return str(root)

    return _parser(_QwenLine, 1e9, session_of, block_tokens)


def _parser(
    kind: type[L], unit_ns: float, session_of: Callable[[L], str | None], block_tokens: int
) -> Callable[[bytes], Job]:
    """Return the function that reads lines of the type `kind`.

    An answer of no tokens counts as one of one token, because an engine gives at least one.
    """
    decode = msgspec.json.Decoder(kind).decode

    def parse(raw: bytes) -> Job:
        try:
            line = decode(raw)
        except DECODE_ERRORS as error:
            raise LineError(str(error)) from error
        _check_count(len(line.hash_ids), line.input_length, block_tokens)
        return Job(
            round(line.timestamp * unit_ns),
            line.input_length,
            line.output_length or 1,
            np.array(line.hash_ids, np.uint64),
            session=session_of(line),
        )

    return parse


def _check_count(ids: int, prompt_tokens: int, block_tokens: int) -> None:
    """Raise `LineError` unless there is an id for each full block, and at most one more."""
    full, rest = divmod(prompt_tokens, block_tokens)
    if not full <= ids <= full + (rest > 0):
        raise LineError(
            f"hash_ids: {ids} of them, but input_length {prompt_tokens} has "
            f"{full + (rest > 0)} blocks of {block_tokens} tokens, {full} of them full"
        )
