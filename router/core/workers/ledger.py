"""Counts the load of this router's unfinished requests at each worker.

Each dispatched leg of a request is recorded as one charge at its worker. The core chooses a worker
and charges it in one step, so two requests can never both see the same idle worker. Each charge is
released once: by the core when its request ends, or by `PeerRequests.ended` for a request of
another router.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from policies.facts import Arrival, Finish, Role
from router.core.workers.columns import Cells, WorkerColumns

# A request's number and its leg. Two legs that begin at once are two open charges of one request.
ChargeKey = tuple[int, Role]


class Loads(NamedTuple):
    """The numbers of prompt tokens whose KV a worker loads from host memory and from disk."""

    host: int
    disk: int

    @property
    def tokens(self) -> int:
        """The number of tokens loaded from host memory and disk together."""
        return self.host + self.disk


NO_LOADS = Loads(0, 0)


@dataclass(slots=True)
class PrefillPeriod:
    """A period in which a worker always has prompts to prefill, with the tokens prefilled in it.

    The worker's prefill speed is learned from whole periods.
    Lifetime: until no request waits for its first token at the worker.
    """

    began_s: float
    dispatched: int = 0
    first_tokens: int = 0  # of the dispatched ones, with their uncached tokens and their work
    uncached_tokens: int = 0
    work_tokens: float = 0.0
    shown: bool = True  # this router sees the first token of each of them
    loaded_tokens: int = 0  # of requests with a first token, the tokens loaded from lower tiers


@dataclass(slots=True, eq=False)
class Charge:
    """The load that one request, or one leg of a request, puts on its worker.

    Lifetime: one dispatch.
    """

    request_id: int
    worker_id: int
    slot: int
    prompt_tokens: int
    uncached_tokens: int
    work_tokens: float  # uncached tokens with the cost of their attention, in tokens of linear work
    end_work: float  # the worker's `charged_work` after this charge: its place in the queue
    dispatched_s: float
    alone: bool  # nothing else was queued there
    period: PrefillPeriod
    leg: Role = "both"
    moved_tokens: int = 0  # tokens of the prompt whose KV comes from another worker
    loads: Loads = NO_LOADS  # tokens of the prompt whose KV the worker loads from lower tiers
    room_tokens: int = 0  # kept for its KV while it waits
    waiting: bool = True
    output_tokens: int = 0  # seen so far
    progress_s: float = 0.0  # when `output_tokens` was last brought up to date


@dataclass(slots=True)
class DecodePlace:
    """KV memory reserved for a request at its decode worker while another worker prefills it.

    Lifetime: until the prefill ends.
    """

    slot: int
    prompt_tokens: int


class Ledger:
    """Records the load of this router's unfinished requests at each worker.

    Each dispatched leg of a request has one charge. The sums for each worker are in the worker
    columns.
    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._cells = Cells(columns)
        self._drained_s: float | None = None  # when the queues were last brought up to date
        self._charges: dict[ChargeKey, Charge] = {}
        self._decode_places: dict[int, DecodePlace] = {}
        self._periods: list[PrefillPeriod | None] = [None] * len(columns.worker_id)  # the latest
        # By worker slot: uncached tokens of requests before their first token, and their work.
        self._waiting = [(0, 0.0)] * len(columns.worker_id)
        # Answers that do not stream show no first token; they leave `waiting` when the model
        # says that their prefill is over. Oldest first, per worker slot.
        self._silent: dict[int, deque[Charge]] = {}
        # Answers that do show it, until they have. Oldest first, per worker slot.
        self._coming: dict[int, deque[Charge]] = {}

    def __len__(self) -> int:
        return len(self._charges)

    def get(self, request_id: int, leg: Role = "both") -> Charge | None:
        """Return the charge of a request's `leg`, or None if nothing is charged for it. The leg
        "both" means a request that one worker both prefills and decodes.
        """
        return self._charges.get((request_id, leg))

    def on_worker(self, worker_id: int) -> list[Charge]:
        """Return the charges of all unfinished requests at a worker, the oldest first."""
        return [c for c in self._charges.values() if c.worker_id == worker_id]

    def keep_decode_place(self, request_id: int, slot: int, prompt_tokens: int) -> None:
        """Reserve KV memory for a request's prompt at its decode worker, in `slot`.

        The reservation also counts as a request of that worker. The request must have no
        reservation yet.
        """
        assert request_id not in self._decode_places, (
            f"request {request_id} has a decode place already"
        )
        self._decode_places[request_id] = DecodePlace(slot, prompt_tokens)
        self._cells.requests[slot] += 1
        self._cells.context_tokens[slot] += prompt_tokens
        self._cells.decode_place_tokens[slot] += prompt_tokens

    def free_decode_place(self, request_id: int) -> None:
        """Release the KV memory reserved for a request at its decode worker, if there is any."""
        place = self._decode_places.pop(request_id, None)
        if place is not None:
            self._cells.requests[place.slot] -= 1
            self._cells.context_tokens[place.slot] -= place.prompt_tokens
            if self._cells.requests[place.slot] == 0:
                self._idle(place.slot)
            self._cells.decode_place_tokens[place.slot] -= place.prompt_tokens

    def decode_places_at(self, slot: int) -> list[int]:
        """Return the ids of requests that have KV memory reserved for decode at a worker.

        `slot` is the worker's slot.
        """
        return [number for number, one in self._decode_places.items() if one.slot == slot]

    def reserve(
        self,
        key: ChargeKey,
        slot: int,
        prompt_tokens: int,
        uncached_tokens: int,
        stream: bool,
        now_s: float,
        moved_tokens: int = 0,
        loads: Loads = NO_LOADS,
        room_tokens: int = 0,
        shows_speed: bool = True,
    ) -> Charge:
        """Charge a request, or one leg of it, to the worker in `slot`, and return the charge. `key`
        is the request's id and the leg, which must have no open charge. `stream` is True if the
        router will see when the prefill ends, because it sees the first token or the end of a
        prefill leg. `moved_tokens` is the number of prompt tokens whose KV comes from another
        worker. `loads` has the numbers of prompt tokens whose KV the worker loads from its host
        memory and disk. `room_tokens` is the number of tokens of KV memory to reserve at the worker
        until the first token. `shows_speed` is True if the time to the first token shows the
        worker's prefill speed.
        """
        assert key not in self._charges, f"request {key[0]} is charged twice"
        cells = self._cells
        cached_tokens = prompt_tokens - uncached_tokens
        work_tokens = self._columns.attention.work(uncached_tokens, cached_tokens)
        if self._drained_s is None:
            self._drained_s = now_s
        waiting = cells.waiting[slot]
        period = self._period(slot, now_s)
        if not stream or moved_tokens or not shows_speed:
            period.shown = False
        end_work = cells.charged_work[slot] + work_tokens
        cells.charged_work[slot] = end_work
        cells.requests[slot] += 1
        cells.waiting[slot] = waiting + 1
        if room_tokens:
            cells.context_tokens[slot] += room_tokens
            cells.decode_place_tokens[slot] += room_tokens
        else:
            cells.waiting_prompt_tokens[slot] += prompt_tokens
        self._queue(slot, uncached_tokens, work_tokens)
        request_id, leg = key
        charge = self._charges[key] = Charge(
            request_id, cells.worker_id[slot], slot,
            prompt_tokens, uncached_tokens, work_tokens, end_work,
            now_s, waiting == 0, period,
            leg, moved_tokens, loads, room_tokens,
        )  # fmt: skip
        if not stream:
            self._silent.setdefault(slot, deque()).append(charge)
            return charge
        coming = self._coming.get(slot)
        if coming is None:
            coming = self._coming[slot] = deque()
        if not coming:
            cells.drain_limit_work[slot] = end_work
        coming.append(charge)
        return charge

    def _period(self, slot: int, now_s: float) -> PrefillPeriod:
        """Count a prefill in the worker's current period of uninterrupted prefill, and return the
        period. If no request waits for its first token at the worker, begin a new period.
        """
        period = self._periods[slot]
        if period is None or not self._cells.waiting[slot]:
            period = self._periods[slot] = PrefillPeriod(now_s)
        period.dispatched += 1
        return period

    def first_token(self, charge: Charge, now_s: float) -> bool:
        """Record that a prefill has ended, because its first token arrived.

        All prefills that were queued at the worker before count as computed, too. Return False if
        the prefill's end was recorded before.
        """
        if not charge.waiting:
            return False
        drained, slot = self._cells.drained_work, charge.slot
        if drained[slot] < charge.end_work:
            drained[slot] = charge.end_work
        period = charge.period
        period.first_tokens += 1
        period.uncached_tokens += charge.uncached_tokens
        period.work_tokens += charge.work_tokens
        period.loaded_tokens += charge.loads.tokens
        self._start_decode(charge, now_s)
        charge.output_tokens = 1
        self._cells.context_tokens[slot] += 1
        self._lift_limit(slot)
        return True

    def progress(self, charge: Charge, output_tokens: int, now_s: float) -> float | None:
        """Record how many tokens a running answer has so far.

        Return the seconds per token since the last call. Return None if the first token has not
        been recorded, or if no token or no time was added since the last call.
        """
        if charge.waiting or output_tokens <= charge.output_tokens:
            return None
        tokens = output_tokens - charge.output_tokens
        elapsed_s = now_s - charge.progress_s
        self._cells.context_tokens[charge.slot] += tokens
        charge.output_tokens = output_tokens
        charge.progress_s = now_s
        return elapsed_s / tokens if elapsed_s > 0 else None

    def output_tokens(self, charge: Charge | None, arrival: Arrival, finish: Finish) -> int:
        """Return the number of tokens in a finished answer.

        If the worker did not report the number, estimate it: the time of the decode divided by the
        worker's present step time. The result is 0 if `charge` is None or if the prefill has not
        ended.
        """
        if finish.output_tokens is not None:
            return finish.output_tokens
        if charge is None or charge.waiting or finish.refused:
            return 0
        decode_s = max(finish.now_s - charge.progress_s, 0.0)
        tokens = int(decode_s / self._cells.step_s[charge.slot])
        most = arrival.max_output_tokens
        return tokens if most is None else min(tokens, most)

    def left_s(self, charge: Charge, output_tokens: float, now_s: float) -> float:
        """Estimate in how many seconds an answer of `output_tokens` tokens in all will be complete.

        The estimate uses the worker's prefill queue, prefill speed and decode step time.
        """
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

    def unwatched(self, charge: Charge) -> None:
        """Record that the router will not see the first token of a charged request after all.

        From now on the end of the prefill is estimated from the worker's queue and prefill speed.
        """
        coming = self._coming.get(charge.slot, deque())
        if not charge.waiting or all(one is not charge for one in coming):
            return
        charge.period.shown = False
        left = deque(one for one in coming if one is not charge and one.waiting)
        self._coming[charge.slot] = left
        self._silent.setdefault(charge.slot, deque()).append(charge)
        self._cells.drain_limit_work[charge.slot] = left[0].end_work if left else inf

    def release(self, charge: Charge) -> None:
        """Remove the charge of a request that is over at its worker, and the charge's load."""
        del self._charges[charge.request_id, charge.leg]
        cells, slot = self._cells, charge.slot
        cells.requests[slot] -= 1
        if charge.waiting:
            self._wait_over(charge)
            self._drop_queued(charge)
            charge.waiting = charge.period.shown = False
            self._lift_limit(slot)
        else:
            cells.context_tokens[slot] -= charge.prompt_tokens + charge.output_tokens
        if cells.requests[slot] == 0:
            self._idle(slot)

    def _idle(self, slot: int) -> None:
        """Set a worker's estimated prefill queue to 0, because the worker has no requests left.

        A request with KV memory reserved at the worker counts as one of its requests.
        """
        cells = self._cells
        cells.drained_work[slot] = cells.charged_work[slot]
        cells.context_tokens[slot] = 0.0
        self._silent.pop(slot, None)
        self._coming.pop(slot, None)
        cells.drain_limit_work[slot] = inf

    def advance(self, now_s: float) -> None:
        """Reduce the estimated prefill queues of all workers by the work done up to `now_s`.

        A request whose first token the router does not see counts as decoding once its prefill
        should be over.
        """
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
        if charge.room_tokens:
            cells.context_tokens[slot] -= charge.room_tokens
            cells.decode_place_tokens[slot] -= charge.room_tokens
        else:
            cells.waiting_prompt_tokens[slot] -= charge.prompt_tokens
        self._queue(slot, -charge.uncached_tokens, -charge.work_tokens)

    def _queue(self, slot: int, tokens: int, work_tokens: float) -> None:
        """Update a worker's mean work per waiting token for a prompt that enters or leaves the
        queue. `tokens` is the number of the prompt's uncached tokens, negative if it leaves.
        `work_tokens` is the work to prefill them, including attention, with the same sign.
        """
        waiting_tokens, waiting_work = self._waiting[slot]
        waiting_tokens += tokens
        if not waiting_tokens:
            self._waiting[slot], self._cells.token_work[slot] = (0, 0.0), 1.0
            return
        waiting_work += work_tokens
        self._waiting[slot] = waiting_tokens, waiting_work
        self._cells.token_work[slot] = waiting_work / waiting_tokens

    def _lift_limit(self, slot: int) -> None:
        """Allow the estimated queue to shrink up to the end of the oldest prompt that has no first
        token yet.
        """
        coming = self._coming.get(slot)
        if not coming:
            return
        while coming and not coming[0].waiting:
            coming.popleft()
        limit_work = coming[0].end_work if coming else inf
        self._cells.drain_limit_work[slot] = limit_work

    def _drop_queued(self, charge: Charge) -> None:
        """Subtract from a worker's queue the uncomputed part of a prompt whose charge was
        released.
        """
        cells, slot = self._cells, charge.slot
        left = charge.end_work - cells.drained_work[slot]
        unfinished = min(max(left, 0.0), charge.work_tokens)
        cells.drained_work[slot] = min(
            cells.drained_work[slot] + unfinished, cells.charged_work[slot]
        )
