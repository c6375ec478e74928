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
        self._own = sessions.own(visit)
        self.home_id = int(columns.worker_id[self._own[0]]) if self._own[0] >= 0 else -1
        self.standing = self._standing(rows, hits)

    def _standing(self, rows: Rows, hits: Ints) -> Standing:
        visit = self._visit
        if visit.known:
            wanted = visit.trunk_tokens + visit.private_before / 2
            return "warm" if int(hits.max()) >= wanted else "cold"
        # Not seen by this router, but perhaps by one before it: what one worker alone holds of a
        # prompt is nobody's trunk. Half of the prompt beyond what others hold, too, is a cache.
        best = int(hits.argmax())
        others = np.delete(hits, best)
        shared = max(int(others.max(initial=0)), visit.trunk_tokens)
        private = visit.prompt_tokens - shared
        if int(hits[best]) > shared and 2 * (int(hits[best]) - shared) >= private:
            self.home_id = rows.worker_ids[best]
            return "warm"
        return "new"

    def working_set_tokens(self) -> Floats:
        """float64[rows], without the session of this request."""
        sets = self._sessions.sets
        tokens = sets.private_tokens[self._slots] + sets.trunk_tokens[self._slots]
        return self._without(tokens, self._own[1])

    def working_set_s(self) -> Floats:
        """float64[rows], without the session of this request."""
        work = self._without(self._sessions.sets.cold_work[self._slots].copy(), self._own[2])
        seconds: Floats = work / self._columns.prefill_tokens_per_s[self._slots]
        return seconds

    def holds_trunk(self) -> Bools:
        """bool[rows]: where another session with the same trunk is at home."""
        sets, visit = self._sessions.sets, self._visit
        holding = sets.holding(visit.trunk)
        slot = self._own[0]
        if slot >= 0 and holding[slot] and sets.sessions_with(visit.trunk, slot) == 1:
            holding[slot] = not self._sessions.has_trunk(visit)
        return holding[self._slots]

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

    def _without(self, sums: Floats, own: float) -> Floats:
        slot = self._own[0]
        if slot >= 0:
            sums[self._columns.worker_id[self._slots] == self._columns.worker_id[slot]] -= own
        # Rounding may leave a sum a hair below nothing.
        return np.maximum(sums, 0.0, out=sums)
