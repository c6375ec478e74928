"""Tracks sessions while the policy in use needs them, and gives their data to decisions."""

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
    """The data about sessions that one decision reads.

    Lifetime: one decision.
    """

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
        """Collect the session data for one request.

        `hits` are the prompt tokens cached on each worker's GPU, and `held` those cached in any
        tier of the worker.
        """
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
            # If events were lost, the hits are a lower bound: assume that the session is at home.
            known = self._own_row is None or not self._columns.hits_unknown[self._own_slot]
            return "cold" if known else "warm"
        # This router has not seen the session, but perhaps the one before it did: blocks of a
        # prompt that only one worker holds are not of a trunk. Holding half of the prompt beyond
        # the others' blocks counts as a warm cache.
        shared = tracked.trunk_tokens
        if hit > shared:
            shared = max(others, shared)
        private = tracked.prompt_tokens - shared
        if hit > shared and 2 * (hit - shared) >= private:
            self.home_id = rows.worker_ids[best]
            return "warm"
        return "new"

    def working_set_tokens(self) -> Floats:
        """Return how many KV tokens at each worker live sessions will probably use again,
        float64[rows]. The session of this request is left out.
        """
        sets = self.sessions.sets
        tokens: Floats = sets.private_tokens[self._slots] + sets.trunk_tokens[self._slots]
        tokens += self.sessions.unowned.wanted_tokens[self._slots]
        if self._own_row is not None:
            tokens[self._own_row] -= self._own_tokens
        # Rounding may leave a sum slightly below zero.
        return np.maximum(tokens, 0.0, out=tokens)

    def working_set_s(self) -> Floats:
        """Return the seconds that each worker would need to recompute the tokens that only one
        session uses, float64[rows]. These are the private tokens of `working_set_tokens`. The
        session of this request is left out.
        """
        speeds = self._columns.prefill_tokens_per_s[self._slots]
        # Of unowned blocks it is not known how deep in a context they lie: at least linear work.
        work = self.sessions.sets.cold_work + self.sessions.unowned.wanted_tokens
        seconds: Floats = work[self._slots] / speeds
        if (row := self._own_row) is not None:
            seconds[row] -= self._own_work / speeds[row]
        return np.maximum(seconds, 0.0, out=seconds)

    def holds_trunk(self) -> Bools:
        """Return True for each worker that caches another session with the same shared prefix,
        bool[rows].
        """
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
        """Return sums over the sessions at each worker slot, by name, float64[slots] each.

        The arrays are the originals, not copies.
        """
        sets = self.sessions.sets
        return {
            "private_tokens": sets.private_tokens,
            "trunk_tokens": sets.trunk_tokens,
            "cold_work": sets.cold_work,
            "unowned_tokens": self.sessions.unowned.wanted_tokens,
        }

    def own(self) -> tuple[int, float, float, Bools, bool]:
        """Return the share of this request's own session in the sums of its worker. The result has
        five parts: the worker's slot or -1; the session's tokens there; the work to recompute
        these, in tokens without attention; bool[slots] of the workers that hold the session's
        shared prefix; and True if this session alone has that prefix at its worker.
        """
        sets, tracked, slot = self.sessions.sets, self._tracked, self._own_slot
        holding = sets.holding(tracked.trunk)
        alone = slot >= 0 and bool(holding[slot]) and self.sessions.has_trunk(tracked)
        alone = alone and sets.sessions_with(tracked.trunk, slot) <= 1
        return slot, self._own_tokens, self._own_work, holding, alone

    def trunk(self) -> tuple[int, int]:
        """Return the tokens of the hot trunk, and the number of workers that should get a copy.

        The hot trunk is the leading part of the prompt that many recent prompts share. The second
        number is 0 or less if enough workers hold the trunk.
        """
        tokens, wanted = self.hot_trunk()
        if not wanted:
            return 0, 0
        copies = int(np.count_nonzero(self._hits >= tokens))
        return tokens, min(wanted, len(self._hits)) - copies

    def hot_trunk(self) -> tuple[int, int]:
        """Return the tokens of the hot trunk, and the number of workers that should hold it.

        The hot trunk is the leading part of the prompt that many recent prompts share. Both numbers
        are 0 if there is none.
        """
        trunk = self.sessions.trunks.of(self._chain)
        return (0, 0) if trunk is None else (trunk.tokens, trunk.wanted_copies)

    def cycle_s(self) -> float:
        """Return the mean seconds between two requests of a session whose cache is warm."""
        return self.sessions.cycle.seconds(self._slot_ids)

    def _row_of(self, slot: int) -> int | None:
        """Return the row of the worker in `slot`, or None if the decision leaves the worker out."""
        slots = self._slots
        if isinstance(slots, slice):
            return slot - slots.start if slots.start <= slot < slots.stop else None
        rows = np.flatnonzero(slots == slot)
        return int(rows[0]) if len(rows) else None


