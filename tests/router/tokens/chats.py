"""Makes random conversations as clients send them: with tools, reasoning, calls and results."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mistral_common

from engine.wire.tokens import Chat

Message = dict[str, Any]
TEKKEN_FILE = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look <it> up.\nOnce.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "description": "a word", "enum": ["a", "b"]},
                    "most": {"type": ["number", "null"], "default": 1.5},
                },
                "required": ["what"],
            },
        },
    },
    {"type": "function", "function": {"name": "see_2", "description": "See."}},
]
_WORDS = (
    *("naïve", "12345 ", "\n\n", "\r\n", "a", "  b", " c", "東京", "🦊", "<|end|>", "[INST]", "/"),
    *("'s", "\t", '{"x": 1}', " the", " quick", "D", "0", "</s>"),
)


def text(draw: random.Random, least: int = 1) -> str:
    """Draw a text of up to 300 words, after `least` letters."""
    return "x" * least + "".join(draw.choices(_WORDS, k=draw.choice((0, 1, 5, 50, 300))))


def _content(draw: random.Random) -> Any:
    if draw.random() < 0.7:
        return text(draw)
    return [{"type": "text", "text": text(draw)} for _ in range(draw.randint(1, 3))]


def _worked(draw: random.Random, thinks: bool) -> Iterator[Message]:
    """Yield messages in which the model calls tools, and the results of these calls."""
    for _ in range(draw.randint(0, 2)):
        call_id = f"{draw.choice(('', 'chatcmpl-tool-'))}{draw.randrange(10**8, 10**9)}"
        arguments = json.dumps({"what": text(draw)}, ensure_ascii=draw.random() < 0.5)
        called = {"name": draw.choice(("look", "see_2")), "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": called}
        message = {"role": "assistant", "content": draw.choice((None, "")), "tool_calls": [call]}
        if thinks and draw.random() < 0.7:
            message[draw.choice(("reasoning", "reasoning_content"))] = text(draw)
        yield message
        yield {"role": "tool", "tool_call_id": call_id, "content": text(draw)}


def conversation(draw: random.Random, turns: int, thinks: bool = True) -> list[Message]:
    """Return messages that end with a question, after `turns` questions with answers."""
    messages: list[Message] = []
    if draw.random() < 0.6:
        messages.append({"role": "system", "content": text(draw)})
    for _ in range(turns):
        messages.append({"role": "user", "content": _content(draw)})
        messages += _worked(draw, thinks)
        answer: Message = {"role": "assistant", "content": _content(draw)}
        if thinks and draw.random() < 0.5:
            answer["reasoning"] = text(draw)
        messages.append(answer)
    messages.append({"role": "user", "content": _content(draw)})
    return messages


def edited(draw: random.Random, messages: list[Message]) -> list[Message]:
    """Return the conversation so far with another text in one of its questions."""
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
    at = draw.choice(asked)
    return [*messages[:at], {"role": "user", "content": text(draw)}, *messages[at + 1 :]]


def chats(draw: random.Random, count: int, thinks: bool = True) -> Iterator[Chat]:
    """Yield requests of one conversation: later turns, edited turns, with tools or without."""
    messages = conversation(draw, 0, thinks)
    for _ in range(count):
        effort = draw.choice((None, "low", "medium", "high")) if thinks else None
        tools = TOOLS if draw.random() < 0.5 else None
        yield Chat(messages=messages, tools=tools, reasoning_effort=effort)
        if draw.random() < 0.2:
            messages = edited(draw, messages)
            continue
        answer: Message = {"role": "assistant", "content": text(draw)}
        if thinks and draw.random() < 0.5:
            answer["reasoning"] = text(draw)
        more = [*_worked(draw, thinks), answer, {"role": "user", "content": _content(draw)}]
        messages = [*messages, *more]
