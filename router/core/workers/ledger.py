"""The load that this router itself put on each worker: one charge for each dispatched request.

Choosing a worker and charging it are one step of the core, so two requests can never both see
the same idle worker. A charge is released once, by `RouterCore._release`, or by
`PeerRequests.ended` where another router has the request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from policies.facts import Arrival, Finish
from router.core.workers.columns import Cells, WorkerColumns


class Loads(NamedTuple):
    """Prompt tokens whose KV a worker has below its GPU."""

    host: int
    disk: int

    @property
    def tokens(self) -> int:
        """Of both tiers."""
        return self.host + self.disk


NO_LOADS = Loads(0, 0)


@dataclass(slots=True)
class PrefillPeriod:
    """Prefills of one worker with no pause between them. Lifetime: until nobody waits there."""

    began_s: float
    dispatched: int = 0
    first_tokens: int = 0  # of these, their uncached tokens, and their work
    uncached_tokens: int = 0
    work_tokens: float = 0.0
    told: bool = True  # the first token of each of them shows
    loaded_tokens: int = 0  # of those with a first token, what came from lower tiers


@dataclass(slots=True)
class Charge:
    """What one request costs its worker. Lifetime: one dispatch."""

    request_id: int
    worker_id: int
    slot: int
    prompt_tokens: int
    uncached_tokens: int
    work_tokens: float  # the same with what their attention costs, in tokens of linear work
    end_work: float  # the worker's `charged_work` after this charge: its place in the queue
    dispatched_s: float
    alone: bool  # nothing else was queued there
    period: PrefillPeriod
    moved_tokens: int = 0  # whose KV comes from another worker
    loads: Loads = NO_LOADS  # whose KV comes from lower tiers of its own
    room_tokens: int = 0  # kept for its KV while it waits
    waiting: bool = True
    output_tokens: int = 0  # that were seen to come
    progress_s: float = 0.0  # when `output_tokens` was last brought up to date


@dataclass(slots=True)
class DecodePlace:
    """A place kept for a request at the worker that will decode it, while another one prefills it.

    Lifetime: until the prefill ends.
    """

    slot: int
    prompt_tokens: int


class Ledger:
    """All open charges and their sums in the worker columns. Lifetime: process."""

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._cells = Cells(columns)
        self._drained_s: float | None = None  # when the queues were last brought up to date
        self._charges: dict[int, Charge] = {}
        self._decode_places: dict[int, DecodePlace] = {}
        self._periods: list[PrefillPeriod | None] = [None] * len(columns.worker_id)  # the latest
        # Uncached tokens of those before their first token, and their work, by worker slot.
        self._waiting = [(0, 0.0)] * len(columns.worker_id)
        # Answers that do not stream show no first token; they leave `waiting` when the model
        # says that their prefill is over. Oldest first, per worker slot.
        self._silent: dict[int, deque[Charge]] = {}
        # Answers that do show it, until they have. Oldest first, per worker slot.
        self._coming: dict[int, deque[Charge]] = {}

    def __len__(self) -> int:
        return len(self._charges)

    def get(self, request_id: int) -> Charge | None:
        """The open charge of a request."""
        return self._charges.get(request_id)

    def on_worker(self, worker_id: int) -> list[Charge]:
        """Open charges of a worker, oldest first."""
        return [c for c in self._charges.values() if c.worker_id == worker_id]

    def keep_decode_place(self, request_id: int, slot: int, prompt_tokens: int) -> None:
        """Keep a place for a request at the worker in `slot`. It must have none yet."""
        assert request_id not in self._decode_places, (
            f"request {request_id} has a decode place already"
        )
        self._decode_places[request_id] = DecodePlace(slot, prompt_tokens)
        self._cells.requests[slot] += 1
        self._cells.context_tokens[slot] += prompt_tokens
        self._cells.decode_place_tokens[slot] += prompt_tokens

    def free_decode_place(self, request_id: int) -> None:
        """Give the decode place of a request back; nothing happens where it has none."""
        place = self._decode_places.pop(request_id, None)
        if place is not None:
            self._cells.requests[place.slot] -= 1
            self._cells.context_tokens[place.slot] -= place.prompt_tokens
            if self._cells.requests[place.slot] == 0:
                self._idle(place.slot)
            self._cells.decode_place_tokens[place.slot] -= place.prompt_tokens

    def decode_places_at(self, slot: int) -> list[int]:
        """The requests with a decode place at the worker in `slot`."""
        return [number for number, one in self._decode_places.items() if one.slot == slot]

    def reserve(
        self,
        request_id: int,
        slot: int,
        prompt_tokens: int,
        uncached_tokens: int,
        stream: bool,
        now_s: float,
        *,
        moved_tokens: int = 0,
        loads: Loads = NO_LOADS,
        room_tokens: int = 0,
        tells: bool = True,
    ) -> Charge:
        """Charge a request to the worker in `slot`. The request must have no open charge.

        `moved_tokens`: it waits for the KV of so many from elsewhere; `loads`: from lower tiers.
        `room_tokens`: for so many its worker keeps room from now on. `tells`: its end is known.
        """
        assert request_id not in self._charges, f"request {request_id} is charged twice"
        cells = self._cells
        cached_tokens = prompt_tokens - uncached_tokens
        work_tokens = self._columns.attention.work(uncached_tokens, cached_tokens)
        if self._drained_s is None:
            self._drained_s = now_s
        waiting = cells.waiting[slot]
        period = self._period(slot, now_s)
        period.told &= stream and tells and not moved_tokens  # else it tells of no one's speed
        end_work = cells.charged_work[slot] + work_tokens
        cells.charged_work[slot] = end_work
        cells.requests[slot] += 1
        cells.waiting[slot] = waiting + 1
        cells.context_tokens[slot] += room_tokens
        cells.decode_place_tokens[slot] += room_tokens
        self._queue(slot, uncached_tokens, work_tokens)
        charge = Charge(
            request_id=request_id,
            worker_id=cells.worker_id[slot],
            slot=slot,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            work_tokens=work_tokens,
            end_work=end_work,
            dispatched_s=now_s,
            alone=waiting == 0,
            period=period,
            moved_tokens=moved_tokens,
            loads=loads,
            room_tokens=room_tokens,
        )
        self._charges[request_id] = charge
        if stream:
            coming = self._coming.setdefault(slot, deque())
            if not coming:
                cells.drain_limit_work[slot] = end_work
            coming.append(charge)
        else:
            self._silent.setdefault(slot, deque()).append(charge)
        return charge

    def _period(self, slot: int, now_s: float) -> PrefillPeriod:
        """Of a worker that is about to be sent one more."""
        period = self._periods[slot]
        if period is None or not self._cells.waiting[slot]:
            period = self._periods[slot] = PrefillPeriod(now_s)
        period.dispatched += 1
        return period

    def first_token(self, request_id: int, now_s: float) -> Charge | None:
        """Its prefill is over, and so is all that was queued before it. None if not waiting."""
        charge = self._charges.get(request_id)
        if charge is None or not charge.waiting:
            return None
        drained = self._cells.drained_work
        drained[charge.slot] = max(drained[charge.slot], charge.end_work)
        period = charge.period
        period.first_tokens += 1
        period.uncached_tokens += charge.uncached_tokens
        period.work_tokens += charge.work_tokens
        period.loaded_tokens += charge.loads.tokens
        self._start_decode(charge, now_s)
        charge.output_tokens = 1
        self._cells.context_tokens[charge.slot] += 1
        self._lift_limit(charge.slot)
        return charge

    def progress(self, request_id: int, output_tokens: int, now_s: float) -> float | None:
        """Seconds per token since the last report of a running answer; None if unknown."""
        charge = self._charges.get(request_id)
        if charge is None or charge.waiting or output_tokens <= charge.output_tokens:
            return None
        tokens = output_tokens - charge.output_tokens
        elapsed_s = now_s - charge.progress_s
        self._cells.context_tokens[charge.slot] += tokens
        charge.output_tokens = output_tokens
        charge.progress_s = now_s
        return elapsed_s / tokens if elapsed_s > 0 else None

    def output_tokens(self, arrival: Arrival, finish: Finish) -> int:
        """Tokens of an answer that is over, whose charge is still open.

        Where nobody told, as where its body does not come by, they are those that its worker had
        time for since the model says that its prefill was over, at the step time of now.
        """
        if finish.output_tokens is not None:
            return finish.output_tokens
        charge = self._charges.get(arrival.request_id)
        if charge is None or charge.waiting or finish.refused:
            return 0
        decode_s = max(finish.now_s - charge.progress_s, 0.0)
        tokens = int(decode_s / self._cells.step_s[charge.slot])
        most = arrival.max_output_tokens
        return tokens if most is None else min(tokens, most)

    def left_s(self, request_id: int, output_tokens: float, now_s: float) -> float | None:
        """Seconds until its answer of so many tokens should be whole, by the model; None where it
        has no open charge.
        """
        charge = self._charges.get(request_id)
        if charge is None:
            return None
        self.advance(now_s)
        cells, slot = self._cells, charge.slot
        queued_s = since_s = 0.0
        if charge.waiting:
            work = max(charge.end_work - cells.drained_work[slot], 0.0)
            queued_s = work / cells.prefill_tokens_per_s[slot]
        else:
            since_s = max(now_s - charge.progress_s, 0.0)
        decode_s = (output_tokens - charge.output_tokens) * cells.step_s[slot] - since_s
        return queued_s + max(decode_s, 0.0)

    def unwatched(self, request_id: int) -> None:
        """Nobody will see its first token: the model says when its prefill is over."""
        charge = self._charges[request_id]
        coming = self._coming.get(charge.slot, deque())
        if not charge.waiting or all(one is not charge for one in coming):
            return
        charge.period.told = False
        left = deque(one for one in coming if one is not charge and one.waiting)
        self._coming[charge.slot] = left
        self._silent.setdefault(charge.slot, deque()).append(charge)
        self._cells.drain_limit_work[charge.slot] = left[0].end_work if left else inf

    def release(self, request_id: int) -> Charge | None:
        """Take the request off its worker; None when it has no open charge (any more)."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return None
        cells, slot = self._cells, charge.slot
        cells.requests[slot] -= 1
        if charge.waiting:
            self._wait_over(charge)
            self._drop_queued(charge)
            charge.waiting = charge.period.told = False
            self._lift_limit(slot)
        else:
            cells.context_tokens[slot] -= charge.prompt_tokens + charge.output_tokens
        if cells.requests[slot] == 0:
            self._idle(slot)
        return charge

    def _idle(self, slot: int) -> None:
        """An idle worker has an empty queue, whatever the model says.

        A decode place counts as a request.
        """
        cells = self._cells
        cells.drained_work[slot] = cells.charged_work[slot]
        cells.context_tokens[slot] = 0.0
        self._silent.pop(slot, None)
        self._coming.pop(slot, None)
        cells.drain_limit_work[slot] = inf

    def advance(self, now_s: float) -> None:
        """Drain the queues by the model and let silent answers pass to decode."""
        if self._drained_s is None:
            self._drained_s = now_s
        if now_s > self._drained_s:  # time never counts twice
            self._columns.drain(now_s - self._drained_s)
            self._drained_s = now_s
        drained_work = self._cells.drained_work
        for slot, queue in self._silent.items():
            while queue and (not queue[0].waiting or queue[0].end_work <= drained_work[slot]):
                charge = queue.popleft()
                if charge.waiting:
                    self._start_decode(charge, now_s)

    def _start_decode(self, charge: Charge, now_s: float) -> None:
        self._wait_over(charge)
        self._cells.context_tokens[charge.slot] += charge.prompt_tokens
        charge.waiting = False
        charge.progress_s = now_s

    def _wait_over(self, charge: Charge) -> None:
        cells, slot = self._cells, charge.slot
        cells.waiting[slot] -= 1
        cells.context_tokens[slot] -= charge.room_tokens
        cells.decode_place_tokens[slot] -= charge.room_tokens
        self._queue(charge.slot, -charge.uncached_tokens, -charge.work_tokens)

    def _queue(self, slot: int, tokens: int, work_tokens: float) -> None:
        """So many tokens, of so much work, begin to wait (below 0: stop waiting)."""
        waiting_tokens, waiting_work = self._waiting[slot]
        waiting_tokens += tokens
        if not waiting_tokens:
            self._waiting[slot], self._cells.token_work[slot] = (0, 0.0), 1.0
            return
        waiting_work += work_tokens
        self._waiting[slot] = waiting_tokens, waiting_work
        self._cells.token_work[slot] = waiting_work / waiting_tokens

    def _lift_limit(self, slot: int) -> None:
        """Let the queue drain up to the end of the oldest prompt that has no first token yet."""
        coming = self._coming.get(slot)
        if not coming:
            return
        while coming and not coming[0].waiting:
            coming.popleft()
        limit_work = coming[0].end_work if coming else inf
        self._cells.drain_limit_work[slot] = limit_work

    def _drop_queued(self, charge: Charge) -> None:
        """What was left of its prefill is nobody's work any more."""
        cells, slot = self._cells, charge.slot
        left = charge.end_work - cells.drained_work[slot]
        unfinished = min(max(left, 0.0), charge.work_tokens)
        cells.drained_work[slot] = min(
            cells.drained_work[slot] + unfinished, cells.charged_work[slot]
        )
