"""One request of a satellite's client, as the satellite has it before the leader."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from policies.facts import Arrival
from router.core.actions import Reject
from router.http.desk import Errand
from router.http.errors import ClientError
from router.http.relay.reply import Outcome
from router.processes.messages import Arrived, Begun, Grown, Left, Missed, OfSatellite, Refused
from router.processes.told import ended

if TYPE_CHECKING:
    from router.processes.remote_desk import RemoteDesk


class RemoteCase:
    """One request whose case the leader has. Lifetime: request."""

    __slots__ = ("_arrived", "_desk", "_errands", "_open", "request_id", "waits", "why")

    def __init__(self, desk: RemoteDesk, arrived: Arrived) -> None:
        self.request_id = arrived.request_id
        self._desk = desk
        self._arrived = arrived
        self._errands: asyncio.Queue[Errand | Reject | ClientError] = asyncio.Queue()
        self._open = False  # the leader has not been told its end
        self.waits = False  # for the leader's answer
        self.why: str | None = None  # of a refusal: the explanation, where it was asked for

    def __enter__(self) -> RemoteCase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell its end, if nobody did."""
        self._desk.cases.pop(self.request_id, None)
        if self._open:
            gone = kind is None or issubclass(kind, (asyncio.CancelledError, OSError))
            self._end(Left(self.request_id, not gone))

    def arrive(self) -> None:
        """Ask the leader."""
        if (why := self._desk.unanswerable()) is not None:
            self.put(self._desk.no_answer(self.request_id, why))
            return
        self._open = self.waits = True
        self._desk.cases[self.request_id] = self
        self._desk.line.say(self._arrived)

    async def next_errand(self) -> Errand | Reject:
        """See `Case`."""
        errand = await self._errands.get()
        if isinstance(errand, ClientError):
            self._open = False  # the leader has not opened it
            raise errand
        return errand

    def put(self, errand: Errand | Reject | ClientError) -> None:
        """The leader's answer."""
        self.waits = False
        self._errands.put_nowait(errand)

    def give_up(self, why: str) -> None:
        """The leader does not answer: refuse it where it waits."""
        if self.waits:
            self._end(Left(self.request_id, False))
            self.put(self._desk.no_answer(self.request_id, why))

    def orphan(self, why: str) -> None:
        """There is no leader any more: an answer that runs goes on, without being told of."""
        self._open = False
        self.give_up(why)

    def first_token(self, now_s: float) -> None:
        """The answer began."""
        self._desk.line.say(Begun(self.request_id))

    def progress(self, now_s: float, output_tokens: int) -> None:
        """The answer grew."""
        self._desk.line.say(Grown(self.request_id, output_tokens))

    def gone(self) -> None:
        """See `Case`."""
        self._ask_again(Missed(self.request_id))

    def ended(self, outcome: Outcome, own_tokens: int | None, rest: Arrival | None = None) -> bool:
        """See `Case`."""
        follows = outcome.retryable
        message = ended(self.request_id, outcome, own_tokens, rest)
        if follows:
            self._ask_again(message)
        else:
            self._end(message)
        return follows

    def why_refused(self, reject: Reject) -> str | None:
        """See `Case`."""
        return self.why

    def refused(self, reject: Reject, status: int) -> None:
        """See `Case`."""
        self._end(Refused(self.request_id, status))

    def _ask_again(self, message: OfSatellite) -> None:
        if self._open:
            self.waits = True
            self._desk.line.say(message)
        else:
            self.put(self._desk.no_answer(self.request_id, self._desk.unanswerable() or "late"))

    def _end(self, message: OfSatellite) -> None:
        if self._open:
            self._open = False
            self._desk.line.say(message)
