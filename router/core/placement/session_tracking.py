"""Session tracking, on while the policy in use asks for it, and what a decision sees of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvkernels import leading
from policies.contract import Bools, Floats, Hashes, Ints, Standing
from policies.facts import Arrival
from policies.load import LoadedPolicy
from router.core.contract.settings import CoreSettings
from router.core.placement.eligible import Rows
from router.core.placement.pending import Pending
from router.core.sessions.sessions import Sessions, TrackedRequest
from router.core.workers.columns import WorkerColumns
from router.core.workers.table import Worker, WorkerTable


class SessionView:
    """Lifetime: one decision."""

    def __init__(
        self,
        sessions: Sessions,
        tracked: TrackedRequest,
        rows: Rows,
        hits: Ints,
        held: Ints,
        columns: WorkerColumns,
        chain: Hashes,
    ) -> None:
        """`held`: hits in any tier, of which `hits` are on the GPU."""
        self._hits, self._chain = hits, chain
        self.trunk_tokens = tracked.trunk_tokens
        self.sessions, self._tracked = sessions, tracked
        self._slots, self._slot_ids, self._columns = rows.slots, rows.slot_ids, columns
        self._own_slot, self._own_tokens, self._own_work = sessions.own(tracked)
        self._own_row = self._row_of(self._own_slot)
        self.home_id = int(columns.worker_id[self._own_slot]) if self._own_slot >= 0 else -1
        self.standing = self._standing(rows, held)
        self.return_chance = sessions.return_chance(tracked, rows.slot_ids)

    def _standing(self, rows: Rows, hits: Ints) -> Standing:
        tracked = self._tracked
        best, hit, others = leading(hits)
        if tracked.private_before:
            if hit >= tracked.trunk_tokens + tracked.private_before / 2:
                return "warm"
            # Where events were lost, the hits are a lower bound: it is believed to be at home.
            known = self._own_row is None or not self._columns.hits_unknown[self._own_slot]
            return "cold" if known else "warm"
        # Not seen by this router, but perhaps by one before it: what one worker alone holds of a
        # prompt is nobody's trunk. Half of the prompt beyond what others hold, too, is a cache.
        shared = tracked.trunk_tokens
        if hit > shared:
            shared = max(others, shared)
        private = tracked.prompt_tokens - shared
        if hit > shared and 2 * (hit - shared) >= private:
            self.home_id = rows.worker_ids[best]
            return "warm"
        return "new"

    def working_set_tokens(self) -> Floats:
        """float64[rows], without the session of this request."""
        sets = self.sessions.sets
        tokens: Floats = sets.private_tokens[self._slots] + sets.trunk_tokens[self._slots]
        tokens += self.sessions.unowned.wanted_tokens[self._slots]
        if self._own_row is not None:
            tokens[self._own_row] -= self._own_tokens
        # Rounding may leave a sum a hair below nothing.
        return np.maximum(tokens, 0.0, out=tokens)

    def working_set_s(self) -> Floats:
        """float64[rows], without the session of this request."""
        speeds = self._columns.prefill_tokens_per_s[self._slots]
        # Of unowned blocks it is not known how deep in a context they lie: at least linear work.
        work = self.sessions.sets.cold_work + self.sessions.unowned.wanted_tokens
        seconds: Floats = work[self._slots] / speeds
        if (row := self._own_row) is not None:
            seconds[row] -= self._own_work / speeds[row]
        return np.maximum(seconds, 0.0, out=seconds)

    def holds_trunk(self) -> Bools:
        """bool[rows]: where another session with the same trunk is at home."""
        sets, tracked = self.sessions.sets, self._tracked
        holding = sets.holding(tracked.trunk)[self._slots]
        row = self._own_row
        if row is None or not holding[row] or not self.sessions.has_trunk(tracked):
            return holding
        if sets.sessions_with(tracked.trunk, self._own_slot) > 1:
            return holding
        holding = holding.copy()
        holding[row] = False
        return holding

    def columns(self) -> dict[str, Floats]:
        """The sums of sessions by slot, where they lie."""
        sets = self.sessions.sets
        return {
            "private_tokens": sets.private_tokens,
            "trunk_tokens": sets.trunk_tokens,
            "cold_work": sets.cold_work,
            "unowned_tokens": self.sessions.unowned.wanted_tokens,
        }

    def own(self) -> tuple[int, float, float, Bools, bool]:
        """(Slot of its home or -1, its tokens there, its linear work, bool[slots] where sessions
        with its trunk are at home, whether in its own slot nobody but itself is one of these).
        """
        sets, tracked, slot = self.sessions.sets, self._tracked, self._own_slot
        holding = sets.holding(tracked.trunk)
        alone = slot >= 0 and bool(holding[slot]) and self.sessions.has_trunk(tracked)
        alone = alone and sets.sessions_with(tracked.trunk, slot) <= 1
        return slot, self._own_tokens, self._own_work, holding, alone

    def trunk(self) -> tuple[int, int]:
        """(Tokens of the trunk, how many more of the rows should hold it; 0 or less: enough do)."""
        tokens, wanted = self.hot_trunk()
        if not wanted:
            return 0, 0
        copies = int(np.count_nonzero(self._hits >= tokens))
        return tokens, min(wanted, len(self._hits)) - copies

    def hot_trunk(self) -> tuple[int, int]:
        """(Tokens of the trunk, how many workers should hold it; 0, 0: it begins with none.)"""
        trunk = self.sessions.trunks.of(self._chain)
        return (0, 0) if trunk is None else (trunk.tokens, trunk.wanted_copies)

    def cycle_s(self) -> float:
        """Seconds of a turn whose cache is warm."""
        return self.sessions.cycle.seconds(self._slot_ids)

    def _row_of(self, slot: int) -> int | None:
        """The row of a worker slot; None: it is not among them."""
        slots = self._slots
        if isinstance(slots, slice):
            return slot - slots.start if slots.start <= slot < slots.stop else None
        rows = np.flatnonzero(slots == slot)
        return int(rows[0]) if len(rows) else None


class SessionTracking:
    """Lifetime: process. `sessions` is None while the policy does not ask for them."""

    def __init__(
        self,
        columns: WorkerColumns,
        settings: CoreSettings,
        workers: WorkerTable,
        policy: LoadedPolicy,
    ) -> None:
        self._columns, self._settings = columns, settings
        self._workers = workers
        # Workers whose caches were searched for unowned blocks, and whether all of each was known.
        self._looked_at: dict[int, bool] = {}
        self.sessions: Sessions | None = None
        self.follow(policy, ())

    def follow(self, policy: LoadedPolicy, under_way: Iterable[Pending]) -> None:
        """Begin, go on, or stop, as this policy needs; `under_way`: unfinished, oldest first."""
        if not policy.needs_sessions:
            self.sessions = None
            for pending in under_way:
                pending.tracked = None
        elif self.sessions is None:
            settings = self._settings
            # Each of these may have a session of its own, and none of them can be forgotten.
            limit = max(settings.sessions, settings.inflight_requests + settings.peer_requests)
            self._looked_at.clear()
            self.sessions = Sessions(
                self._columns, settings.max_workers, limit, settings.session_blocks
            )
            for pending in under_way:
                self.arrived(pending)
                if (charge := pending.prompt_charge) is not None:
                    self.dispatched(pending, charge.slot)

    def arrived(self, pending: Pending) -> None:
        """A request arrived; find its session."""
        if self.sessions is not None:
            pending.tracked = self.sessions.arrived(pending.arrival, *_prompt(pending.arrival))

    def look(self, pending: Pending) -> None:
        """The same for a dry run; nothing is remembered of it."""
        if self.sessions is not None:
            pending.tracked = self.sessions.look(pending.arrival, *_prompt(pending.arrival))

    def view(self, pending: Pending, rows: Rows, hits: Ints, held: Ints) -> SessionView | None:
        """Return the session data that a decision reads, or None while sessions are not tracked.

        `hits` are the prompt tokens cached on each worker's GPU, and `held` those cached in any
        tier.
        """
        if self.sessions is None or pending.tracked is None:
            return None
        chain = pending.arrival.chains[rows.block_sizes[0]]
        return SessionView(self.sessions, pending.tracked, rows, hits, held, self._columns, chain)

    def wanted_tokens(self, slot: int) -> float:
        """Tokens that sessions at home on a worker will want again; NaN while not tracked."""
        if self.sessions is None:
            return float("nan")
        sets = self.sessions.sets
        return sets.tokens_at(slot) + float(self.sessions.unowned.wanted_tokens[slot])

    def dispatched(self, pending: Pending, slot: int) -> None:
        """It was sent to the worker in `slot`."""
        if self.sessions is None or (tracked := pending.tracked) is None:
            return
        if pending.standing == "warm" and not tracked.private_before:
            self.sessions.unowned.known(slot, tracked.prompt_tokens - tracked.trunk_tokens)
        self.sessions.dispatched(tracked, slot)

    def held(self, pending: Pending) -> None:
        """It must wait at the router. One whose cache is warm may do so for its home's sake."""
        if self.sessions is None or pending.tracked is None:
            return
        if pending.standing != "warm":
            self.sessions.cache_lost(pending.tracked)

    def ended(
        self,
        pending: Pending,
        now_s: float,
        output_tokens: int | None = None,
        *,
        refused: bool = False,
    ) -> None:
        """Its answer is complete (with `output_tokens`), or it came to nothing (None).

        One that was `refused` left no cache at its worker: its prompt may be beyond that one's
        memory.
        """
        tracked, pending.tracked = pending.tracked, None
        if self.sessions is None or tracked is None:
            return
        if refused:
            self.sessions.cache_lost(tracked)
        self.sessions.ended(tracked, output_tokens, now_s)

    def lost(self, worker: Worker | None) -> None:
        """A worker's cache is gone."""
        if self.sessions is not None and worker is not None:
            self.sessions.worker_lost(worker.slot)
            self._looked_at.pop(worker.worker_id, None)

    def tick(self, now_s: float) -> None:
        """Time passed."""
        if self.sessions is not None:
            self._look_for_unowned(self.sessions, now_s)
            self.sessions.refresh(now_s)

    def _look_for_unowned(self, sessions: Sessions, now_s: float) -> None:
        """Once for each cache since it was last empty, or since sessions are followed: when it is
        known, or a replay, snapshot or copy of a part was told to its end. Of a part, once more
        when all is known.
        """
        if len(self._looked_at) == len(self._workers) and all(self._looked_at.values()):
            return
        for worker_id in [one for one in self._looked_at if self._workers.get(one) is None]:
            del self._looked_at[worker_id]
        for worker in self._workers:
            kv, of_all = worker.kv, self._looked_at.get(worker.worker_id)
            is_told = of_all is None and kv.settled and kv.told_blocks > 0
            if of_all or not (kv.known or is_told):
                continue
            self._looked_at[worker.worker_id] = kv.known
            # Of one that is not exact, the rest was stored before our eyes.
            blocks = kv.resident_blocks if kv.exact else kv.told_blocks
            if kv.exact or is_told:
                held, own = blocks * worker.facts.block_size, sessions.sets.tokens_at(worker.slot)
                sessions.unowned.found(worker.slot, held - own, now_s)


def _prompt(arrival: Arrival) -> tuple[Hashes, int]:
    """(Its chain, block size): of the smallest blocks, where sessions part is seen best."""
    if not arrival.chains:  # nobody serves it
        return np.empty(0, dtype=np.uint64), 1
    size = min(arrival.chains)
    return arrival.chains[size], size
