"""Tests of files with clients' requests for the doctor: salts, beginnings, and the parts that
prompts share after their beginnings.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from router.doctor.routing.prompts import GivenFileError, GivenPrompts, given_prompts

SYSTEM = "You are a careful engineer. " * 60


def prompts_of(path: Path, bodies: list[Any]) -> GivenPrompts:
    path.write_text("\n".join(map(json.dumps, bodies)) + "\n")
    return given_prompts(path)


def chat(system: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages} | fields


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bodies.jsonl"


def test_a_line_at_the_start_that_differs_per_request_is_found(path: Path) -> None:
    lines = [f"x-anthropic-billing-header: cch={n * 7919:08x};\n" for n in range(6)]
    found = prompts_of(path, [chat(line + SYSTEM, f"q{n}") for n, line in enumerate(lines)])
    assert found.common < 64 < 1_000 < found.later
    assert found.differs.startswith(lines[1][found.common : found.common + 4])
    parts = [
        {
            "model": "m",
            "system": [{"type": "text", "text": line}, {"type": "text", "text": SYSTEM}],
            "messages": [],
        }
        for line in lines
    ]
    assert prompts_of(path, parts).later > 1_000


def test_prompts_with_a_common_prefix_have_no_later_common_part(path: Path) -> None:
    found = prompts_of(path, [chat(SYSTEM, f"question {n} {'x' * n}") for n in range(6)])
    assert found.common >= len(SYSTEM)
    assert (found.later, found.differs, found.salts) == (0, "", 0)


def test_token_ids_are_compared_but_never_shown(path: Path) -> None:
    shared = list(range(1_000, 1_400))
    found = prompts_of(path, [{"prompt": [n + 1, n + 2, *shared]} for n in range(6)])
    assert found.common < 8 < 3_000 < found.later
    assert found.differs == ""


def test_cache_salts_are_counted(path: Path) -> None:
    found = prompts_of(path, [chat(SYSTEM, "q", cache_salt=f"salt-{n}") for n in range(5)])
    assert (found.salts, found.salted, found.count) == (5, 5, 5)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"inputs": []}', '{"prompt": 3}', '{"messages": 3}', "null", "[" * 9999],
)
def test_the_error_for_a_file_without_requests_names_the_file(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(GivenFileError, match=r"bodies\.jsonl"):
        given_prompts(path)
    with pytest.raises(GivenFileError, match="No such file"):
        given_prompts(path.parent / "none")


def test_any_json_is_read_or_refused(path: Path) -> None:
    draw = random.Random(7)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind < 4:
            return draw.choice([None, draw.randrange(-9, 2**70), "text", 1.5])
        if kind == 4:
            return [value(depth - 1) for _ in range(draw.randrange(3))]
        names = ("prompt", "messages", "content", "text", "system", "cache_salt", "role")
        return {draw.choice(names): value(depth - 1) for _ in range(draw.randrange(4))}

    read = 0
    for _ in range(600):
        path.write_text("\n".join(json.dumps(value(4)) for _ in range(draw.randrange(1, 3))))
        with suppress(GivenFileError):
            read += given_prompts(path).count
    assert read > 5
