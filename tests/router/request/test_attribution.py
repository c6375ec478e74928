"""Tests of the attribution lines of Claude Code: which of its releases change the line with each
request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.body.paths import PATHS
from router.body.scan import SHAPES, ScanLimits
from router.http.parser import Fields
from router.identity.identity import IdentityReader
from router.request import attribution
from router.request.attribution import AttributionLines

RECORDED = json.loads((Path(__file__).parent / "agent_clients" / "claude_code.json").read_text())
READER = IdentityReader("x-session-id")


def lines_of(version: str, setup: str) -> AttributionLines:
    """Return the attribution lines after reading all requests of one recorded release and setup."""
    lines = AttributionLines()
    for row in RECORDED:
        if (row["version"], row["setup"]) != (version, setup) or row["body"] is None:
            continue
        if "count" in (path := row["path"].partition("?")[0]):
            continue
        scanned = SHAPES[PATHS[path].reads](json.dumps(row["body"]).encode(), ScanLimits())
        head = "".join(f"{name}: {value}\r\n" for name, value in row["headers"])
        headers = Fields(f"POST / HTTP/1.1\r\n{head}\r\n".encode())
        if scanned.attribution is not None:
            said = READER.read(headers, scanned.session, scanned.agent_fields)
            lines.count(None, said.session, scanned.attribution)
    return lines


@pytest.mark.parametrize(
    ("version", "setup", "same", "changed"),
    [
        # A title's request has the main agent's id and a line of its own.
        ("2.1.332", "interactive", 7, 3),
        ("2.1.197", "print", 6, 1),
        ("2.1.170", "print", 0, 6),
        ("2.1.332", "print, CLAUDE_CODE_ATTRIBUTION_HEADER=0", 0, 0),
    ],
)
def test_releases_before_2_1_181_change_the_line_with_each_request(
    version: str, setup: str, same: int, changed: int
) -> None:
    lines = lines_of(version, setup)
    assert (lines.same, lines.changed) == (same, changed)


def body(*system: str, **fields: Any) -> bytes:
    parts = [{"type": "text", "text": text} for text in system]
    said = {"messages": [{"role": "user", "content": "a"}], "system": parts, **fields}
    return json.dumps(said).encode()


def test_only_the_first_text_of_a_system_prompt_is_an_attribution_line() -> None:
    read = SHAPES["messages"]
    line = "x-anthropic-billing-header: cch=1;"
    found = read(body(line, "You are."), ScanLimits()).attribution
    assert found == read(body(line, "Others."), ScanLimits()).attribution
    assert found != read(body(f"{line} ", "You are."), ScanLimits()).attribution
    assert line.encode() not in (found or b"")
    assert read(body("You are.", line), ScanLimits()).attribution is None


def test_lines_are_kept_per_session_and_tenant_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attribution, "_SESSIONS_MAX", 2)
    lines = AttributionLines()
    lines.count(None, None, b"1")
    lines.count(None, None, b"2")  # of no session
    lines.count("one", "a", b"1")
    lines.count("two", "a", b"2")
    assert (lines.same, lines.changed) == (0, 0)
    lines.count("one", "a", b"1")
    lines.count("two", "a", b"3")
    assert (lines.same, lines.changed) == (1, 1)
    lines.count("two", "b", b"1")  # "one" is forgotten
    lines.count("one", "a", b"2")
    assert (lines.same, lines.changed) == (1, 1)
