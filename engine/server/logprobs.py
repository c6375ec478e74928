"""Logprobs in OpenAI's two forms: lists side by side for completions, entries for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.runners import Logprobs
from engine.wire.tokens import Tokenizer

Entry = dict[str, Any]


def entry(tokenizer: Tokenizer, token: int, logprobs: Logprobs) -> Entry:
    """One token of an answer as chats tell it. Half a character is told as U+FFFD."""
    top = [_one(tokenizer, each, logprob) for each, logprob in logprobs.top]
    return _one(tokenizer, token, logprobs.logprob) | {"top_logprobs": top}


def shaped(entries: Sequence[Entry], kind: str, start: int = 0) -> dict[str, Any]:
    """The `logprobs` of a choice: `content` for a chat, four lists for a completion.

    Offsets count the characters of the tokens; `start`: of those that were told before.
    """
    if kind == "chat":
        return {"content": entries}
    offsets, at = [], start
    for one in entries:
        offsets.append(at)
        at += len(one["token"])
    return {
        "tokens": [one["token"] for one in entries],
        "token_logprobs": [one["logprob"] for one in entries],
        "top_logprobs": [
            # Parts of characters look the same; the likeliest of them is told.
            {each["token"]: each["logprob"] for each in reversed(one["top_logprobs"])}
            for one in entries
        ],
        "text_offset": offsets,
    }


def _one(tokenizer: Tokenizer, token: int, logprob: float) -> Entry:
    text = tokenizer.decode([token])
    # JSON has no infinity; vLLM tells the same figure for what cannot be.
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
