"""The table of requests while it grows: machine integers only, about 70 bytes a request.

Beside it stand the names of sessions, to tell which requests are of one.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.replay.result import NEVER, RequestTable

_GROW = 4096  # rows added at once
_TYPES = {
    "arrival_ns": "q",
    "dispatched_ns": "q",
    "first_token_ns": "q",
    "finish_ns": "q",
    "prompt_tokens": "i",
    "output_tokens": "i",
    "prompt_blocks": "i",
    "expected_hit_tokens": "i",
    "hit_tokens": "i",
    "worker": "i",
    "attempts": "h",
    "verdict": "b",
    "held_ns": "q",
    "session": "i",
}
_ZERO = ("prompt_tokens", "output_tokens", "prompt_blocks", "expected_hit_tokens", "attempts")


class Book:
    """Columns as in `RequestTable`, and by which code a request was turned away.

    Rows at and beyond `len(book)` are spare. Unset: 0 for counts, `NEVER` for times, worker, hits,
    verdict and session. Lifetime: replay.
    """

    def __init__(self) -> None:
        self.arrival_ns = array("q")
        self.dispatched_ns = array("q")
        self.first_token_ns = array("q")
        self.finish_ns = array("q")
        self.prompt_tokens = array("i")
        self.output_tokens = array("i")
        self.prompt_blocks = array("i")
        self.expected_hit_tokens = array("i")
        self.hit_tokens = array("i")
        self.worker = array("i")
        self.attempts = array("h")
        self.verdict = array("b")
        self.held_ns = array("q")
        self.session = array("i")
        self.code = array("b")  # index into `codes`; NEVER: was not turned away
        self.codes: list[str] = []
        self._sessions: dict[str, int] = {}
        self._rows = 0
        self._spare = [
            (getattr(self, name), array(kind, [0 if name in _ZERO else NEVER]) * _GROW)
            for name, kind in {**_TYPES, "code": "b"}.items()
        ]

    def __len__(self) -> int:
        return self._rows

    def add(
        self, now_ns: int, prompt_tokens: int, prompt_blocks: int, session: str | None = None
    ) -> int:
        """A request arrived: its row."""
        row = self._rows
        if row == len(self.verdict):
            for column, rows in self._spare:
                column.extend(rows)
        self._rows = row + 1
        self.arrival_ns[row] = now_ns
        self.prompt_tokens[row] = prompt_tokens
        self.prompt_blocks[row] = prompt_blocks
        if session is not None:
            self.session[row] = self._sessions.setdefault(session, len(self._sessions))
        return row

    def turned_away(self, row: int, code: str) -> None:
        """Note the code of the answer."""
        if code not in self.codes:
            self.codes.append(code)
        self.code[row] = self.codes.index(code)

    def code_of(self, row: int) -> str:
        """Why it was turned away; empty when it was not."""
        code = self.code[row]
        return "" if code == NEVER else self.codes[code]

    def rejections(self) -> dict[str, int]:
        """Requests turned away, by code, sorted."""
        counts = np.bincount(self._column("code") + 1, minlength=len(self.codes) + 1)[1:]
        return {code: int(counts[self.codes.index(code)]) for code in sorted(self.codes)}

    def table(self) -> RequestTable:
        """The rows so far, copied."""
        return RequestTable(**{name: self._column(name).copy() for name in _TYPES})

    def _column(self, name: str) -> npt.NDArray[Any]:
        column: array[int] = getattr(self, name)
        return np.frombuffer(column, dtype=column.typecode)[: self._rows]
