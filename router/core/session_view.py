"""What one decision is told of sessions: the request's own, and the working sets of all others."""

from __future__ import annotations

import numpy as np

from policies.contract import Bools, Floats, Hashes, Ints, Standing
from router.core.columns import WorkerColumns
from router.core.eligible import Rows
from router.estimators.sessions import Sessions, Visit


class SessionView:
    """Lifetime: one decision."""

    def __init__(
        self,
        sessions: Sessions,
        visit: Visit,
        rows: Rows,
        hits: Ints,
        columns: WorkerColumns,
        chain: Hashes,
    ) -> None:
        self._hits, self._chain = hits, chain
        self.trunk_tokens = visit.trunk_tokens
        self._sessions, self._visit = sessions, visit
        self._slots, self._columns = rows.slots, columns
        self._own_slot, self._own_tokens, self._own_work = sessions.own(visit)
        self._own_row = self._row_of(self._own_slot)
        self.home_id = int(columns.worker_id[self._own_slot]) if self._own_slot >= 0 else -1
        self.standing = self._standing(rows, hits)
        self.return_chance = sessions.return_chance(visit, rows.slots)

    def _standing(self, rows: Rows, hits: Ints) -> Standing:
        visit, best = self._visit, int(hits.argmax())
        hit = int(hits[best])
        if visit.private_before:
            if hit >= visit.trunk_tokens + visit.private_before / 2:
                return "warm"
            # Where events were lost, the hits are a lower bound: it is believed to be at home.
            known = self._own_row is None or not self._columns.hits_unknown[self._own_slot]
            return "cold" if known else "warm"
        # Not seen by this router, but perhaps by one before it: what one worker alone holds of a
        # prompt is nobody's trunk. Half of the prompt beyond what others hold, too, is a cache.
        shared = visit.trunk_tokens
        if hit > shared:
            others = hits.copy()
            others[best] = 0
            shared = max(int(others.max()), shared)
        private = visit.prompt_tokens - shared
        if hit > shared and 2 * (hit - shared) >= private:
            self.home_id = rows.worker_ids[best]
            return "warm"
        return "new"

    def working_set_tokens(self) -> Floats:
        """float64[rows], without the session of this request."""
        sets = self._sessions.sets
        tokens: Floats = sets.private_tokens[self._slots] + sets.trunk_tokens[self._slots]
        tokens += self._sessions.strangers.wanted_tokens[self._slots]
        if self._own_row is not None:
            tokens[self._own_row] -= self._own_tokens
        # Rounding may leave a sum a hair below nothing.
        return np.maximum(tokens, 0.0, out=tokens)

    def working_set_s(self) -> Floats:
        """float64[rows], without the session of this request."""
        speeds = self._columns.prefill_tokens_per_s[self._slots]
        # Of strangers it is not known how deep in a context they lie: at least linear work.
        work = self._sessions.sets.cold_work + self._sessions.strangers.wanted_tokens
        seconds: Floats = work[self._slots] / speeds
        if (row := self._own_row) is not None:
            seconds[row] -= self._own_work / speeds[row]
        return np.maximum(seconds, 0.0, out=seconds)

    def holds_trunk(self) -> Bools:
        """bool[rows]: where another session with the same trunk is at home."""
        sets, visit = self._sessions.sets, self._visit
        holding = sets.holding(visit.trunk)[self._slots]
        row = self._own_row
        if row is None or not holding[row] or not self._sessions.has_trunk(visit):
            return holding
        if sets.sessions_with(visit.trunk, self._own_slot) > 1:
            return holding
        holding = holding.copy()
        holding[row] = False
        return holding

    def trunk(self) -> tuple[int, int]:
        """(Tokens of the trunk, how many more of the rows should hold it; 0 or less: enough do)."""
        trunk = self._sessions.trunks.of(self._chain)
        if trunk is None:
            return 0, 0
        copies = int(np.count_nonzero(self._hits >= trunk.tokens))
        return trunk.tokens, min(trunk.wanted_copies, len(self._hits)) - copies

    def cycle_s(self) -> float:
        """Seconds of a turn whose cache is warm."""
        return self._sessions.cycle.seconds(self._slots)

    def _row_of(self, slot: int) -> int | None:
        """The row of a worker slot; None: it is not among them."""
        slots = self._slots
        if isinstance(slots, slice):
            return slot - slots.start if slots.start <= slot < slots.stop else None
        rows = np.flatnonzero(slots == slot)
        return int(rows[0]) if len(rows) else None
