"""Sends a request in two legs: one worker prefills its prompt, and another worker decodes the
answer.

There are two ways. In the first, the prefill leg runs alone, and its answer says where the decode
leg finds the KV. In the second, both legs are sent together, and the two workers transfer the KV
between them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from router.body.legs import ROOM_BITS, Handover, Leg, Transfer, TransferAttempt
from router.core.placement.retries import OTHER_REVISION
from router.fleet.member import Member
from router.http.errors import ClientError, WorkerError
from router.http.reply import HeldReply, Outcome
from router.record.request_record import Attempt
from router.request.deadlines import in_time
from router.request.kept_kv import KeptKv, Releases
from router.request.leg_sender import LegSender, edited
from router.request.pair_check import group_of, is_one_revision
from router.request.refusals import outcome_of_prefill
from router.request.service import Service
from router.request.settling import settle_prefill
from router.request.state import AttemptEnd, FaultyLeg, RequestState
from router.upstream.client_reply import Reply
from router.upstream.collected_reply import CollectedReply

_PREFILL_BYTES = 4 << 20  # of its answer; parameters of a million tokens take half of that
# After these errors a worker may have answered all the same.
_MAY_HAVE_ANSWERED = frozenset(
    {"early_close", "timeout_send", "timeout_first_byte", "timeout_between", "garbage"}
)
_MAX_REVISION_CHANGES = 8  # changes of workers' versions during one request; a rollout makes two
_PREFILL_LATE_S = 0.2  # longest time by which a prefill may end after the whole answer, seconds
# Words in an error's text: KV did not pass, and either worker may be why (SGLang, vLLM).
_OF_PAIRS = re.compile(rb"bootstrap|handshake|transfer", re.IGNORECASE)
_OF_WAITS = re.compile(rb"time(?:d[ _-]?|[ _-]?)out", re.IGNORECASE)


class TwoLegs:
    """Sends the prefill leg and the decode leg of a request to two workers. Lifetime: process."""

    def __init__(
        self,
        service: Service,
        sender: LegSender,
        clock: Callable[[], float],
        draw: Callable[[int], int],
    ) -> None:
        """Prepare to send requests in two legs.

        `clock` returns the present time in seconds, on the clock of deadlines. `draw(n)` returns n
        random bits.
        """
        self._service = service
        self._sender = sender
        self._clock = clock
        self._draw = draw
        self._releases = Releases()

    async def prefill(
        self, state: RequestState, attempt: Attempt, member: Member, reply: Reply
    ) -> AttemptEnd:
        """Send the prefill leg alone, and keep the data in its answer that the decode leg needs."""
        terms, arrival = self._sender.terms, state.arrival
        transfer = terms.transfers[member.transfer]
        of = TransferAttempt(self._draw(ROOM_BITS), state.path.path, arrival.stream)
        leg = await edited(partial(transfer.prefill, of=of), state.body)
        kept = self._kept_kv(state)
        kept.sent(member, leg.unread, terms.timeouts)
        collected = CollectedReply(_PREFILL_BYTES)
        sending = self._prefilling(state, leg, attempt, member, collected, at_once=False)
        if arrival.deadline_s is not None:
            sending = in_time(sending, reply, arrival.deadline_s, self._clock)
        outcome, handover = _handover(await sending, transfer, collected, of)
        if outcome.error is None and outcome.answers and handover.reply is None:
            second_leg = partial(transfer.decode, data=handover.decode_data, of=of)
            kept.kept(second_leg, handover.release)
            return AttemptEnd(reply, outcome, handed_over=True)
        kept.failed(may_be_kept=_may_have_answered(outcome))
        refusal = handover.reply or collected.held or outcome.held
        if state.stream is not None and state.stream.begun:
            reply = state.stream.reply
        # The client has seen nothing of this answer.
        return AttemptEnd(reply, replace(outcome, bytes_to_client=0), refusal=refusal)

    async def answer(
        self, state: RequestState, leg: Leg, attempt: Attempt, member: Member, reply: Reply
    ) -> AttemptEnd:
        """Send the leg that answers, or the whole request, to one worker, and relay the answer.

        If the leg depends on another worker's version, the versions of both are checked first. Such
        a leg is not sent again if a kept connection turns out to be closed, because the worker may
        have been replaced; the core then chooses workers again.
        """
        first, group = self._other_worker(state, attempt, member)
        if first is None:
            return await self._sender.answer(state, leg, attempt, member, reply)
        if await is_one_revision(first, member, group):
            once = replace(leg, once=True)
            end = await self._sender.answer(state, once, attempt, member, reply)
            if end.outcome is None or not end.outcome.stale:
                return end
        return AttemptEnd(unsent=self.changed(state))

    def _other_worker(
        self, state: RequestState, attempt: Attempt, member: Member
    ) -> tuple[Member | None, str | None]:
        """Return the worker that prefilled the prompt of a decode leg, and the group that it had
        then; no worker if the leg depends on none.
        """
        if state.sidecar_prefill is not None:  # which the sidecar before `member` asks
            first = self._service.fleet.members.get(state.sidecar_prefill.worker_id)
            return first, group_of(member)
        kept = state.kept_kv
        if kept is None or kept.second_leg is None or attempt.leg != "decode":
            return None, None
        return kept.prefiller, kept.group

    def changed(self, state: RequestState) -> str:
        """Return the reason that is given to the core if a worker of a pair changed before the leg
        was sent.

        A request for which this happens too often fails, because the versions of its workers keep
        changing.
        """
        state.changed_pairs += 1
        return (
            OTHER_REVISION if state.changed_pairs <= _MAX_REVISION_CHANGES else "revision_unsettled"
        )

    async def second_leg(self, state: RequestState, attempt: Attempt, kept: KeptKv) -> Leg:
        """Return the leg to send to the answering worker, after a prefill leg has ended.

        This is the decode leg if a prefill worker holds the KV for it, else the whole request.
        """
        if kept.second_leg is None:
            return Leg(state.body)
        if attempt.leg == "decode":
            return await edited(kept.second_leg, state.body)
        kept.failed(may_be_kept=True)  # one worker does all of it now
        return Leg(state.body)

    async def both(
        self, state: RequestState, attempt: Attempt, member: Member, reply: Reply
    ) -> AttemptEnd:
        """Send the prefill leg and the decode leg together, and wait until both are over."""
        first, terms = state.prefill, self._sender.terms
        assert first is not None, "of two legs"
        transfer = terms.transfers[member.transfer]
        other = self._service.fleet.members.get(first.worker_id)
        address = None if other is None or other.recognized is None else other.recognized.bootstrap
        if other is None or address is None:
            return AttemptEnd(faulty_leg="prefill")  # the worker that was to prefill is gone
        if not await is_one_revision(other, member, group_of(member)):
            return AttemptEnd(unsent=self.changed(state))
        state.account.record_destination(first, other)
        what = (state.path.path, state.arrival.stream, address, member.rank)
        of = TransferAttempt(self._draw(ROOM_BITS), *what)
        prefill_leg = await edited(partial(transfer.prefill, of=of), state.body)
        decode_leg = await edited(partial(transfer.decode, data=None, of=of), state.body)
        prefill_leg, decode_leg = replace(prefill_leg, once=True), replace(decode_leg, once=True)
        collected = CollectedReply(_PREFILL_BYTES)
        pair = LegPair(self._service, state, transfer, collected, reply)
        pair.begin(
            self._prefilling(state, prefill_leg, first, other, collected, at_once=True),
            self._sender.answer(state, decode_leg, attempt, member, reply, pair.begun),
        )
        end = await pair.end()
        return AttemptEnd(unsent=self.changed(state)) if pair.is_stale else end

    async def _prefilling(
        self,
        state: RequestState,
        leg: Leg,
        attempt: Attempt,
        member: Member,
        collected: CollectedReply,
        *,
        at_once: bool,
    ) -> Outcome:
        """Send a prefill leg, and return its outcome.

        `at_once` True means that the decode leg was sent together with it. Then the time limit for
        the first byte is at least that of streams.
        """
        terms = self._sender.terms
        timeouts = terms.deadlines.timeouts(terms.timeouts, False, attempt.uncached_tokens)
        if at_once:
            first_byte_s = max(timeouts.first_byte_s, terms.timeouts.first_byte_s)
            timeouts = replace(timeouts, first_byte_s=first_byte_s)
        sent = self._sender.request(state, leg, attempt, member)
        outcome = await state.carrier.upstream(member, attempt).send(sent, collected, timeouts)
        return outcome_of_prefill(outcome, collected, state.arrival.model)

    def _kept_kv(self, state: RequestState) -> KeptKv:
        if state.kept_kv is None:
            state.kept_kv = state.enter(KeptKv(self._releases))
        return state.kept_kv


def _handover(
    outcome: Outcome, transfer: Transfer, collected: CollectedReply, of: TransferAttempt
) -> tuple[Outcome, Handover]:
    """Read the answer to a prefill leg, and return what it says for the decode leg.

    Return also the outcome, which has an error if the answer is not usable.
    """
    if outcome.error is None and not collected.whole:
        error = WorkerError("garbage", "the answer to a first leg is too large")
        outcome = replace(outcome, error=error)
    if outcome.error is None and outcome.answers:
        try:
            return outcome, transfer.read(collected.body, of)
        except WorkerError as error:
            outcome = replace(outcome, error=error)
    return outcome, Handover()


def _may_have_answered(outcome: Outcome) -> bool:
    """Return True if a worker may have finished a prefill whose answer did not arrive completely,
    so that it may still hold the KV.
    """
    error = outcome.error
    if isinstance(error, ClientError):
        return True
    return error is not None and error.kind in _MAY_HAVE_ANSWERED


class LegPair:
    """A prefill leg and a decode leg that were sent together. Lifetime: one attempt.

    If one leg fails, the other one is cancelled, because it would otherwise wait for minutes. Once
    the answer has begun, a prefill leg that fails does not stop the answer, and is only reported.
    """

    def __init__(
        self,
        service: Service,
        state: RequestState,
        transfer: Transfer,
        collected: CollectedReply,
        reply: Reply,
    ) -> None:
        self._service = service
        self._state = state
        self._transfer = transfer
        self._collected = collected
        self._reply = reply
        self._has_begun = False
        # A kept connection had been closed before one of the legs was sent by it.
        self.is_stale = False
        self._prefill: asyncio.Task[Outcome]
        self._answer: asyncio.Task[AttemptEnd]

    def begin(
        self, prefill: Coroutine[Any, Any, Outcome], answer: Coroutine[Any, Any, AttemptEnd]
    ) -> None:
        """Start to send both legs, each in a task of its own."""
        self._prefill = asyncio.create_task(prefill)
        self._answer = asyncio.create_task(answer)

    def begun(self, now_s: float) -> None:
        """Note that the first byte of the answer arrived, at `now_s` seconds. If the answer is a
        stream, tell the decision core.
        """
        self._has_begun = True
        if self._state.arrival.stream:
            self._state.ticket.first_token(now_s)

    async def end(self) -> AttemptEnd:
        """Wait until both legs have ended, and return the result of the attempt.

        Raises CancelledError if the client has left and the request would need another attempt.
        """
        try:
            end = await self._first_end()
        except asyncio.CancelledError:  # its client left; or was left, for the answer is over
            answered = await _stopped(self._answer)
            if answered is None or _outcome(answered).retryable:
                raise
            end = self._of_answer(answered)
        finally:
            has_left = await _both_stopped(self._prefill, self._answer)
        if has_left and (self.is_stale or _outcome(end).retryable):
            raise asyncio.CancelledError
        return end

    async def _first_end(self) -> AttemptEnd:
        await asyncio.wait((self._prefill, self._answer), return_when=asyncio.FIRST_COMPLETED)
        if self._found_stale():
            self.is_stale = True
            return AttemptEnd()
        if self._prefill.done() and not self._answer.done():
            return await self._of_prefill(self._prefill.result())
        if _outcome(self._answer.result()).error is None:
            await asyncio.wait((self._prefill,), timeout=_PREFILL_LATE_S)
        return self._of_answer(self._answer.result())

    def _found_stale(self) -> bool:
        """Return True if a leg ended because it was not sent, and the client has received
        nothing.
        """
        if self._has_begun or self._reply.begun:
            return False
        if self._prefill.done() and self._prefill.result().stale:
            return True
        answered = self._answer.result().outcome if self._answer.done() else None
        return answered is not None and answered.stale

    async def _of_prefill(self, outcome: Outcome) -> AttemptEnd:
        """Return the result of the attempt if the prefill leg, with this `outcome`, ends before the
        decode leg.
        """
        if self._has_begun or (outcome.error is None and outcome.answers):
            settle_prefill(self._service, self._state, outcome)
            return self._of_answer(await self._answer)
        if (answered := await _stopped(self._answer)) is not None:
            return self._of_answer(answered)
        if self._reply.begun:  # its first bytes were written meanwhile
            self._reply.abort()
            error = WorkerError("early_close", "its prefill failed")
            return self._end(replace(outcome, error=error, bytes_to_client=1), "pair")
        if outcome.error is None and (refusal := self._collected.held) is not None:
            refusal.deliver(self._reply)
        pair = _of_pair(outcome, outcome.held or self._collected.held)
        faulty: FaultyLeg = "prefill" if pair is None else "pair"
        return self._end(replace(pair or outcome, bytes_to_client=0), faulty)

    def _of_answer(self, end: AttemptEnd) -> AttemptEnd:
        """Return the result of the attempt after the decode leg has ended; `end` is the result of
        the decode leg alone.
        """
        outcome, first = _outcome(end), self._state.prefill
        error = outcome.error
        failed = isinstance(error, WorkerError) and not outcome.bytes_to_client
        is_settled = first is not None and first.outcome is not None
        if self._prefill.done() and not is_settled:
            prefill = self._prefill.result()
            if failed and prefill.error is not None:  # both, in an order that is not known
                return end._replace(
                    outcome=_of_pair(outcome, outcome.held) or outcome, faulty_leg="pair"
                )
            settle_prefill(self._service, self._state, prefill)
        if not isinstance(error, WorkerError) or not failed:
            return end
        if error.kind == "timeout_first_byte" and not self._prefill.done():
            late: FaultyLeg = "pair" if self._transfer.answers_late else "prefill"
            return end._replace(faulty_leg=late)
        pair = _of_pair(outcome, outcome.held)
        return end if pair is None else end._replace(outcome=pair, faulty_leg="pair")

    def _end(self, outcome: Outcome, faulty_leg: FaultyLeg) -> AttemptEnd:
        stream = self._state.stream
        return AttemptEnd(self._reply if stream is None else stream.reply, outcome, faulty_leg)


def _outcome(end: AttemptEnd) -> Outcome:
    assert end.outcome is not None, "both legs were sent"
    return end.outcome


def _of_pair(outcome: Outcome, held: HeldReply | None) -> Outcome | None:
    """Return the outcome if the worker's error text reports a failed KV transfer, otherwise None.

    A transfer that timed out gets the error `transfer_timeout`.
    """
    error = outcome.error
    if not isinstance(error, WorkerError) or held is None or not _OF_PAIRS.search(held.body):
        return None
    if not _OF_WAITS.search(held.body):
        return outcome
    return replace(outcome, error=WorkerError("transfer_timeout", error.message))


async def _stopped(answer: asyncio.Task[AttemptEnd]) -> AttemptEnd | None:
    """Cancel the decode leg. Return its result if it had already ended, otherwise None."""
    answer.cancel()
    await asyncio.wait((answer,))
    return None if answer.cancelled() else answer.result()


async def _both_stopped(*legs: asyncio.Task[Any]) -> bool:
    """Cancel both legs, and wait until they have ended.

    Return True if the calling task itself was cancelled meanwhile.
    """
    cancelled = False
    for leg in legs:
        leg.cancel()
    while not all(leg.done() for leg in legs):
        try:
            await asyncio.wait(legs)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
