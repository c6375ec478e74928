"""Observers, which watch a replay without changing it, and samples of the pool over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from policies.contract import Hashes
from router.core.contract.actions import Decision
from simulator.replay.agenda import Agenda, Rank
from simulator.replay.result import Book, Samples
from simulator.replay.station import Station
from simulator.traces.job import Job


class Observer(Protocol):
    """The interface of objects that watch a replay and are called as it proceeds.

    Rows are rows of the replay's book; stations are in the order of their ids. If the attribute
    `reads_details` is true, each dispatch comes with `Decision.details`.
    """

    def on_start(self, book: Book) -> None:
        """Called when the replay begins with this table. Read the columns of a row when its request
        ends.
        """

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        """Called when a request was sent to `workers[book.worker[row]]`.

        `chain` has the full blocks of its prompt, then those of its answer if they are known. The
        method is called again if the request is sent to another worker.
        """

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        """Called when a row was added to `Samples`. Earlier rows may be thinned out later."""

    def on_end(self, row: int) -> None:
        """Called when a request ended and its columns are final.

        `book.code_of(row)` is the error code if it was rejected.
        """


ROWS_MAX = 400
_FIRST_NS = 1_000_000_000
_COLUMNS = 6  # of one worker: busy_ns, running, waiting, used_blocks, query_tokens, hit_tokens


class Sampler:
    """Takes samples of the pool, one a second at first. Lifetime: replay.

    When the rows are full, every other row is dropped and the interval is doubled.
    """

    def __init__(
        self, agenda: Agenda, stations: Sequence[Station], observers: Sequence[Observer]
    ) -> None:
        self._agenda = agenda
        self._stations = stations
        self._observers = tuple(observers)
        self._interval_ns = _FIRST_NS
        self._rows: list[tuple[int, np.ndarray]] = []

    def start(self) -> None:
        """Plan the first sample."""
        self._agenda.at(self._interval_ns, Rank.SAMPLE, self._sample, None)

    def finish(self, now_ns: int) -> Samples:
        """Return all samples; the last one is taken at the end of the replay."""
        if not self._rows or self._rows[-1][0] < now_ns:
            self._take(now_ns)
        workers = len(self._stations)
        table = np.zeros((len(self._rows), workers, _COLUMNS), dtype=np.int64)
        for number, (_time_ns, row) in enumerate(self._rows):
            table[number, : len(row)] = row  # those that joined later are all zero before
        time_ns = np.array([row[0] for row in self._rows], dtype=np.int64)
        spans_ns = np.diff(time_ns, prepend=0)
        busy_ns = np.diff(table[:, :, 0], axis=0, prepend=0)
        return Samples(
            time_ns=time_ns,
            busy_share=busy_ns / np.maximum(spans_ns, 1)[:, None],
            running=table[:, :, 1].astype(np.int32),
            waiting=table[:, :, 2].astype(np.int32),
            used_blocks=table[:, :, 3].astype(np.int32),
            query_tokens=table[:, :, 4].copy(),
            hit_tokens=table[:, :, 5].copy(),
        )

    def _sample(self, now_ns: int, _: None) -> None:
        self._take(now_ns)
        if len(self._rows) >= ROWS_MAX - 1:  # one is left for the end
            self._rows = self._rows[1::2]  # those at whole multiples of the new interval
            self._interval_ns *= 2
        next_ns = (now_ns // self._interval_ns + 1) * self._interval_ns
        self._agenda.at(next_ns, Rank.SAMPLE, self._sample, None)

    def _take(self, now_ns: int) -> None:
        row = np.zeros((len(self._stations), _COLUMNS), dtype=np.int64)
        for number, station in enumerate(self._stations):
            stats = station.engine.stats(station.local_ns(now_ns))
            row[number] = (
                stats.busy_ns,
                stats.running,
                stats.waiting,
                stats.used_blocks,
                stats.query_tokens,
                stats.hit_tokens,
            )
        self._rows.append((now_ns, row))
        for observer in self._observers:
            observer.on_sample(now_ns, self._stations)
