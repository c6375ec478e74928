"""One request of a workload, streams of requests, and errors that name the place in a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from policies.contract import Hashes

NO_IDS: Hashes = np.zeros(0, dtype=np.uint64)


class Job(msgspec.Struct, frozen=True, gc=False):
    """One request of a workload. Times are integer nanoseconds.

    `ids` names the prompt's blocks of the source's size, first block first; an id stands for the
    whole prefix up to and including its block, so equal ids mean an equal prefix. Sources list
    every block, the last one usually partial, or full blocks only. `answer_ids` continues after the
    full blocks of the prompt: these are the blocks that the answer completes, if a later turn shows
    them.

    A sub-agent's session starts after the last turn of its `parent` that arrived no later than it.
    A side request starts after that turn of the session named as its `group`. A closed loop keeps
    this order (`simulator.replay.arrivals`). Lifetime: workload.
    """

    at_ns: int  # recorded arrival, from the start of the workload
    prompt_tokens: int  # at least 1
    output_tokens: int  # at least 1: tokens the answer had
    ids: Hashes  # uint64
    answer_ids: Hashes = NO_IDS
    session: str | None = None  # conversation of one agent; its turns are in order
    group: str | None = None  # the sessions of one person: a main agent and its sub-agents
    parent: str | None = None  # session that started this one, as a sub-agent; None: none
    side: bool = False  # its client gives it the main agent's id, as it does for titles
    waits_for: tuple[str, ...] = ()  # sub-agents of its session that end before this turn comes
    final: bool = False  # the last request of its session
    think_ns: int | None = None  # the client's pause after the answer before; None: not recorded
    tenant: str | None = None
    priority: int = 0  # lower is served first
    cached_tokens: int | None = None  # cached prompt tokens as recorded; None: unknown


KEPT_MESSAGES = 10
MIN_LINES_JUDGED = 1_000  # with fewer lines, a few wrong ones mean little
MAX_WRONG_SHARE = 0.01
_CUT = (
    ": the file seems cut off in the middle of this line; copy the whole file, or use it without "
    "this line"
)


class TraceError(ValueError):
    """Raised for a source that cannot be used; it names the file, the line, the field and what is
    expected.
    """


class LineError(ValueError):
    """Raised for one line that cannot be read; it names the field and what is expected.

    The reader adds the file and the line.
    """


class ErrorLog:
    """The wrong lines of one reading: all are counted, and the messages of the first ten are kept.
    `total` is the count; as a sequence it holds the messages. Lifetime: stream.
    """

    def __init__(self, where: str, strict: bool = False) -> None:
        self.where = where
        self.strict = strict
        self.total = 0
        self.messages: list[str] = []
        self.unended_line = 0  # the last line of a file that does not end with a line break
        self._last_line = 0

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[str]:
        return iter(self.messages)

    def __getitem__(self, index: int) -> str:
        return self.messages[index]

    def add(self, line: int, what: object) -> None:
        """Count a wrong line of the source, once. Raises `TraceError` if `strict` is set, or if too
        many lines are wrong.
        """
        cut = _CUT if line == self.unended_line and "truncated" in str(what) else ""
        message = f"{self.where}, line {line}: {what}{cut}"
        if line == self._last_line:
            return
        self._last_line = line
        self.total += 1
        if self.strict:
            raise TraceError(message)
        if len(self.messages) < KEPT_MESSAGES:
            self.messages.append(message)
        self.judge(line)

    def judge(self, lines: int) -> None:
        """Raise `TraceError` if more than one in a hundred of the first `lines` were wrong."""
        if lines >= MIN_LINES_JUDGED and self.total > MAX_WRONG_SHARE * lines:
            raise TraceError(
                f"{self.where}: {self.total} of the first {lines} lines are wrong, "
                f"too many to go on; the first: {self.messages[0]}; is it another format? "
                "--format NAME says which, `warmroute-sim sources` lists them"
            )

    def judge_whole(self, lines: int) -> None:
        """Raise `TraceError` if too many of all `lines` of a source were wrong.

        A short source may have ten wrong lines, as many as a thousand lines may.
        """
        if self.total > MAX_WRONG_SHARE * max(lines, MIN_LINES_JUDGED):
            raise TraceError(
                f"{self.where}: {self.total} of its {lines} lines are wrong, too many for a "
                f"result; the first: {self.messages[0]}"
            )

    def nothing_read(self) -> TraceError:
        """Return the error of a source that had no good line."""
        if not self.messages:
            return TraceError(f"{self.where}: holds no requests")
        return TraceError(
            f"{self.where}: none of its lines is a request; the first: {self.messages[0]}"
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a workload whose load changes in stages. Lifetime: workload."""

    start_ns: int
    end_ns: int  # arrivals lie in [start_ns, end_ns)
    rate_per_s: float
    requests: int  # as planned, whatever part of the workload is taken
    warm_up: bool = False  # not to be reported


@dataclass(frozen=True, slots=True)
class JobStream:
    """One reading of a source, in order of arrival; past jobs are not held.

    Open the source again to read it again. Iterating raises `TraceError` for a file that is damaged
    or has too many wrong lines. Lifetime: stream.
    """

    name: str  # short, for tables
    block_tokens: int  # prompt tokens an id stands for
    jobs: Iterator[Job]
    total: int | None  # number of jobs, where it is known beforehand
    errors: ErrorLog  # wrong lines that were left out so far
    origin: str  # where the requests come from, one line for a report
    fraction_read: Callable[[], float]  # of the source, in [0, 1]: for progress bars
    stages: tuple[Stage, ...] = ()  # of a ladder of loads: which one an arrival belongs to
    notes: Callable[[], Iterable[str]] = tuple  # assumptions about the part read so far
