"""Tests of the native parser of request bodies with hostile input."""

import json
from pathlib import Path

from tests.effort import EFFORT
from tests.kernels.fuzz.fuzzing import fuzz

SEEDS = (
    {"model": "m", "prompt": 'a text \u00e9 \U0001f600\n\\ and "more"', "stream": True, "n": 2},
    {"prompt": [1, 20, 300, 4000], "max_tokens": 5, "priority": -1, "user": "u", "a": [1.5e3]},
    {"prompt": [1, 45555555000, 2**62], "max_tokens": 5},
    {"prompt": ["one", "two"], "cache_salt": "s", "chat_template_kwargs": {"a": None}},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}, "there"]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "n": -7}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
    },
)


def test_mutated_bodies_do_not_crash_the_parser(clang: None, tmp_path: Path) -> None:
    """The native parser survives a fixed number of mutated inputs that start from bodies of each
    kind.
    """
    seeds = {}
    for number, body in enumerate(SEEDS):
        seeds[f"{number}"] = json.dumps(body).encode()
        seeds[f"{number}-raw"] = json.dumps(body, ensure_ascii=False, indent=1).encode()
    fuzz("requests", seeds, tmp_path, 30_000 * EFFORT)