class SessionTracking:
    """Tracks the sessions of all requests, if the policy in use needs them.

    If the policy does not need them, `sessions` is None. Lifetime: process.
    """

    def __init__(
        self,
        columns: WorkerColumns,
        settings: CoreSettings,
        workers: WorkerTable,
        policy: LoadedPolicy,
    ) -> None:
        self._columns, self._settings = columns, settings
        self._workers = workers
        # Workers whose caches were searched for unowned blocks; True: all of the cache was known.
        self._looked_at: dict[int, bool] = {}
        self.sessions: Sessions | None = None
        self.follow(policy, ())

    def follow(self, policy: LoadedPolicy, under_way: Iterable[Pending]) -> None:
        """Start, continue or stop the tracking of sessions, as `policy` needs it.

        `under_way` are the unfinished requests, oldest first.
        """
        if not policy.needs_sessions:
            self.sessions = None
            for pending in under_way:
                pending.tracked = None
        elif self.sessions is None:
            settings = self._settings
            # Each of these requests may have a session of its own, which cannot be forgotten.
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
        """Find or create the session of an arriving request."""
        if self.sessions is not None:
            pending.tracked = self.sessions.arrived(pending.arrival, *_prompt(pending.arrival))

    def look(self, pending: Pending) -> None:
        """Find the session of a request for a dry run, without changing any state."""
        if self.sessions is not None:
            pending.tracked = self.sessions.look(pending.arrival, *_prompt(pending.arrival))

    def view(self, pending: Pending, rows: Rows, hits: Ints, held: Ints) -> SessionView | None:
        """Return the session data that a decision reads, or None while sessions are not tracked.

        `hits` are the prompt tokens cached on each worker's GPU, and `held` those cached in any
        tier of the worker.
        """
        if self.sessions is None or pending.tracked is None:
            return None
        chain = pending.arrival.chains[rows.block_sizes[0]]
        return SessionView(self.sessions, pending.tracked, rows, hits, held, self._columns, chain)

    def wanted_tokens(self, slot: int) -> float:
        """Return the KV tokens at a worker that sessions will probably use again.

        Return NaN while sessions are not tracked.
        """
        if self.sessions is None:
            return float("nan")
        sets = self.sessions.sets
        return sets.tokens_at(slot) + float(self.sessions.unowned.wanted_tokens[slot])

    def dispatched(self, pending: Pending, slot: int) -> None:
        """Record that a request was sent to the worker in `slot`, which now caches its session."""
        if self.sessions is None or (tracked := pending.tracked) is None:
            return
        if pending.standing == "warm" and not tracked.private_before:
            self.sessions.unowned.known(slot, tracked.prompt_tokens - tracked.trunk_tokens)
        self.sessions.dispatched(tracked, slot)

    def held(self, pending: Pending) -> None:
        """Record that a request must wait at the router.

        Unless the cache of the request's session is warm, the cache counts as lost from now on.
        """
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
        """Record the end of a request. `output_tokens` is the length of the answer, or None if the
        answer was not completed. `refused` is True if the worker refused the request. A refused
        request's session has no cache at the worker, because the prompt may exceed the worker's
        memory.
        """
        tracked, pending.tracked = pending.tracked, None
        if self.sessions is None or tracked is None:
            return
        if refused:
            self.sessions.cache_lost(tracked)
        self.sessions.ended(tracked, output_tokens, now_s)

    def lost(self, worker: Worker | None) -> None:
        """Record that a worker lost its cache, and with it the caches of all sessions there.

        Do nothing if `worker` is None.
        """
        if self.sessions is not None and worker is not None:
            self.sessions.worker_lost(worker.slot)
            self._looked_at.pop(worker.worker_id, None)

    def tick(self, now_s: float) -> None:
        """Update the data that changes with time, such as each idle session's chance to return.

        The core calls this method regularly.
        """
        if self.sessions is not None:
            self._look_for_unowned(self.sessions, now_s)
            self.sessions.refresh(now_s)

    def _look_for_unowned(self, sessions: Sessions, now_s: float) -> None:
        """Estimate how many tokens in each worker's cache belong to no session that this router
        knows. Such tokens come from other routers, or from the router that ran before this one.
        Each worker is examined once its cache is known, or once a replay, a snapshot or a peer's
        copy has listed a part of it. In the second case the worker is examined again when its whole
        cache is known.
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
            # If the cache is not exactly known, this router saw the storing of all other blocks.
            blocks = kv.resident_blocks if kv.exact else kv.told_blocks
            if kv.exact or is_told:
                held, own = blocks * worker.facts.block_size, sessions.sets.tokens_at(worker.slot)
                sessions.unowned.found(worker.slot, held - own, now_s)


def _prompt(arrival: Arrival) -> tuple[Hashes, int]:
    """Return the chain hashes of a request's prompt, and the block size in tokens that they use.

    A request has a chain for each block size of its workers. The smallest block size is used,
    because it shows most exactly where the prompts of two sessions differ.
    """
    if not arrival.chains:  # no worker serves it
        return np.empty(0, dtype=np.uint64), 1
    size = min(arrival.chains)
    return arrival.chains[size], size
