"""Replaces the model's name in a worker's answer by the name that the client asked for."""

from __future__ import annotations

import re

import msgspec

from kvkernels import body_fields
from router.body.paths import Path
from router.http.reply import ReplyHead
from router.names.long_answers import LongAnswer

_MOST_LINE_BYTES = 1 << 20  # of an event; a longer one is passed on unchanged
_LINE_END = re.compile(rb"[\r\n]")
_DATA = b"data:"
_FIELD = b'"model"'
_JSON = re.compile(rb"application/(?:[a-z0-9.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


def editor_of(path: Path, name: str) -> AnswerEditor:
    """Return the editor that puts `name` into the answer of a request to `path`."""
    inner = {"messages": "message", "responses": "response"}.get(path.reads)
    return AnswerEditor(msgspec.json.encode(name), inner)


class AnswerEditor:
    """Puts the name that a client asked for into one answer. Lifetime: reply.

    It is the `Editor` of an `EditedReply`.
    """

    def __init__(self, value: bytes, inner: str | None = None) -> None:
        """Make an editor that writes `value`, a name as JSON. `inner` is the key of an object in
        events that contains a model name, too.
        """
        self._value = value
        self._inner = inner
        self._events: EventLines | None = None
        self._long: LongAnswer | None = None

    def begin(self, head: ReplyHead) -> bool:
        if not head.answers or head.coded:
            return False
        self._events = self._long = None
        if head.event_stream:
            self._events = EventLines(self._value, self._inner)
            return True
        kinds = [value for name, value in head.headers if name.lower() == b"content-type"]
        if len(kinds) != 1 or not _JSON.match(kinds[0].strip()):
            return False
        self._long = LongAnswer(self._value)
        return True

    def feed(self, data: bytes) -> bytes:
        editor = self._events or self._long
        return data if editor is None else editor.feed(data)

    def flush(self) -> bytes:
        editor = self._events or self._long
        return b"" if editor is None else editor.flush()


class EventLines:
    """Replaces the model's name in a stream of server-sent events, whose data is one line of JSON
    each. Lifetime: reply.

    At most one line is kept in memory. Lines that are too long or not JSON are passed on unchanged.
    """

    def __init__(self, value: bytes, inner: str | None = None) -> None:
        self._value = value
        self._inner = inner
        self._kept: list[bytes] = []  # the beginning of a line
        self._kept_bytes = 0
        self._passing = False  # a line that is too long to be kept

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream, and return the edited bytes that are complete."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            return self._keep(data)
        kept, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        rest = data[end:]
        if self._passing:
            first = _LINE_END.search(data)
            assert first is not None, "one was found"
            at, self._passing = first.start(), False
            return data[:at] + self._lines(data[at:end]) + self._keep(rest)
        return self._lines(kept + data[:end]) + self._keep(rest)

    def flush(self) -> bytes:
        """Return the bytes that are still kept: a last line without a line end."""
        kept, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        return self._line(kept)

    def _keep(self, data: bytes) -> bytes:
        if self._passing or not data:
            return data
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes <= _MOST_LINE_BYTES:
            return b""
        kept, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        self._passing = True
        return kept

    def _lines(self, lines: bytes) -> bytes:
        if _FIELD not in lines:
            return lines
        return b"".join(map(self._line, lines.splitlines(keepends=True)))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or _FIELD not in line:
            return line
        text = line[len(_DATA) :]
        text = with_model(text, self._value, self._inner)
        return _DATA + text


def with_model(text: bytes, value: bytes, inner: str | None = None) -> bytes:
    """Return the JSON object `text` with `value` as its model, and also as the model of its object
    `inner`.

    Only a value that is a string is replaced. All other bytes stay the same, and so does a text
    that is not an object.
    """
    fault, _, found = body_fields(text, ("model", inner) if inner else ("model",))
    if fault is not None:
        return text
    edits = list[tuple[int, int]]()
    if (field := found[0]) is not None and text[field[0] : field[0] + 1] == b'"':
        edits.append(field[:2])
    if inner and (field := found[1]) is not None:
        within = text[field[0] : field[1]]
        fault, _, found = body_fields(within, ("model",))
        if fault is None and (own := found[0]) is not None and within[own[0] : own[0] + 1] == b'"':
            edits.append((field[0] + own[0], field[0] + own[1]))
    for begin, end in sorted(edits, reverse=True):
        text = text[:begin] + value + text[end:]
    return text
