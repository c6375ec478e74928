"""What is known of one request so far, for its line in the request log."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Protocol

from policies.facts import Arrival
from router.core.actions import Dispatch, Reject
from router.http.errors import WorkerError
from router.http.relay.reply import Outcome, Usage

CLIENT_LEFT = 499
_NO_USAGE = Usage()


class EndsHere(Protocol):
    """The log of an entry."""

    def now_s(self) -> float:
        """The router's clock."""
        ...

    def end(self, entry: Entry) -> None:
        """The request is over."""
        ...


class Entry:
    """What is known of one request so far; the handler that relays it enters it.

    Lifetime: request, and then until it is written.
    """

    __slots__ = (
        "_log", "answer_s", "arrival", "attempts", "block_size", "dispatch", "end_s", "error",
        "first_byte_s", "output_events", "reason", "sent_s", "status", "usage",
    )  # fmt: skip

    def __init__(self, log: EndsHere, arrival: Arrival) -> None:
        self._log = log
        self.arrival = arrival
        self.dispatch: Dispatch | None = None
        self.sent_s: float | None = None
        self.attempts = 0
        self.block_size: int | None = None
        self.status: int | None = None
        self.error: str | None = None
        self.reason: str | None = None
        self.usage = _NO_USAGE
        self.output_events = 0
        self.first_byte_s: float | None = None
        self.end_s = math.nan

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self.status is None:
            ours = not issubclass(kind, (asyncio.CancelledError, OSError))
            self.status = 500 if ours else CLIENT_LEFT
            self.error = "internal_error" if ours else "client"
        elif kind is not None and self.error is None:
            self.error = "client"
        self._log.end(self)

    def dispatched(self, dispatch: Dispatch, block_size: int | None) -> None:
        """It goes to a worker whose blocks have `block_size` tokens."""
        self.dispatch = dispatch
        self.sent_s = self._log.now_s()
        self.attempts += 1
        self.block_size = block_size
        self.status = self.error = None

    def ended(self, outcome: Outcome) -> None:
        """A dispatch is over. Keeps figures only: an error holds on to half the handler."""
        error = outcome.error
        if error is not None:
            self.error = error.kind if isinstance(error, WorkerError) else "client"
        self.status = outcome.status
        self.usage = outcome.usage or _NO_USAGE
        self.output_events = outcome.events
        self.first_byte_s = outcome.first_byte_s if outcome.answers else None

    def rejected(self, reject: Reject, status: int) -> None:
        """The client was turned away with `status`."""
        self.reason = reject.code
        self.status = status
