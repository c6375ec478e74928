"""The request log: what became of each request, as a line for replays.

The event loop only fills in an `Entry` and puts it into a bounded queue; a thread makes lines of
entries and writes them. Where the disk is slow or full, lines are lost and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from policies.facts import Arrival
from router.record.background import Background
from router.record.line_sink import LineFile, LineSink
from router.record.log_file import LogFile
from router.record.request_entry import Entry
from router.record.request_line import Header
from router.record.salt import Salt, salt_beside

log = logging.getLogger(__name__)

_WAITING_ENTRIES = 16_384
_WAITING_BYTES = 64 << 20
_ENTRY_BYTES = 2_048  # what an entry keeps alive besides its chains, roughly
_CLOSE_S = 5.0  # a disk that hangs must not keep the router from ending


def request_log_file(path: Path, limit_bytes: int) -> tuple[LogFile, Salt]:
    """The file of a log that is one file, and its salt.

    Raises OSError that says which file cannot be written and why.
    """
    try:
        return LogFile(path, limit_bytes), salt_beside(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"request_log: cannot write {path}: {why}") from error


class RequestLog:
    """Lifetime: process."""

    def __init__(
        self,
        file: LineFile,
        salt: Salt,
        clock: Callable[[], float],
        now_s: Callable[[], float],
        header: Callable[[float], Header],
    ) -> None:
        """`clock` is the router's, `now_s` unix time, `header` makes one as of unix seconds."""
        self._clock = clock
        self._sink = LineSink(file, salt, header, now_s, unix_offset_s=now_s() - clock())
        self._background = Background("request log", self._sink, _WAITING_ENTRIES, _WAITING_BYTES)
        self._no_room = 0

    @property
    def lines(self) -> int:
        """Lines written so far."""
        return self._sink.lines

    @property
    def lost(self) -> int:
        """Lines lost so far, for want of room in the queue or on the disk."""
        return self._no_room + self._sink.lost

    def now_s(self) -> float:
        """The router's clock."""
        return self._clock()

    def entry(self, arrival: Arrival) -> Entry:
        """The entry of a request that begins."""
        return Entry(self, arrival)

    def end(self, entry: Entry) -> None:
        """The request is over."""
        entry.end_s = self._clock()
        size_bytes = _ENTRY_BYTES
        for chain in entry.arrival.chains.values():
            size_bytes += chain.nbytes
        if not self._background.put(entry, size_bytes):
            self._no_room += 1
            if self._no_room & (self._no_room - 1) == 0:
                log.error("request log: %d lines lost: the disk is too slow", self._no_room)

    def reopen(self) -> None:
        """The file was moved away: go on in a new one. Returns at once."""
        self._background.reopen()

    def close(self) -> None:
        """Write what waits. Takes up to five seconds, after which the rest is lost."""
        left = self._background.close(_CLOSE_S)
        if left:
            log.error("request log: %d lines were not written before the end", left)
