"""Hints for files that are nearly a trace: the contents of their first lines, and a command to
convert them. A hint names only fields that are listed in this module or spelt nearly so, and no
text of the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from policies.near import nearest
from simulator.traces.mooncake import DECODE_ERRORS
from simulator.traces.tables import AZURE, BURSTGPT

_LINES = "one JSON object a line"
# The fields by which a format is known, for those whose names may be misspelt.
_KNOWN_BY = (
    ("chats", ("messages",)),
    ("chats", ("prompt",)),
    ("mooncake", ("timestamp", "input_length")),
    ("sessions", ("requests", "block_size")),
    ("requests", ("at", "chain", "prompt_tokens")),
    ("otel", ("resourceSpans",)),
)
_FIELD = re.compile(r"[A-Za-z_]\w{1,39}", re.ASCII)  # a name that may be repeated to the user
_MOST_FIELDS = 100
_ALIKE = 0.75
_CHATS = ("conversations", "conversation", "dialogue", "dialog", "turns", "history", "data")
_BODIES = ("request", "body")
_ASKED = ("instruction", "question", "query", "input", "text")
_ANSWERED = ("output", "answer", "response", "completion")
_SEPARATORS = ",;\t"
# A message of each way to write one, as jq makes it a `messages` entry.
_FROM_VALUE = '{role: ({"human": "user", "gpt": "assistant"}[.from] // .from), content: .value}'
_IN_TURN = (
    'to_entries[] | {role: (if .key % 2 == 0 then "user" else "assistant" end), content: .value}'
)


def hint_of(head: Sequence[bytes]) -> str:
    """Return a hint on a file: the contents of its first lines, the expected form, and a command;
    "" if the lines show nothing known.
    """
    first = head[0].lstrip()
    try:
        line = msgspec.json.decode(first)
    except DECODE_ERRORS:
        if first[:1] == b"[" or first.strip() == b"{":
            return _of_array("spread over lines")
        return "" if first[:1] == b"{" else _of_table(head)
    if isinstance(line, list):
        return _of_array("in one line")
    return _of_object(line) if isinstance(line, dict) else ""


def cut(head: Sequence[bytes]) -> str:
    """Return a remark on a file whose only line is the beginning of a JSON object; "" for any other
    file.
    """
    if len(head) > 1 or head[0].lstrip()[:1] != b"{" or head[0].endswith(b"\n"):
        return ""
    try:
        msgspec.json.decode(head[0])
    except DECODE_ERRORS as error:
        if "truncated" not in str(error):
            return ""
    else:
        return ""
    return "its only line ends in the middle, so the file seems cut off: copy the file again, or "


def _of_array(how: str) -> str:
    return (
        f'seen: JSON {how}; expected {_LINES}, which `jq -c \'if type == "array" then .[] else . '
        "end' FILE` makes of an array or of objects that are spread over lines"
    )


def _of_object(line: dict[str, Any]) -> str:
    for name in _BODIES:
        if isinstance(text := line.get(name), str) and text.lstrip()[:1] == "{":
            return _hint(
                f"`{name}` as text that has JSON in it",
                f"`{name}` as an object",
                f".{name} |= fromjson",
            )
    for name in _CHATS:
        if isinstance(turns := line.get(name), list) and turns and (one := _turn(turns[0])):
            return _hint(
                f"conversations in `{name}`",
                "`messages` with `role` and `content`, one request a line",
                f"[.{name} | {one}] as $m | range($m | length) as $i | "
                'select($m[$i].role == "assistant") | {messages: $m[:$i + 1]}',
            )
    if misspelt := _misspelt(line):
        return misspelt
    asked = [name for name in _ASKED if isinstance(line.get(name), str)]
    if not asked:
        return ""
    answer = next((name for name in _ANSWERED if isinstance(line.get(name), str)), None)
    prompt = f".{asked[0]}" if len(asked) == 1 else f'(.{asked[0]} + "\\n" + .{asked[1]})'
    completion = f", completion: .{answer}" if answer else ""
    return _hint(
        f"texts in `{'`, `'.join(asked)}`",
        "`prompt`, `messages`, or `input` beside `model`",
        f"{{prompt: {prompt}{completion}}}",
    )


def _misspelt(line: dict[str, Any]) -> str:
    """Return a hint for a line that would be a request if one misspelt field were corrected."""
    for within in ("", *_BODIES):
        inside = line.get(within) if within else line
        if not isinstance(inside, dict):
            continue
        fields = [name for name in list(inside)[:_MOST_FIELDS] if _FIELD.fullmatch(name)]
        for form, needed in _KNOWN_BY:
            wrong = {name: nearest(name, fields, _ALIKE) for name in needed if name not in inside}
            if None in wrong.values() or (within and form != "chats"):
                continue
            path = f".{within} |= " if within else ""
            renamed = " | ".join(
                f".{name} = .{field} | del(.{field})" for name, field in wrong.items()
            )
            return _hint(
                f"`{'`, `'.join(map(str, wrong.values()))}` in the first line",
                f"`{'`, `'.join(wrong)}`, of format {form}",
                f"{path}({renamed})" if path else renamed,
            )
    return ""


def _turn(one: Any) -> str:
    """Return the jq expression that turns the turns of a conversation into messages, chosen by the
    form of the first turn.
    """
    if isinstance(one, str):
        return _IN_TURN
    if isinstance(one, dict) and {"from", "value"} <= one.keys():
        return f".[] | {_FROM_VALUE}"
    return ".[] | {role, content}" if isinstance(one, dict) and "role" in one else ""


def _of_table(head: Sequence[bytes]) -> str:
    try:
        lines = [raw.decode().strip() for raw in head]
    except UnicodeDecodeError:
        return ""
    for mark in _SEPARATORS:
        counts = {line.count(mark) for line in lines}
        if len(lines) > 1 and len(counts) == 1 and counts != {0}:
            return (
                f"seen: a table of {counts.pop() + 1} columns; understood: CSV whose first line "
                f"has the columns {', '.join(AZURE)} (times of the calendar) or "
                f"{', '.join(BURSTGPT)} (seconds), with commas; do: write one of these headings"
            )
    return ""


def _hint(seen: str, understood: str, jq: str) -> str:
    return f"seen: {seen}; understood: {understood}; do: `jq -c '{jq}' FILE > trace.jsonl`"
