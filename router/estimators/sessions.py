"""Sessions: who a request belongs to, where its cache is at home, and whether it comes back.

A session is known by its id, or else by its prompt: it goes on from what only one session sent
before. Source of the idea to count the working set of live sessions, and of the horizon: the
five-minute rule (Gray and Putzolu, 1987) on KV blocks. Holding F of a worker's C tokens for T
seconds costs T * F / C of a worker that memory limits, and saves p * w seconds of prefill, so a
session is worth its memory while it is expected back within T = w * C / F.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from kvkernels import PrefixOwners
from policies.contract import Floats, Hashes, Ints
from policies.facts import Arrival
from router.core.columns import WorkerColumns
from router.estimators.cycle import Cycle
from router.estimators.pool_pace import PaceKeeper
from router.estimators.return_hazard import ReturnHazard, bins_of
from router.estimators.session_rows import SessionRows
from router.estimators.trunks import Trunks
from router.estimators.working_sets import WorkingSets

_LEAST_CHANCE = 0.02  # of a return within its horizon: below it a session is over
_IDLE_S = 900.0  # longest time to remember one that does not return
_HORIZON_S = 60.0  # where the worker's memory is unknown
_REFRESH_S = 0.1  # at least; longer with very many sessions, so that it stays a small share of time
_ROWS_PER_S = 100_000.0


@dataclass(slots=True)
class Visit:
    """One request of a session. Lifetime: request."""

    row: int  # of its session
    serial: int  # of its session: rows are reused
    known: bool  # its session was seen before
    trunk: int  # name of the trunk, 0: none
    trunk_tokens: int
    prompt_tokens: int
    private_before: float  # private tokens of its session until now


class Sessions:
    """Lifetime: process; bounded by `limit` sessions and `entries` blocks."""

    def __init__(self, columns: WorkerColumns, slots: int, limit: int, entries: int) -> None:
        self._columns = columns
        self._owners = PrefixOwners(entries)
        self._rows = SessionRows(limit)
        self._refreshed_s = float("-inf")
        self.sets = WorkingSets(slots)
        self.hazard = ReturnHazard()
        self.cycle = Cycle(columns)
        self.trunks = Trunks()
        self._pace = PaceKeeper(columns)

    def __len__(self) -> int:
        return len(self._rows)

    # --- requests ---------------------------------------------------------------------------

    def arrived(self, fact: Arrival, chain: Hashes, block_size: int, now_s: float) -> Visit:
        """A request came in: whose it is, and how much of its prompt others use, too."""
        rows, key = self._rows, self._key(fact, chain)
        row = rows.find(key)
        known = row >= 0
        if row < 0:
            if rows.full:
                self._make_room()
            row = rows.take(key)
        elif rows.inflight[row] == 0 and rows.home[row] >= 0:
            self._back(row, now_s)
        rows.inflight[row] += 1
        serial = int(rows.serial[row])
        rows.blocks[row] = len(chain)
        known_blocks = self._owners.owner(chain)[1]
        blocks = self._owners.claim(chain, serial)
        self.trunks.pool(self._pace.at(now_s, self.cycle.output_tokens), now_s)
        self.trunks.arrival(chain, block_size, fact.prompt_tokens, blocks, known_blocks, now_s)
        return Visit(
            row=row,
            serial=serial,
            known=known,
            trunk=int(chain[blocks - 1]) if blocks else 0,
            trunk_tokens=min(blocks * block_size, fact.prompt_tokens),
            prompt_tokens=fact.prompt_tokens,
            private_before=float(rows.private_tokens[row]),
        )

    def dispatched(self, visit: Visit, slot: int) -> None:
        """It was sent to the worker in `slot`: its session is at home there from now on."""
        rows, row = self._rows, visit.row
        self._go(row)
        private = max(visit.prompt_tokens - visit.trunk_tokens, 0)
        rows.private_tokens[row] = private
        rows.cold_work[row] = self._columns.attention.work(private, visit.trunk_tokens)
        rows.trunk[row], rows.trunk_tokens[row] = visit.trunk, visit.trunk_tokens
        rows.home[row] = slot
        rows.weight[row] = 1.0
        self.sets.enter(slot, visit.trunk, visit.trunk_tokens)
        self.sets.shift(slot, private, float(rows.cold_work[row]))

    def held(self, visit: Visit) -> None:
        """It must wait because its cache is lost: what is left of it is nobody's any more."""
        if self._rows.home[visit.row] >= 0:
            self._go(visit.row)

    def ended(self, visit: Visit, output_tokens: int | None, now_s: float) -> None:
        """Its answer is complete (with `output_tokens`), or it came to nothing (None)."""
        rows, row = self._rows, visit.row
        if rows.serial[row] != visit.serial:
            return
        rows.inflight[row] -= 1
        if output_tokens and rows.home[row] >= 0:
            self.cycle.answered(output_tokens)
            rows.private_tokens[row] += output_tokens
            more = self._columns.attention.work(rows.private_tokens[row], rows.trunk_tokens[row])
            more -= float(rows.cold_work[row])
            rows.cold_work[row] += more
            self.sets.shift(int(rows.home[row]), output_tokens, more)
        if rows.inflight[row] == 0:
            if rows.home[row] < 0 and not visit.known:
                rows.give_back(row)  # never got anywhere
            else:
                rows.idle_s[row] = now_s
                rows.bin[row] = -1

    def worker_lost(self, slot: int) -> None:
        """A worker's cache is gone: nobody is at home there."""
        for row in self._rows.at_home(slot).tolist():
            self._go(row)

    # --- time -------------------------------------------------------------------------------

    def refresh(self, now_s: float) -> None:
        """Weigh every idle session anew; forget those that are over."""
        if now_s - self._refreshed_s < max(_REFRESH_S, len(self._rows) / _ROWS_PER_S):
            return
        self._refreshed_s = now_s
        self.trunks.pool(self._pace.at(now_s, self.cycle.output_tokens), now_s)
        rows = self._rows
        idle = rows.idle()
        if len(idle):
            away_s = now_s - rows.idle_s[idle]
            bins = bins_of(away_s)
            moved = bins > rows.bin[idle]
            self.hazard.entered(rows.bin[idle][moved], bins[moved])
            rows.bin[idle] = bins
            home = rows.home[idle]
            chance = self.hazard.within(self._horizon_s(idle), away_s)
            over = ((chance < _LEAST_CHANCE) & (home >= 0)) | (away_s > _IDLE_S)
            rows.weight[idle] = chance
            for row in idle[over].tolist():
                self._forget(row)
        used = rows.used
        weight = rows.weight[:used]
        self.sets.renew(
            rows.home[:used], weight * rows.private_tokens[:used], weight * rows.cold_work[:used]
        )

    def own(self, visit: Visit) -> tuple[int, float, float]:
        """(home slot or -1, tokens, linear work): what this session itself adds to the sums."""
        rows, row = self._rows, visit.row
        slot = int(rows.home[row])
        if slot < 0:
            return -1, 0.0, 0.0
        tokens, work = rows.weight[row] * rows.private_tokens[row], rows.cold_work[row]
        trunk = int(rows.trunk[row])
        if trunk and self.sets.sessions_with(trunk, slot) == 1:
            tokens += rows.trunk_tokens[row]
        return slot, float(tokens), float(rows.weight[row] * work)

    def has_trunk(self, visit: Visit) -> bool:
        """Whether the trunk that its session is at home with is that of this prompt."""
        return int(self._rows.trunk[visit.row]) == visit.trunk

    # --- inside -----------------------------------------------------------------------------

    def _key(self, fact: Arrival, chain: Hashes) -> Hashable:
        if fact.session is not None:
            return (fact.tenant, fact.model, fact.session)
        # It goes on from what its session sent before: from all of that but its last block, which
        # a chat template may end in another way. One that leaves the path earlier is another one.
        serial, depth = self._owners.owner(chain)
        row = self._rows.row_of(serial)
        return None if row < 0 or depth < self._rows.blocks[row] - 1 else self._rows.key(row)

    def _back(self, row: int, now_s: float) -> None:
        """An idle session sent a request."""
        rows, away_s = self._rows, max(now_s - float(self._rows.idle_s[row]), 0.0)
        self.hazard.returned(int(rows.bin[row]), away_s)
        self.cycle.returned(away_s)
        missing = 1.0 - float(rows.weight[row])
        self.sets.shift(
            int(rows.home[row]),
            missing * float(rows.private_tokens[row]),
            missing * float(rows.cold_work[row]),
        )
        rows.weight[row] = 1.0

    def _go(self, row: int) -> None:
        """It is at home nowhere."""
        rows = self._rows
        slot, weight = int(rows.home[row]), float(rows.weight[row])
        if slot >= 0:
            private, work = float(rows.private_tokens[row]), float(rows.cold_work[row])
            self.sets.shift(slot, -weight * private, -weight * work)
            self.sets.leave(slot, int(rows.trunk[row]), int(rows.trunk_tokens[row]))
            rows.home[row] = -1
        rows.weight[row] = 0.0

    def _forget(self, row: int) -> None:
        self._go(row)
        self._rows.give_back(row)

    def _make_room(self) -> None:
        for row in self._rows.longest_idle().tolist():
            self._forget(row)

    def _horizon_s(self, idle: Ints) -> Floats:
        rows, columns = self._rows, self._columns
        home = rows.home[idle]
        cold_s = rows.cold_work[idle] / columns.prefill_tokens_per_s[home]
        shares = np.maximum(rows.private_tokens[idle], 1.0) / columns.kv_capacity_tokens[home]
        horizon_s: Floats = np.nan_to_num(cold_s / shares, nan=_HORIZON_S, posinf=_IDLE_S)
        return horizon_s
