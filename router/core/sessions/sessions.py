"""Tracks sessions: their requests, the workers that have their caches, and when they return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvkernels import SessionWeights, Trunks, sum_of, sum_of_least
from policies.contract import Hashes, Ints
from policies.facts import Arrival
from router.core.sessions.pool_pace import PaceKeeper
from router.core.sessions.return_hazard import EDGES_S, ReturnHazard, UnownedBlocks
from router.core.sessions.session_rows import SessionFinder, SessionRows
from router.core.sessions.working_sets import WorkingSets
from router.core.workers.columns import WorkerColumns

_WEIGHT = 0.02  # of a new sample
_CALM = 1.3  # a step may take so many times the worker's quickest and still count as calm
_FORGET_S = 600.0  # in which a quickest step that is not seen again grows e-fold


class Cycle:
    """Estimates how long a session's cycle takes: a pause, then the decode of the next answer.

    The pause lasts from the end of an answer to the session's next request. The pause and the
    length of answers are averaged over all sessions.
    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._pause_s: float | None = None
        self._output_tokens: float | None = None
        self._quickest_s = np.full(len(columns.step_s), np.inf)  # steps lately, by worker slot
        self._ticked_s: float | None = None

    def returned(self, away_s: float) -> None:
        """Record that a session sent a request `away_s` seconds after its last answer ended."""
        self._pause_s = _smooth(self._pause_s, away_s)

    def answered(self, output_tokens: int) -> None:
        """Record that an answer had `output_tokens` tokens."""
        self._output_tokens = _smooth(self._output_tokens, float(output_tokens))

    @property
    def output_tokens(self) -> float:
        """The mean number of tokens of an answer, smoothed; 0 before the first answer has ended."""
        return self._output_tokens or 0.0

    def tick(self, now_s: float) -> None:
        """Update each worker's shortest recent decode step time.

        A minimum that is not seen again grows slowly, so that old values lose their effect.
        """
        elapsed_s = 0.0 if self._ticked_s is None else max(now_s - self._ticked_s, 0.0)
        self._ticked_s = now_s
        self._quickest_s *= 1.0 + elapsed_s / _FORGET_S
        np.minimum(self._quickest_s, self._columns.step_s, out=self._quickest_s)
        self._quickest_s[self._columns.worker_id < 0] = np.inf  # nobody's step

    def worker_lost(self, slot: int) -> None:
        """Forget a slot's shortest decode step time, because the slot's worker lost its cache."""
        self._quickest_s[slot] = np.inf

    def seconds(self, slots: Ints) -> float:
        """Return the mean seconds of a session's cycle: its pause, and then the decode of an
        answer. The result is 0 before any session has returned. The decode time uses the mean step
        time of the workers in `slots`. A worker's step time counts as at most 1.3 times its
        shortest recent step time. Otherwise an overloaded pool, whose steps are long, would make
        cycles seem long, and keeping caches for the next cycle would seem useless.
        """
        if self._pause_s is None or self._output_tokens is None:
            return 0.0
        calm_s = sum_of_least(self._quickest_s, _CALM, self._columns.step_s, slots)
        return self._pause_s + self._output_tokens * (calm_s / len(slots))


def _smooth(known: float | None, sample: float) -> float:
    return sample if known is None else known + _WEIGHT * (sample - known)


_LEAST_CHANCE = 0.02  # of a return within its horizon: below it a session wants no memory
_IDLE_S = 900.0  # longest time to remember one that does not return
_HORIZON_S = 60.0  # where the worker's memory is unknown
_REFRESH_S = 0.5  # at least; longer with very many sessions, so that it stays a small share of time
_ROWS_PER_S = 100_000.0


@dataclass(slots=True)
class TrackedRequest:
    """The record that the session tracking keeps of one request: its session, and the numbers of
    tokens of its prompt and of the shared part. Lifetime: request.
    """

    row: int  # of its session; -1: one that is only looked at, and whose session is not known
    trunk: int  # name of the trunk, 0: none
    trunk_tokens: int
    prompt_tokens: int
    private_before: float  # private tokens of its session until now; 0: it has not begun
    final: bool = False  # its session sends no more requests


