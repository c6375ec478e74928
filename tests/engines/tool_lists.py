"""Tool lists of the Berkeley Function Calling Leaderboard, as clients of OpenAI's API send them.

Its package is installed only for its data and is not part of our product.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.environment import Environment

VERSION = "2026.3.23"  # of bfcl-eval
LIVE = "live_multiple"  # the file with lists from users, each of several tools
# As the leaderboard's own handlers of OpenAI's API write its types.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_SCHEMAS = ("properties", "items", "additionalProperties")
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")  # characters that OpenAI's function names lack
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolList:
    """A list of tools and the first chat that uses it."""

    source: str
    tools: list[Tool]
    messages: list[dict[str, str]]


def tool_lists() -> list[ToolList]:
    """Return all distinct lists, those of the file `LIVE` first; skip the test without
    the package.
    """
    package = Environment("bfcl", VERSION).or_skip().site_packages / "bfcl_eval" / "data"
    found: dict[str, ToolList] = {}
    for source, functions, messages in _rows(package):
        tools = [{"type": "function", "function": _function(one)} for one in functions]
        found.setdefault(json.dumps(functions), ToolList(source, tools, messages))
    return list(found.values())


def _rows(package: Path) -> Iterator[tuple[str, list[Any], list[dict[str, str]]]]:
    paths = sorted(package.glob("BFCL_v4_*.json"))
    for path in sorted(paths, key=lambda path: not path.stem.endswith(LIVE)):
        source = path.stem.removeprefix("BFCL_v4_")
        if source == "format_sensitivity":  # names of rows in other files
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("function"):
                yield source, row["function"], row["question"][0]
    for path in sorted((package / "multi_turn_func_doc").glob("*.json")):
        lines = path.read_text(encoding="utf-8").splitlines()
        asked = [{"role": "user", "content": f"What of {path.stem} can you do?"}]
        yield path.stem, [json.loads(line) for line in lines], asked


def _function(told: dict[str, Any]) -> dict[str, Any]:
    name = _OTHER.sub("_", told["name"])
    return {**told, "name": name, "parameters": _schema(told["parameters"])}


def _schema(told: Any) -> Any:
    """Return the schema with JSON Schema's names of types."""
    if not isinstance(told, dict):
        return told
    made = dict(told)
    if isinstance(told.get("type"), str):
        made["type"] = _TYPES.get(told["type"], told["type"])
    for key in _SCHEMAS:
        if key == "properties" and isinstance(told.get(key), dict):
            made[key] = {name: _schema(one) for name, one in told[key].items()}
        elif isinstance(told.get(key), dict):
            made[key] = _schema(told[key])
    return made
