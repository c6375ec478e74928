"""The router's own log: lines for people, or JSON lines with the same words, one for each event.

A line that concerns one request is logged with `extra=about(...)`, so that it has the ids by which
the access log, the spans and the client know that request.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_CHARS = 8_192  # of a message
_MAX_TRACEBACK_CHARS = 32_768  # its end says most
_IDS = ("request", "trace")


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of the router's own log, as JSON."""

    time: str  # UTC, RFC 3339, milliseconds
    level: str  # debug, info, warning, error, critical
    logger: str
    message: str
    request: str = ""  # `x-request-id`
    trace: str = ""  # trace id
    exception: str = ""  # the traceback


def configure(level: str, form: LogFormat) -> None:
    """Send the router's log to standard error from now on, at this level and in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def about(request: str, trace: str) -> dict[str, str]:
    """Return the `extra` argument for a log line about one request: the request's id and its
    trace's id.
    """
    return {"request": request, "trace": trace}


def worth_a_line(occurrences: int) -> bool:
    """Return whether a repeated event should be logged: at its 1st, 2nd, 4th, 8th, ...
    occurrence.
    """
    return occurrences & (occurrences - 1) == 0


class TextLines(logging.Formatter):
    """Formats log lines as text, with the ids of the request after the message. Lifetime:
    process.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the text of a log line with the request's ids; see `logging.Formatter`."""
        ids = [f"{name}={value}" for name in _IDS if (value := getattr(record, name, ""))]
        line = super().formatMessage(record)
        return f"{line} [{' '.join(ids)}]" if ids else line


class JsonLines(logging.Formatter):
    """Formats each log line as one JSON object, whatever text it has. Lifetime: process."""

    def __init__(self) -> None:
        super().__init__()
        self._encode = msgspec.json.Encoder().encode

    def format(self, record: logging.LogRecord) -> str:
        """Return a log line as JSON; see `logging.Formatter`."""
        ids: dict[str, Any] = {name: str(getattr(record, name, "")) for name in _IDS}
        exception = ""
        if record.exc_info:
            exception = _cut_front(self.formatException(record.exc_info))
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = LogLine(
            at.replace("+00:00", "Z"),
            record.levelname.lower(),
            record.name,
            _whole(record.getMessage()[:_MAX_CHARS]),
            **ids,
            exception=_whole(exception),
        )
        return self._encode(line).decode()


def _cut_front(text: str) -> str:
    return text if len(text) <= _MAX_TRACEBACK_CHARS else "..." + text[-_MAX_TRACEBACK_CHARS:]


def _whole(text: str) -> str:
    """Return the text without unpaired surrogates, which JSON cannot contain."""
    return text.encode("utf-8", "replace").decode()