class Sessions:
    """Tracks the live sessions of this router, and the tokens that they want in workers' caches.

    At most `limit` sessions and `entries` prompt blocks are remembered. If a new session exceeds
    the limit, idle sessions are forgotten, so at least one session must be idle then.
    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns, slots: int, limit: int, entries: int) -> None:
        self._columns = columns
        self._rows = SessionRows(limit)
        self._weights = SessionWeights(
            self._rows.named(), least_chance=_LEAST_CHANCE, forget_s=_IDLE_S, unknown_s=_HORIZON_S
        )
        self._finder = SessionFinder(self._rows, entries)
        self.owners = self._finder.owners
        self._refreshed_s = float("-inf")
        self.sets = WorkingSets(slots)
        self.unowned = UnownedBlocks(slots)
        self.hazard = ReturnHazard()
        self.cycle = Cycle(columns)
        self.trunks = Trunks()
        self._pace = PaceKeeper(columns)
        self.crowded_out = 0  # forgotten for want of room

    def __len__(self) -> int:
        return len(self._rows)

    def count(self) -> tuple[int, int]:
        """Return the number of sessions with a request in flight, and the number of sessions
        without one.
        """
        idle = len(self._rows.idle())
        return len(self) - idle, idle

    # --- requests ---------------------------------------------------------------------------

    def arrived(self, fact: Arrival, chain: Hashes, block_size: int) -> TrackedRequest:
        """Find or create the session of an arriving request, and count the request in the session.

        The result also gives the number of leading prompt tokens that other sessions use, too.
        """
        rows, cells, now_s = self._rows, self._rows.cells, fact.now_s
        owner, known_blocks = self.owners.owner(chain)
        row = self._finder.row(fact, chain, owner)
        if row < 0:
            if rows.full:
                self._make_room()
            row = self._finder.new(fact, owner)
        else:
            self._finder.name(row, fact)
            if cells.inflight[row] == 0:
                self._back(row, now_s)
        cells.inflight[row] += 1
        self._finder.keep_tip(row, chain, block_size, fact.prompt_tokens)
        blocks = self.owners.claim(chain, cells.serial[row])
        self.trunks.pool(*self._pace.at(now_s, self.cycle.output_tokens), now_s)
        self.trunks.arrival(chain, block_size, fact.prompt_tokens, blocks, known_blocks, now_s)
        return self._track(row, fact, chain, blocks, block_size)

    def look(self, fact: Arrival, chain: Hashes, block_size: int) -> TrackedRequest:
        """Return what `arrived` would return for a request now, but change nothing."""
        owner, known_blocks = self.owners.owner(chain)
        row = self._finder.row(fact, chain, owner)
        blocks = self.owners.shared(chain)
        alive = self._rows.row_of(owner)
        if alive >= 0 and alive != row:  # two use what is one's now
            blocks = known_blocks
        return self._track(row, fact, chain, blocks, block_size)

    def dispatched(self, tracked: TrackedRequest, slot: int) -> None:
        """Record that a request was sent to a worker, which has the session's cache from now on."""
        cells, row = self._rows.cells, tracked.row
        self._clear_home(row)
        private = max(tracked.prompt_tokens - tracked.trunk_tokens, 0)
        work = self._columns.attention.work(private, tracked.trunk_tokens)
        cells.private_tokens[row], cells.cold_work[row] = float(private), float(work)
        cells.trunk[row] = tracked.trunk
        cells.home[row] = slot
        cells.weight[row] = 1.0
        self.sets.enter(slot, tracked.trunk, tracked.trunk_tokens)
        self.sets.shift(slot, private, work)

    def cache_lost(self, tracked: TrackedRequest) -> None:
        """Record that no worker has the cache of the request's session any more."""
        self._clear_home(tracked.row)

    def ended(self, tracked: TrackedRequest, output_tokens: int | None, now_s: float) -> None:
        """Record the end of a request. `output_tokens` is None if the answer was not complete."""
        rows, cells, row = self._rows, self._rows.cells, tracked.row
        cells.inflight[row] -= 1
        home = cells.home[row]
        if output_tokens and home >= 0:
            self.cycle.answered(output_tokens)
            private = cells.private_tokens[row] + output_tokens
            trunk_tokens = self.sets.tokens_of(cells.trunk[row])
            work = float(self._columns.attention.work(private, trunk_tokens))
            self.sets.shift(home, output_tokens, work - cells.cold_work[row])
            cells.private_tokens[row], cells.cold_work[row] = private, work
        if cells.inflight[row] == 0:
            if tracked.final:
                self._forget(row)
            elif home < 0 and not cells.private_tokens[row]:
                rows.give_back(row)  # never got anywhere
            else:
                cells.idle_s[row] = now_s
                cells.bin[row] = -1

    def worker_lost(self, slot: int) -> None:
        """Record that the worker in `slot` lost its cache, with the caches of all its sessions."""
        rows = self._rows
        at_home = rows.at_home(slot)
        rows.home[at_home] = -1
        rows.weight[at_home] = 0.0
        self.sets.clear(slot)
        self.unowned.clear(slot)
        self.cycle.worker_lost(slot)

    # --- time -------------------------------------------------------------------------------

    def refresh(self, now_s: float) -> None:
        """Compute again how much each idle session counts, and forget the sessions that have been
        idle for too long. A session counts by its chance to return in time to use its cache. The
        method does this at most twice a second.
        """
        if now_s - self._refreshed_s < max(_REFRESH_S, len(self._rows) / _ROWS_PER_S):
            return
        self._refreshed_s = now_s
        self.cycle.tick(now_s)
        self.trunks.pool(*self._pace.at(now_s, self.cycle.output_tokens), now_s)
        rows, weights, columns = self._rows, self._weights, self._columns
        idle, before, now = weights.enter_bins(rows.used, now_s, EDGES_S)
        if idle:
            self.hazard.entered(before, now)
            self.hazard.renew()
            unlikely, over = weights.weigh(
                rows.used,
                now_s,
                EDGES_S,
                self.hazard.away,
                columns.prefill_tokens_per_s,
                columns.kv_capacity_tokens,
            )
            for row in unlikely.tolist():
                self._clear_home(
                    row
                )  # that it has begun is remembered: it waits with those that have
            for row in over.tolist():
                self._forget(row)
        self.unowned.weigh(self.hazard, now_s)
        weights.sum_up(rows.used, self.sets.private_tokens, self.sets.cold_work)

    def own(self, tracked: TrackedRequest) -> tuple[int, float, float]:
        """Return what a request's session adds to the wanted tokens of the worker that caches it.
        The result has three parts: the worker's slot (-1 if no worker has the cache), the session's
        cached tokens, and the work to compute its private tokens again. Private tokens and work are
        multiplied by the session's chance to return. A shared prefix counts in full if no other
        session at the worker uses it, and otherwise not at all. The unit of work is one token
        computed without attention.
        """
        cells, row = self._rows.cells, tracked.row
        slot = cells.home[row] if row >= 0 else -1
        if slot < 0:
            return -1, 0.0, 0.0
        weight, trunk = cells.weight[row], cells.trunk[row]
        tokens = weight * cells.private_tokens[row]
        if trunk and self.sets.sessions_with(trunk, slot) == 1:
            tokens += self.sets.tokens_of(trunk)
        return slot, tokens, weight * cells.cold_work[row]

    def return_chance(self, tracked: TrackedRequest, slots: Ints) -> float:
        """Return the chance, 0..1, that the request's session returns in time to use its cache. The
        time ends when a worker that computes such tokens all the time would have filled its KV
        memory once, and after 15 minutes at the latest. If the size of the memory is unknown, the
        time is one minute. Speed and memory are means over the workers in `slots`.
        """
        private = max(tracked.prompt_tokens - tracked.trunk_tokens, 1)
        columns = self._columns
        cold_work = columns.attention.work(private, tracked.trunk_tokens)
        workers = max(len(slots), 1)  # and of each the mean, by what a decision has time for
        cold_s = cold_work * workers / sum_of(columns.prefill_tokens_per_s, slots)
        horizon_s = cold_s * sum_of(columns.kv_capacity_tokens, slots) / workers / private
        if not horizon_s < _IDLE_S:  # nor NaN
            horizon_s = _IDLE_S if horizon_s == horizon_s else _HORIZON_S
        return self.hazard.soon(horizon_s)

    def has_trunk(self, tracked: TrackedRequest) -> bool:
        """Return True if the shared prefix (trunk) recorded for the session is that of this
        request.
        """
        return self._rows.cells.trunk[tracked.row] == tracked.trunk

    # --- inside -----------------------------------------------------------------------------

    def _track(
        self, row: int, fact: Arrival, chain: Hashes, blocks: int, size: int
    ) -> TrackedRequest:
        return TrackedRequest(
            row=row,
            trunk=int(chain[blocks - 1]) if blocks else 0,
            trunk_tokens=min(blocks * size, fact.prompt_tokens),
            prompt_tokens=fact.prompt_tokens,
            private_before=self._rows.cells.private_tokens[row] if row >= 0 else 0.0,
            final=fact.identity.final,
        )

    def _back(self, row: int, now_s: float) -> None:
        """Record that an idle session sent a request, and count its cached tokens in full again."""
        cells = self._rows.cells
        away_s = max(now_s - cells.idle_s[row], 0.0)
        self.hazard.returned(cells.bin[row], away_s)
        self.cycle.returned(away_s)
        if cells.home[row] >= 0:
            missing = 1.0 - cells.weight[row]
            private, work = cells.private_tokens[row], cells.cold_work[row]
            self.sets.shift(cells.home[row], missing * private, missing * work)
            cells.weight[row] = 1.0

    def _clear_home(self, row: int) -> None:
        """Record that no worker has the cache of the session in `row`."""
        cells = self._rows.cells
        slot, weight = cells.home[row], cells.weight[row]
        if slot >= 0:
            private, work = cells.private_tokens[row], cells.cold_work[row]
            self.sets.shift(slot, -weight * private, -weight * work)
            self.sets.leave(slot, cells.trunk[row])
            cells.home[row] = -1
        cells.weight[row] = 0.0

    def _forget(self, row: int) -> None:
        self._clear_home(row)
        self._rows.give_back(row)

    def _make_room(self) -> None:
        for row in self._rows.longest_idle().tolist():
            self._forget(row)
            self.crowded_out += 1
