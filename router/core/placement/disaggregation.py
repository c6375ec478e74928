"""Decides if a request is prefilled and decoded by a pair of workers, or by one worker alone. A
decision calls the policy twice: for the workers that decode and for the workers that prefill, each
with their own hits. Then it compares the time to the first token by the pair with that by the
decode worker alone. The decode worker gets the whole request if its first token comes no later than
that of the pair; the delay that the prefill causes to the worker's running answers is included.
This is conditional disaggregation, as in Dynamo 1.6 and TensorRT-LLM, whose thresholds are in
tokens. The decode leg usually follows the prefill leg, and KV memory at the decode worker is
reserved until then. With engines whose workers contact each other directly, both legs start and are
charged at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from policies.facts import Failure, Role
from router.core.contract.actions import Reject
from router.core.contract.settings import DisaggregationMode
from router.core.placement.admission import Admission
from router.core.placement.choice import Choice, Held, Placement, Withheld
from router.core.placement.chooser import Chooser
from router.core.placement.eligible import Group, does
from router.core.placement.pending import Pending
from router.core.placement.revisions import Revisions
from router.core.workers.columns import Cells, WorkerColumns
from router.core.workers.ledger import Charge, Ledger
from router.core.workers.table import Worker, WorkerTable

_PATIENCE_S = 2.0  # a transfer that failed sooner did not delay its request


def was_waited_for(pending: Pending, fact: Failure, serves_alone: bool) -> bool:
    """Return True if a request failed after a long wait for its KV, and must not be split again.
    Workers may wait minutes for KV, and the request must not wait that long for another pair.
    `serves_alone` is True if the decode worker could do the whole request. If it could not, an
    error of the worker itself (status 5xx) does not count as such a wait, because another pair may
    succeed.
    """
    if pending.leg != "decode" or fact.blame != "worker" or fact.rest is not None:
        return False
    is_late = fact.now_s - pending.sent_s >= _PATIENCE_S
    if fact.leg == "pair":
        return is_late or fact.reason == "transfer_timeout"
    own = ("timeout_first_byte", "status_5xx") if serves_alone else ("timeout_first_byte",)
    return fact.leg == "answer" and is_late and fact.reason in own


class PairFaults:
    """Finds the worker that is at fault when KV transfers between two workers fail.

    A worker is at fault if its transfers with several other workers fail, or if its partner has
    since succeeded with another worker. Lifetime: process.
    """

    def __init__(self) -> None:
        self._failed_s: dict[tuple[int, int], float] = {}  # by pair, since its last success
        # By worker: last success, and the other worker.
        self._served: dict[int, tuple[float, int]] = {}

    def served(self, prefill_id: int, decode_id: int, now_s: float) -> None:
        """Record a successful KV transfer between two workers."""
        self._failed_s.pop((prefill_id, decode_id), None)
        self._served[prefill_id] = now_s, decode_id
        self._served[decode_id] = now_s, prefill_id

    def failed(self, prefill_id: int, decode_id: int, now_s: float) -> list[int]:
        """Record a failed KV transfer between two workers, and return the ids of workers at fault.

        The list is empty while either of the two workers could be the cause.
        """
        since_s = self._failed_s.setdefault((prefill_id, decode_id), now_s)
        both = prefill_id, decode_id
        return [one for one, other in (both, both[::-1]) if self._is_faulty(one, other, since_s)]

    def forget_worker(self, worker_id: int) -> None:
        """Forget all transfers of a worker that was removed."""
        self._served.pop(worker_id, None)
        for pair in [pair for pair in self._failed_s if worker_id in pair]:
            del self._failed_s[pair]

    def _is_faulty(self, one: int, other: int, since_s: float) -> bool:
        if sum(one in pair for pair in self._failed_s) > 1:
            return True
        at_s, partner = self._served.get(other, (-math.inf, one))
        return partner != one and at_s >= since_s


T = TypeVar("T")
# `Chooser.choose` or `Chooser.explain`.
Ask = Callable[[Pending, Role, Group | None, float, str], Choice | Reject | T]

_LEGS_S = 0.005  # assumed cost of a second call to an engine
# Between workers, before any transfer was measured: 50 GB/s of a 32B model's KV.
_TOKENS_PER_S = 200_000.0
_WEIGHT = 0.1  # of a new sample
_SAMPLE_TOKENS_MIN = 256  # fewer tokens measure the call, not the link
_OUTLIER = 4.0
# The weight of a second's delay of requests that decode while another prompt is prefilled, relative
# to a second of that prompt: this many times the share of an answer by which the prefill delays it,
# and at most 1 (tests/bench/conditional.py).
_OTHERS = 4.0
_CHUNK_TOKENS = 2_048  # of a prefill beside decodes, which takes one of their steps for each chunk
# If the time per token that clients accept is known: shares of the tolerated delay of answers that
# prefills at their worker may use, over time, and at once of one answer. Answers shorter than the
# mean tolerate less.
_STEADY, _AT_ONCE = 0.8, 0.2


class Disaggregation:
    """Places each request at one worker, or its prefill at one worker and its decode at another.

    Lifetime: process.
    """

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
        """Store the parts of the core that a placement needs.

        The speed of KV transfers starts with an assumed value. `tpot_s` is the time per output
        token that clients accept, in seconds; 0 means unknown.
        """
        self._mode = mode
        self._tpot_s = tpot_s
        # By worker id: the seconds of prefill that its running answers tolerate, and since when.
        self._used_delay: dict[int, tuple[float, float]] = {}
        self._chooser = chooser
        self._columns = columns
        self._cells = Cells(columns)
        self._workers = workers
        self._ledger = ledger
        self._admission = admission
        self._revisions = Revisions(workers)
        self.faults = PairFaults()
        self.tokens_per_s = _TOKENS_PER_S  # of KV that one worker gets from another, as learned

    def place(self, pending: Pending, now_s: float, reason: str) -> Placement | Reject | Held:
        """Choose one worker or two workers for a request.

        Return `Reject` if the request must be refused, or `Held` if it must wait. Raises
        FallbackError if both the policy and the fallback policy fail.
        """
        placement = self._place(pending, self._chooser.choose, now_s, reason)
        if self._tpot_s and isinstance(placement, Placement) and placement.prefill is None:
            choice = placement.decode
            left_s = self._tolerated_delay_s(choice.worker, now_s) - self._prefill_s(
                choice, pending
            )
            self._used_delay[choice.worker.worker_id] = max(left_s, 0.0), now_s
        return placement

    def explain(self, pending: Pending, now_s: float, reason: str) -> Choice | Withheld | Reject:
        """Return the choice of the worker that would compute a request's prompt, as a dry run.

        Raises FallbackError if both the policy and the fallback policy fail.
        """
        placement = self._place(pending, self._chooser.explain, now_s, reason)
        return (
            placement.prefill or placement.decode if isinstance(placement, Placement) else placement
        )

    def place_decode(self, pending: Pending, now_s: float) -> Choice | Reject | Held:
        """Choose the decode worker of a request whose prefill is over. This is the worker whose KV
        memory was reserved, if it still takes requests and still has the same group. Otherwise it
        is another worker of that group. Raises FallbackError if both the policy and the fallback
        policy fail.
        """
        chosen, group = pending.decode, pending.decode_group
        assert chosen is not None, "it has a decode place"
        self.free_decode_place(pending)
        worker = self._workers.get(chosen.worker.worker_id)
        stays = worker is not None and does(worker, "decode", group)
        if worker is chosen.worker and worker.takes_requests and stays and not worker.busy:
            return chosen
        return self._chooser.choose(pending, "decode", group, now_s, "retry")

    def keep_decode_place(self, pending: Pending, decode: Choice) -> None:
        """Reserve KV capacity at the decode worker while another worker prefills the request."""
        arrival = pending.arrival
        self._ledger.keep_decode_place(
            arrival.request_id, decode.worker.slot, arrival.prompt_tokens
        )
        pending.decode, pending.decode_group = decode, decode.worker.facts.group

    def free_decode_place(self, pending: Pending) -> None:
        """Release the KV capacity reserved at a request's decode worker, if any is reserved."""
        if pending.decode is not None:
            self._ledger.free_decode_place(pending.arrival.request_id)
            pending.decode = None

    def _place(
        self, pending: Pending, ask: Ask[T], now_s: float, reason: str
    ) -> Placement | Reject | T:
        arrival = pending.arrival
        if (
            not arrival.splits
            or self._mode == "never"
            or pending.unsplittable
            or not self._workers.splits(arrival.model)
        ):
            return _alone(ask(pending, "both", None, now_s, reason))
        if arrival.max_output_tokens == 1:  # the request is all prefill
            alone = ask(pending, "both", None, now_s, reason)
            if not isinstance(alone, Reject):
                return _alone(alone)
        pair = self._pair_of_one_revision(pending, ask, now_s, reason)
        if isinstance(pair, Reject):
            alone = ask(pending, "both", None, now_s, reason)
            return pair if isinstance(alone, Reject) else _alone(alone)
        return pair

    def _pair_of_one_revision(
        self, pending: Pending, ask: Ask[T], now_s: float, reason: str
    ) -> Placement | Reject | T:
        """Choose both workers within one revision of the model: the revision that should serve the
        request, or else another one. If every revision refuses the request, workers that have
        failed lately may get it, too.
        """
        answer: Placement | Reject | T | None = None
        for groups in self._revisions.groups_for(pending):
            pair = self._pair(pending, ask, groups, now_s, reason)
            if isinstance(pair, Placement):
                return pair
            if answer is None or (isinstance(answer, Reject) and not isinstance(pair, Reject)):
                answer = pair
        # One of the groups may have room later.
        if answer is not None and not isinstance(answer, Reject):
            return answer
        return self._pair(pending, ask, None, now_s, reason)

    def _pair(
        self, pending: Pending, ask: Ask[T], groups: Group | None, now_s: float, reason: str
    ) -> Placement | Reject | T:
        """Choose the decode worker in one of `groups`, or in any group if it is None, and then the
        prefill worker.
        """
        decode = ask(pending, "decode", groups, now_s, reason)
        if not isinstance(decode, Choice):  # no worker has room to decode it, so no prefill begins
            return decode
        prefill = ask(pending, "prefill", decode.worker.facts.group, now_s, reason)
        if not isinstance(prefill, Choice):
            return Placement(decode) if decode.worker.facts.serves_alone else prefill
        if self._alone_is_better(pending, prefill, decode, now_s):
            return Placement(decode)
        return Placement(decode, prefill)

    def arrived(self, charge: Charge, now_s: float) -> None:
        """Update the estimated speed of KV transfers when a decode worker gives a first token."""
        if charge.room_tokens:  # the measured time includes the prefill
            return
        tokens, elapsed_s = charge.moved_tokens, now_s - charge.dispatched_s - _LEGS_S
        if tokens >= _SAMPLE_TOKENS_MIN and elapsed_s > 0:
            ratio = min(max(tokens / elapsed_s / self.tokens_per_s, 1 / _OUTLIER), _OUTLIER)
            self.tokens_per_s *= ratio**_WEIGHT

    def forget_worker(self, worker: Worker) -> None:
        """Release all capacity reserved at a removed worker, and forget its transfers.

        The worker's slot may be given to another worker afterwards.
        """
        for request_id in self._ledger.decode_places_at(worker.slot):
            self._ledger.free_decode_place(request_id)
        self.faults.forget_worker(worker.worker_id)
        self._used_delay.pop(worker.worker_id, None)

    def replaceable(self, pending: Pending, worker: Worker, leg: Role) -> bool:
        """Return True if another worker could do this leg of the request in place of `worker`.
        Workers that have already failed the request do not count.
        """
        tried, group = pending.tried, worker.facts.group
        return any(
            one is not worker and one.takes_requests and one.worker_id not in tried
            for one in self._workers.serving(pending.arrival.model)
            if does(one, leg, group)
        )

    def _alone_is_better(
        self, pending: Pending, prefill: Choice, decode: Choice, now_s: float
    ) -> bool:
        """Return True if the decode worker should do the prefill, too, because it alone gives the
        first token no later than the pair would. The prefill also delays the answers that run on
        the decode worker. If the accepted time per token is known, this delay must not exceed it;
        otherwise the delay is added to the time of the decode worker.
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
            # A second's delay matters more for a short answer than for a long one.
            answer_s = max(self._admission.output_tokens, 1.0) * cells.step_s[slot]
            others = min(_OTHERS * own_s / answer_s, 1.0) if answer_s > 0 else 1.0
        elif decoding and own_s > self._tolerated_delay_s(decode.worker, now_s):
            return False
        alone_s = self._queue_s(slot) + beside_s + own_s * (1 + others * decoding)
        missing = prompt - decode.decision.hit_tokens
        moved_s = _LEGS_S + missing / self.tokens_per_s + cells.step_s[slot]
        split_s = self._queue_s(prefill.worker.slot) + self._prefill_s(prefill, pending) + moved_s
        return alone_s <= split_s

    def _tolerated_delay_s(self, worker: Worker, now_s: float) -> float:
        """Return for how many seconds a prefill may delay the running answers of a worker now. A
        decode step that is shorter than the accepted time per token leaves time unused. The unused
        time adds up, to a limit, and earlier prefills have used some of it.
        """
        # Tolerated delay of each token.
        left_s = max(self._tpot_s - self._cells.step_s[worker.slot], 0.0)
        most_s = _AT_ONCE * max(self._admission.output_tokens, 1.0) * left_s
        borne_s, since_s = self._used_delay.get(worker.worker_id, (most_s, now_s))
        return min(borne_s + _STEADY * left_s / self._tpot_s * (now_s - since_s), most_s)

    def _queue_s(self, slot: int) -> float:
        cells = self._cells
        queued = cells.charged_work[slot] - cells.drained_work[slot]
        return queued / cells.prefill_tokens_per_s[slot]

    def _prefill_s(self, choice: Choice, pending: Pending) -> float:
        hit = choice.decision.hit_tokens
        work = self._columns.attention.work(max(pending.arrival.prompt_tokens - hit, 1), hit)
        return work / self._cells.prefill_tokens_per_s[choice.worker.slot]


def _alone(choice: Choice | T) -> Placement | T:
    """Return a `Choice` as the `Placement` of a whole request. Return any other value unchanged."""
    return Placement(choice) if isinstance(choice, Choice) else choice
