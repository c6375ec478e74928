"""Those who watch a replay, for reports of single requests; none of them changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.contract import Hashes
from router.core.actions import Decision
from simulator.replay.book import Book
from simulator.replay.station import Station
from simulator.traces.job import Job


class Observer(Protocol):
    """Told as things happen. Rows are of the book; stations are in the order of their ids.

    One whose attribute `reads_details` is true gets `Decision.details` with each dispatch.
    """

    def on_start(self, book: Book) -> None:
        """The table that is about to fill: read a row's columns when it ends."""

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        """A request goes to `workers[book.worker[row]]`. `chain`: full blocks of its prompt,
        then those of its answer where known. Called again when it is sent anew."""

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        """A row of `Samples` was taken. Rows taken before may be thinned out later."""

    def on_end(self, row: int) -> None:
        """The request ended; its columns are final, `book.code_of(row)` says why it was
        turned away."""
