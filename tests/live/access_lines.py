"""Waits for the lines that a router writes to its access log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.live.stack import until


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until_logged(path: Path, count: int) -> dict[str, dict[str, Any]]:
    """Wait until the access log has `count` lines; return them by request id."""

    async def has_lines() -> bool:
        return len(lines_of(path)) >= count

    await until(has_lines, f"{count} lines")
    lines = lines_of(path)
    assert len(lines) == count
    return {line["id"]: line for line in lines}
