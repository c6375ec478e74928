"""Requests of every kind that clients send to real engines, with prompts that share prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.engines.model import LORA
from tests.engines.vllm_server import MODEL

WORDS = [
    "worker",
    "pool",
    "block",
    "prefix",
    "router",
    "cache",
    "token",
    "prompt",
    "session",
    "tenant",
    "policy",
    "cost",
    "hold",
]
TRUNKS = 4
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def words(draw: random.Random, count: int) -> str:
    """Return a text of `count` words; a word is two to four tokens."""
    return " ".join(draw.choice(WORDS) for _ in range(count))


def requests(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, body) of requests with recurring prefixes, exact token ids and one
    answer each.
    """
    draw = random.Random(seed)
    trunks = [words(draw, 60) for _ in range(TRUNKS)]
    said = [[{"role": "user", "content": words(draw, 20)}] for _ in range(TRUNKS)]
    for serial in range(count):
        trunk, more = draw.choice(trunks), words(draw, draw.randrange(1, 40))
        body: dict[str, Any] = {"model": MODEL, "max_tokens": draw.randrange(1, 9)}
        body |= {"temperature": draw.choice([0, 0, 0.8]), "seed": serial}
        match draw.randrange(8):
            case 0:
                yield "/v1/completions", body | {"prompt": f"{trunk} {more}"}
            case 1:
                ids = [draw.randrange(3, 4000) for _ in range(draw.choice([31, 32, 33, 64, 200]))]
                yield "/v1/completions", body | {"prompt": ids}
            case 2:  # the same prompt again, to the token
                yield "/v1/completions", body | {"prompt": trunk}
            case 3:
                yield "/v1/completions", body | {"prompt": f"{trunk} {more}", "model": LORA}
            case 4:
                salt = draw.choice(["ann", "bob"])
                yield "/v1/completions", body | {"prompt": f"{trunk} {more}", "cache_salt": salt}
            case 5:
                chat = [{"role": "system", "content": trunk}, {"role": "user", "content": more}]
                yield "/v1/chat/completions", body | {"messages": chat, "tools": [TOOL]}
            case 6:
                chat = [{"role": "system", "content": trunk}, {"role": "user", "content": more}]
                yield "/v1/chat/completions", body | {"messages": chat}
            case 7:  # a conversation that goes on
                turn = draw.choice(said)
                turn.append({"role": "assistant", "content": words(draw, 10)})
                turn.append({"role": "user", "content": more})
                del turn[:-12]
                yield "/v1/chat/completions", body | {"messages": list(turn)}
