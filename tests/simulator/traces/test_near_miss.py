"""Tests of files that are nearly chats: the error message, and that the command it suggests makes a
trace of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from simulator.traces.job import Job, TraceError
from simulator.traces.spec import WorkloadSpec
from tests.simulator.trace_lines import read

SECRET = "the seventh heron eats plums "
TURNS = [SECRET * 9, "Yes.", "Why?", "Because."]
ROLES = ("user", "assistant") * 2
SHARE_GPT = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text}
             for role, text in zip(ROLES, TURNS, strict=True)]  # fmt: skip
NAMED = [{"role": role, "content": text} for role, text in zip(ROLES, TURNS, strict=True)]
CHAT = {"model": "m", "messages": NAMED[:3]}


def error_of(folder: Path, text: str) -> tuple[Path, str]:
    """Write a file with this text; return its path and the error on reading it."""
    path = folder / "asked"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match="its first lines are of no known format; ") as caught:
        read(WorkloadSpec(str(path)))
    said = str(caught.value)
    assert "heron" not in said
    return path, said


def converted(path: Path, said: str) -> list[Job]:
    """Run the command that the error message suggests; return the requests of the file that it
    writes.
    """
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed (Debian package: jq)")
    (command,) = re.findall(r"`(jq -c '.*' FILE)", said)
    again = path.with_name("made")
    with again.open("wb") as sink:
        done = subprocess.run(
            ["sh", "-c", command.replace("FILE", '"$0"'), str(path)],
            stdout=sink,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return read(WorkloadSpec(str(again)))


@pytest.mark.parametrize(
    ("line", "seen", "requests"),
    [
        ({"id": 7, "conversations": SHARE_GPT}, "conversations in `conversations`", 2),
        ({"conversation": NAMED, "model": "m"}, "conversations in `conversation`", 2),
        ({"id": "7", "data": TURNS}, "conversations in `data`", 2),
        ({"question": SECRET, "answer": "Yes."}, "texts in `question`", 1),
        (
            {"instruction": SECRET, "input": "Why?", "output": "So."},
            "texts in `instruction`, `i",
            1,
        ),
        ({"text": SECRET}, "texts in `text`", 1),
        ({"request": json.dumps(CHAT), "id": 7}, "`request` as text that has JSON in it", 1),
        ({"body": json.dumps(CHAT)}, "`body` as text that has JSON in it", 1),
    ],
)
def test_the_suggested_command_converts_the_file(
    tmp_path: Path, line: dict[str, Any], seen: str, requests: int
) -> None:
    path, said = error_of(tmp_path, f"{json.dumps(line)}\n" * 3)
    for words in (f"seen: {seen}", "understood: `", "do: `jq -c '"):
        assert words in said
    assert said.count("\n") == 0
    jobs = converted(path, said)
    assert len(jobs) == 3 * requests
    assert jobs[0].prompt_tokens >= 7


MOONCAKE = {"input_length": 40, "output_length": 9, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("line", "seen", "understood"),
    [
        ({"model": "m", "mesages": NAMED[:3]}, "`mesages`", "`messages`, of format chats"),
        ({"promt": SECRET}, "`promt`", "`prompt`, of format chats"),
        ({"body": {"mesages": NAMED[:1]}}, "`mesages`", "`messages`, of format chats"),
        ({**MOONCAKE, "timestmp": 0}, "`timestmp`", "`timestamp`, of format mooncake"),
        (
            {"hash_ids": [1], "output_length": 9, "time_stamp": 0, "input_lenght": 40},
            "`time_stamp`, `input_lenght`",
            "`timestamp`, `input_length`, of format mooncake",
        ),
    ],
)
def test_the_suggested_command_renames_a_field_misspelt_in_all_lines(
    tmp_path: Path, line: dict[str, Any], seen: str, understood: str
) -> None:
    path, said = error_of(tmp_path, f"{json.dumps(line)}\n" * 3)
    assert f"seen: {seen} in the first line; understood: {understood}; do: `jq -c '" in said
    assert len(converted(path, said)) == 3


@pytest.mark.parametrize("indent", [None, 1])
def test_the_suggested_command_makes_lines_of_an_array(tmp_path: Path, indent: int | None) -> None:
    path, said = error_of(tmp_path, json.dumps([CHAT, CHAT], indent=indent))
    assert "seen: JSON" in said
    assert "one JSON object a line" in said
    assert len(converted(path, said)) == 2


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_the_error_for_a_table_with_another_heading_lists_known_headings(
    tmp_path: Path, mark: str
) -> None:
    heading = mark.join(("when", SECRET, "out"))
    _, said = error_of(tmp_path, f"{heading}\n1{mark}2{mark}3\n")
    assert "seen: a table of 3 columns; understood: CSV whose first line has" in said
    assert "TIMESTAMP, ContextTokens, GeneratedTokens" in said
    assert "Timestamp, Request tokens, Response tokens" in said


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"{SECRET}, and\n{SECRET}\n",
        '{"heron": "secret"}\n',
        '{"conversations": []}\n',
        '{"data": [7]}\n',
        '{"heron": ',
        json.dumps({"mesages " * 9: SECRET, "messages\nheron": 7}),
        json.dumps({"mesages": 7, "x": 7})[1:],
        "7\n",
        "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_the_error_for_an_unrecognized_file_lists_the_formats(tmp_path: Path, text: str) -> None:
    _, said = error_of(tmp_path, text)
    assert "name one of: qwen, mooncake, " in said


def test_the_error_for_a_single_truncated_line_suggests_to_copy_the_file(tmp_path: Path) -> None:
    _, said = error_of(tmp_path, json.dumps(CHAT)[:-9])
    assert "its only line ends in the middle, so the file seems cut off: copy the file" in said
    for whole in ('{"heron": 7}', '{"heron": 7}\n', '{"heron": 7]'):
        assert "cut off" not in error_of(tmp_path, whole)[1]


def test_the_error_for_a_too_long_line_suggests_to_split_an_array(tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_text(json.dumps([CHAT] * 40_000))
    with pytest.raises(TraceError, match=re.escape("`jq -c '.[]' FILE` makes lines of a JSON arr")):
        read(WorkloadSpec(str(path)))
