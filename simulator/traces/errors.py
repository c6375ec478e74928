"""What is wrong with a source, in words that say where it is and what was expected instead."""

from __future__ import annotations

from collections.abc import Iterator

KEPT_MESSAGES = 10
MIN_LINES_JUDGED = 1_000  # below so many lines a few wrong ones say nothing
MAX_WRONG_SHARE = 0.01


class TraceError(ValueError):
    """A source that cannot be used: says the file, the line, the field and what is expected."""


class LineError(ValueError):
    """One line that cannot be read: says the field and what is expected; the reader adds where."""


class ErrorLog:
    """The wrong lines of one reading: all counted, the first ones told. Lifetime: stream.

    `total` counts; as a sequence it holds the first ten messages.
    """

    def __init__(self, where: str, strict: bool = False) -> None:
        self.where = where
        self.strict = strict
        self.total = 0
        self.messages: list[str] = []

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[str]:
        return iter(self.messages)

    def __getitem__(self, index: int) -> str:
        return self.messages[index]

    def add(self, line: int, what: object) -> None:
        """Counts a wrong line. Raises `TraceError` when strict, or when too many are wrong."""
        message = f"{self.where}, line {line}: {what}"
        self.total += 1
        if self.strict:
            raise TraceError(message)
        if len(self.messages) < KEPT_MESSAGES:
            self.messages.append(message)
        self.judge(line)

    def judge(self, lines: int) -> None:
        """Raises `TraceError` when more than one in a hundred of the first `lines` were wrong."""
        if lines >= MIN_LINES_JUDGED and self.total > MAX_WRONG_SHARE * lines:
            raise TraceError(
                f"{self.where}: {self.total} of the first {lines} lines are wrong, "
                f"too many to go on; the first: {self.messages[0]}"
            )

    def nothing_read(self) -> TraceError:
        """The error of a source that had no good line."""
        if not self.messages:
            return TraceError(f"{self.where}: holds no requests")
        return TraceError(
            f"{self.where}: none of its lines is a request; the first: {self.messages[0]}"
        )
