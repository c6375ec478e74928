"""Helpers that run `warmroute-sim` in this process and write a small file of every trace format."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from router.record.request_line import chain_bytes
from simulator.cli import main
from tests.simulator.trace_lines import (
    ACCESS,
    AZURE,
    BURSTGPT,
    CHAT,
    LOG_HEADING,
    export,
    session,
    span,
    turn,
    write,
)

REQUESTS = 24
FLEET = ("--workers", "2", "--profile", "llama-3.1-8b-h100")


class CommandResult(NamedTuple):
    """The exit status of a command line, and what it wrote to stdout and stderr."""

    status: int
    out: str
    err: str


Run = Callable[..., CommandResult]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a `warmroute-sim` command line; it converts arguments that are
    not strings.
    """
    monkeypatch.setenv("COLUMNS", "200")

    def called(*arguments: object) -> CommandResult:
        try:
            status = main([str(one) for one in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        return CommandResult(status, said.out, said.err)

    return called


def mooncake(number: int, **more: Any) -> dict[str, Any]:
    """Return line `number` of a trace: 1,300 tokens, 50 ms after the one before. Two of its blocks
    belong to one of three families.
    """
    family = 10 * (number % 3)
    line = {"timestamp": 50 * number, "input_length": 1300, "output_length": 20}
    return line | {"hash_ids": [family, family + 1, 1000 + number]} | more


def _qwen(number: int) -> dict[str, Any]:
    line = {"chat_id": number, "parent_chat_id": number - 3 if number >= 3 else -1, "turn": 1}
    ids = [number % 3 + 3 * block for block in range(20)]
    sizes = {"input_length": 320, "output_length": 20, "type": "text"}
    return {**line, **sizes, "timestamp": 60 + number / 20, "hash_ids": ids}


def _logged(number: int) -> dict[str, Any]:
    chain = np.arange(20, dtype=np.uint64) + np.uint64(1000 * (number % 3) + 1)
    text = base64.b64encode(chain_bytes(chain)).decode()
    line = {"at": 1.7e9 + number / 20, "model": "m", "prompt_tokens": 330, "output_tokens": 20}
    return {**line, "block_size": 16, "chain": text, "session": str(number % 3), "tenant": "t"}


def _session(number: int) -> dict[str, Any]:
    turns = [turn(step, 640 * (step + 1), [1, 10 * (step + 1)]) for step in range(3)]
    return session(f"s{number}", *turns)


def _chat(number: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"I am number {number % 3}. " * 40}]
    for step in range(number // 3):
        said += [{"role": "assistant", "content": f"Yes, {step}"}, {"role": "user", "content": "?"}]
    return {**CHAT, "timestamp": 1.7e9 + number / 20, "messages": said}


def _span(number: int) -> dict[str, Any]:
    sizes = {"usage__input_tokens": 330 + 40 * (number // 3), "usage__output_tokens": 20}
    return export(span(1.7e9 + number / 20, conversation__id=f"c{number % 3}", **sizes))


def lines_of(name: str) -> list[str | dict[str, Any]]:
    """Return some two dozen requests in the named format."""
    count = range(REQUESTS)
    stamps = [f"2023-11-16 18:15:{10 + number:02}.0000000" for number in count]
    made: dict[str, list[str | dict[str, Any]]] = {
        "mooncake": [mooncake(number) for number in count],
        "qwen": [_qwen(number) for number in count],
        "requests": [LOG_HEADING, *map(_logged, count)],
        "sessions": [_session(number) for number in range(REQUESTS // 3)],
        "azure": [AZURE, *(f"{stamp},374,20" for stamp in stamps)],
        "burstgpt": [BURSTGPT, *(f"{n},ChatGPT,472,18,490,Conversation log" for n in count)],
        "access_log": [{**ACCESS, "at": 1.7e9 + number / 20} for number in count],
        "otel": [_span(number) for number in count],
        "chats": [_chat(number) for number in count],
    }
    return made[name]


FORMATS = (
    "mooncake", "qwen", "requests", "sessions", "azure", "burstgpt", "access_log", "otel", "chats",
)  # fmt: skip


def trace(folder: Path, name: str = "mooncake", packed: str = "plain") -> Path:
    """Write a trace file of the named format and return its path; the file's name does not show the
    format.
    """
    return Path(write(folder, *lines_of(name), packed=packed).source)


def report(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON report."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return rows
