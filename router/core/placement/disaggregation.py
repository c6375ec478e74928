"""Prefill here, decode there: which pair of workers, and whether one alone would be faster.

A decision takes two calls of the policy, one over the workers that decode and one over those that
prefill, each with its own hits; the pair is made here, in seconds. One worker does all of a request
where that gives the first token no later, counting what its prefill costs those who decode beside
it (conditional disaggregation, as in Dynamo 1.6 and TensorRT-LLM, whose thresholds are in tokens).

The legs follow each other, and the worker that decodes keeps a place for the second one meanwhile.
Or, where the two workers find each other by themselves, both legs begin and are charged at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from policies.facts import Failure, Role
from router.core.contract.actions import Reject
from router.core.contract.settings import DisaggregationMode
from router.core.placement.admission import Admission
from router.core.placement.chooser import Choice, Chooser, Withheld
from router.core.placement.eligible import does
from router.core.placement.hold_queue import Pending
from router.core.workers.columns import Cells, WorkerColumns
from router.core.workers.ledger import Charge, Ledger
from router.core.workers.table import Worker, WorkerTable

_BESIDE = 1 << 61  # numbers of requests are below


def beside_of(pending: Pending) -> Pending:
    """Its prefill, begun at once with its decode, as a request with a number of its own."""
    arrival = replace(pending.arrival, request_id=pending.arrival.request_id + _BESIDE)
    leg: Role = "prefill"
    return Pending(arrival, pending.serial, pending.draw, standing=pending.standing, leg=leg)


def request_of(number: int) -> int:
    """The request that a charge's number stands for."""
    return number - _BESIDE if number >= _BESIDE else number


_PATIENCE_S = 2.0  # a transfer that fails sooner was not waited for


def was_waited_for(pending: Pending, fact: Failure, serves_alone: bool) -> bool:
    """Whether the KV of a request of two legs did not pass within the time that its workers wait
    for that, minutes mostly: no other pair is waited for as long.

    `serves_alone`: the worker that decodes could do all of it. Where it could not, its own errors
    are left to another pair.
    """
    if pending.leg != "decode" or fact.blame != "worker" or fact.rest is not None:
        return False
    is_late = fact.now_s - pending.sent_s >= _PATIENCE_S
    if fact.leg == "pair":
        return is_late or fact.reason == "transfer_timeout"
    own = ("timeout_first_byte", "status_5xx") if serves_alone else ("timeout_first_byte",)
    return fact.leg == "answer" and is_late and fact.reason in own


class PairFaults:
    """Which of two workers is to blame where their transfers fail. Lifetime: process.

    One that fails with several others, or whose partner has served with another one since.
    """

    def __init__(self) -> None:
        self._failed_s: dict[tuple[int, int], float] = {}  # pairs since their last success
        self._served: dict[int, tuple[float, int]] = {}  # workers: last success, with whom

    def served(self, prefill_id: int, decode_id: int, now_s: float) -> None:
        """KV came from the one to the other."""
        self._failed_s.pop((prefill_id, decode_id), None)
        self._served[prefill_id] = now_s, decode_id
        self._served[decode_id] = now_s, prefill_id

    def failed(self, prefill_id: int, decode_id: int, now_s: float) -> list[int]:
        """It did not: who is to blame; nobody, as long as either could be."""
        since_s = self._failed_s.setdefault((prefill_id, decode_id), now_s)
        both = prefill_id, decode_id
        return [one for one, other in (both, both[::-1]) if self._to_blame(one, other, since_s)]

    def gone(self, worker_id: int) -> None:
        """It is removed."""
        self._served.pop(worker_id, None)
        for pair in [pair for pair in self._failed_s if worker_id in pair]:
            del self._failed_s[pair]

    def _to_blame(self, one: int, other: int, since_s: float) -> bool:
        if sum(one in pair for pair in self._failed_s) > 1:
            return True
        at_s, partner = self._served.get(other, (-math.inf, one))
        return partner != one and at_s >= since_s


T = TypeVar("T")
Ask = Callable[[Pending, float, str], Choice | Reject | T]

_LEGS_S = 0.005  # a second call to an engine
_TOKENS_PER_S = 200_000.0  # sent between workers, before any was: 50 GB/s of a 32B model's KV
_WEIGHT = 0.1  # of a new sample
_SAMPLE_TOKENS_MIN = 256  # fewer tell of the call, not of the link
_OUTLIER = 4.0
# What a second of those who decode beside a prefill counts, against one's own: so many times the
# share of an answer that the prefill delays it by, and no more than 1 (tests/bench/conditional.py).
_OTHERS = 4.0
_CHUNK_TOKENS = 2_048  # of a prefill beside decodes: each takes a step of theirs
# Where the time per token is known that clients accept: shares of what answers bear that prefills
# beside them may take, over time, and at once of one answer's. Answers shorter than the mean bear
# less.
_STEADY, _AT_ONCE = 0.8, 0.2


class Disaggregation:
    """Lifetime: process."""

    def __init__(
        self,
        chooser: Chooser,
        columns: WorkerColumns,
        workers: WorkerTable,
        ledger: Ledger,
        admission: Admission,
        mode: DisaggregationMode,
        tpot_s: float = 0.0,
    ) -> None:
        """`tpot_s`: the time per token that clients accept; 0: nobody said."""
        self._mode = mode
        self._tpot_s = tpot_s
        # Seconds of prefill that answers bear at a worker, and when, by its number.
        self._borne: dict[int, tuple[float, float]] = {}
        self._chooser = chooser
        self._columns = columns
        self._cells = Cells(columns)
        self._workers = workers
        self._ledger = ledger
        self._admission = admission
        self._decode: dict[int, Choice] = {}  # of requests that are being prefilled, by number
        self._beside: tuple[int, Choice] | None = None  # who prefills what was chosen last
        self.faults = PairFaults()
        self.tokens_per_s = _TOKENS_PER_S  # of KV that one worker gets from another, as learned

    def choose(self, pending: Pending, now_s: float, reason: str) -> Choice | Reject | None:
        """The worker for all of it, or for its prefill (`pending.leg`); as `Chooser.choose`."""
        self.forget(pending)
        choice, decode = self._plan(pending, self._chooser.choose, now_s, reason)
        if decode is not None:
            arrival = pending.arrival
            if decode.worker.facts.concurrent and isinstance(choice, Choice):
                self._beside, pending.leg = (arrival.request_id, choice), "decode"
                return decode
            self._decode[arrival.request_id] = decode
            self._ledger.keep_decode_place(
                arrival.request_id, decode.worker.slot, arrival.prompt_tokens
            )
        elif isinstance(choice, Choice) and self._tpot_s and pending.leg == "both":
            left_s = self._bears_s(choice.worker, now_s) - self._prefill_s(choice, pending)
            self._borne[choice.worker.worker_id] = max(left_s, 0.0), now_s
        return choice

    def explain(self, pending: Pending, now_s: float, reason: str) -> Choice | Withheld | Reject:
        """The same for somebody who only wants to know; as `Chooser.explain`."""
        leg = pending.leg
        choice, _ = self._plan(pending, self._chooser.explain, now_s, reason)
        pending.leg = leg
        return choice

    def _plan(
        self, pending: Pending, ask: Ask[T], now_s: float, reason: str
    ) -> tuple[Choice | Reject | T, Choice | None]:
        """What `choose` gives, and who will decode where that is another worker."""

        def asked(leg: Role) -> Choice | Reject | T:
            pending.leg = leg
            return ask(pending, now_s, reason)

        may = pending.arrival.splits and self._mode != "never" and not pending.unsplittable
        if not (may and self._workers.splits(pending.arrival.model)):
            return asked("both"), None
        if pending.arrival.max_output_tokens == 1:  # it is all prefill
            alone = asked("both")
            if not isinstance(alone, Reject):
                return alone, None
        decode = asked("decode")
        if isinstance(decode, Reject):
            alone = asked("both")
            return decode if isinstance(alone, Reject) else alone, None
        if not isinstance(decode, Choice):  # nobody has room for its answer: no prefill is begun
            return decode, None
        pending.group = decode.worker.facts.group
        prefill = asked("prefill")
        pending.group = None
        if not isinstance(prefill, Choice) or self._alone_is_better(
            pending, prefill, decode, now_s
        ):
            if decode.worker.facts.serves_alone:
                pending.leg = "both"
                return decode, None
            return prefill, None
        return prefill, decode

    def beside(self, pending: Pending) -> Choice | None:
        """Who prefills it while the worker that was chosen already waits for its KV; asked once."""
        known, self._beside = self._beside, None
        found = known is not None and known[0] == pending.arrival.request_id
        return known[1] if known is not None and found and pending.leg == "decode" else None

    def prefilled(self, pending: Pending, now_s: float) -> Choice | Reject | None:
        """Its prefill is over: the worker that decodes it, as chosen, or another of its group."""
        chosen = self._decode.pop(pending.arrival.request_id)
        self._ledger.free_decode_place(pending.arrival.request_id)
        worker = self._workers.get(chosen.worker.worker_id)
        stays = worker is not None and worker.facts.role in ("both", "decode")
        if worker is chosen.worker and worker.takes_requests and stays and not worker.busy:
            pending.leg = "decode"
            return chosen
        pending.group = chosen.worker.facts.group
        pending.leg = "decode"
        decode = self._chooser.choose(pending, now_s, "retry")
        pending.group = None
        return decode

    def arrived(self, charge: Charge, now_s: float) -> None:
        """The first token came from the worker that only decodes: so long the KV took."""
        if charge.room_tokens:  # it waited for the prefill as well
            return
        tokens, elapsed_s = charge.moved_tokens, now_s - charge.dispatched_s - _LEGS_S
        if tokens >= _SAMPLE_TOKENS_MIN and elapsed_s > 0:
            ratio = min(max(tokens / elapsed_s / self.tokens_per_s, 1 / _OUTLIER), _OUTLIER)
            self.tokens_per_s *= ratio**_WEIGHT

    def forget(self, pending: Pending) -> None:
        """It is not prefilled for another worker, or no longer."""
        if self._decode.pop(pending.arrival.request_id, None) is not None:
            self._ledger.free_decode_place(pending.arrival.request_id)

    def gone(self, worker: Worker) -> None:
        """Free the decode places at a worker that is removed: its slot may be another's soon."""
        for request_id in self._ledger.decode_places_at(worker.slot):
            self._ledger.free_decode_place(request_id)
        self.faults.gone(worker.worker_id)
        self._borne.pop(worker.worker_id, None)

    def replaceable(self, pending: Pending, worker: Worker, leg: Role) -> bool:
        """Whether another worker that has not failed the request could do this leg of it."""
        tried, group = pending.tried, worker.facts.group
        return any(
            one is not worker and one.takes_requests and one.worker_id not in tried
            for one in self._workers.serving(pending.arrival.model)
            if does(one, leg, group)
        )

    def _alone_is_better(
        self, pending: Pending, prefill: Choice, decode: Choice, now_s: float
    ) -> bool:
        """Whether the worker that would decode gives the first token as soon by itself, at a price
        that those who decode there can bear.
        """
        if prefill.worker is decode.worker:
            return True
        if self._mode == "always" or not decode.worker.facts.serves_alone:
            return False
        cells, slot = self._cells, decode.worker.slot
        prompt = pending.arrival.prompt_tokens
        foreign = int(self._columns.foreign_running[slot])
        decoding = max(cells.requests[slot] - cells.waiting[slot] + foreign, 0)
        own_s = self._prefill_s(decode, pending)
        chunks = math.ceil((prompt - decode.decision.hit_tokens) / _CHUNK_TOKENS)
        beside_s = chunks * cells.step_s[slot] if decoding else 0.0
        others = 0.0
        if not self._tpot_s:
            # A second's delay is more to a short answer than to a long one.
            answer_s = max(self._admission.output_tokens, 1.0) * cells.step_s[slot]
            others = min(_OTHERS * own_s / answer_s, 1.0) if answer_s > 0 else 1.0
        elif decoding and own_s > self._bears_s(decode.worker, now_s):
            return False
        alone_s = self._queue_s(slot) + beside_s + own_s * (1 + others * decoding)
        missing = prompt - decode.decision.hit_tokens
        moved_s = _LEGS_S + missing / self.tokens_per_s + cells.step_s[slot]
        split_s = self._queue_s(prefill.worker.slot) + self._prefill_s(prefill, pending) + moved_s
        return alone_s <= split_s

    def _bears_s(self, worker: Worker, now_s: float) -> float:
        """Seconds of prefill beside the answers of a worker that leave the time per token as it may
        be: what steps leave of it adds up while they last, and was used by earlier prefills.
        """
        left_s = max(self._tpot_s - self._cells.step_s[worker.slot], 0.0)  # of each token
        most_s = _AT_ONCE * max(self._admission.output_tokens, 1.0) * left_s
        borne_s, since_s = self._borne.get(worker.worker_id, (most_s, now_s))
        return min(borne_s + _STEADY * left_s / self._tpot_s * (now_s - since_s), most_s)

    def _queue_s(self, slot: int) -> float:
        cells = self._cells
        queued = cells.charged_work[slot] - cells.drained_work[slot]
        return queued / cells.prefill_tokens_per_s[slot]

    def _prefill_s(self, choice: Choice, pending: Pending) -> float:
        hit = choice.decision.hit_tokens
        work = self._columns.attention.work(max(pending.arrival.prompt_tokens - hit, 1), hit)
        return work / self._cells.prefill_tokens_per_s[choice.worker.slot]
