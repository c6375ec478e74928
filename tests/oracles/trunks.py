"""The plain-Python oracle of the native `Trunks`, which finds the beginnings that many prompts
share.
"""

from __future__ import annotations

import math

import numpy as np

from policies.contract import Hashes
from policies.record import record
from router.core.sessions.pool_pace import PoolPace

TRUNKS_MAX = 256  # heads kept; a head with more than 1/256 of all counts is among them
_LEAST_TOKENS = 256  # shorter heads cost too little to matter
_FADE_S = 10.0  # time constant of the counts
_FADES_MAX = 60.0  # time constants before the counts are scaled anew
_UTILIZATION = 0.8  # the share of a worker's time that the demand on its copy may take
_MEMORY_SHARE = 0.2  # of the pool's KV memory that all copies of one trunk may take


@record
class Trunk:
    """A common beginning of many prompts ("trunk"), with its figures at one moment. Lifetime: one
    decision.
    """

    last_hash: int  # chain hash of its last block
    tokens: int
    rate_per_s: float  # arrivals that begin with it; a lower bound
    share: float  # of all arrivals, 0..1
    demand: float  # seconds of work per second, without the trunk itself
    backlog_s: float  # seconds of work that its copies have not done yet
    wanted_copies: int  # workers that should hold it, at least 1


class Trunks:
    """The common beginnings ("heads") of prompts with the most arrivals. Lifetime: process; at most
    `TRUNKS_MAX` heads.

    The class is deterministic: time comes with each call and never goes back.
    """

    def __init__(self, heads: int = TRUNKS_MAX) -> None:
        self._pace = PoolPace()
        self._used = 0
        self._last_hash = [0] * heads
        self._last_at = [0] * heads  # the place of that hash in a chain
        self._row: dict[int, int] = {}  # rows by that hash, which names the whole head
        self._heads_at: dict[int, int] = {}  # how many heads end at a place
        self._ends = np.zeros(0, dtype=np.int64)  # these places, in order
        self._tokens = [0] * heads
        # New counts weigh more instead of old ones fading; divided by `_scaled` they are present
        # values.
        self._count = [0.0] * heads
        self._error = [0.0] * heads  # the part of the count that may be a replaced head's
        self._work_s = [0.0] * heads
        self._backlog_s = [0.0] * heads  # at the time `_drained_at_s`
        self._drained_at_s = [0.0] * heads
        self._arrivals = 0.0
        self._since_s: float | None = None  # when an arrival counted 1
        self._now_s = 0.0  # the latest time given
        self.replaced = 0  # heads that gave way to another

    def pool(
        self,
        workers: int,
        prefill_tokens_per_s: float,
        answer_s: float,
        capacity_tokens: float,
        now_s: float,
    ) -> None:
        """Set the present capacity of the workers. Call this with each arrival, and on ticks
        between arrivals.
        """
        self._pace = PoolPace(workers, prefill_tokens_per_s, answer_s, capacity_tokens)
        self._scaled(now_s)

    def arrival(
        self,
        chain: Hashes,
        block_size: int,
        prompt_tokens: int,
        shared_blocks: int,
        known_blocks: int,
        now_s: float,
    ) -> None:
        """Count the arrival of a request.

        `shared_blocks` are the leading blocks that other sessions use, too. `known_blocks` are
        those that any earlier prompt had (`kvkernels.PrefixOwners`), so no worker needs to compute
        them again.
        """
        scale = self._scaled(now_s)
        self._arrivals += scale
        begun = self._begun_with(chain)
        tokens = shared_blocks * block_size
        if tokens >= _LEAST_TOKENS and all(self._tokens[row] != tokens for row in begun):
            begun.append(self._enter(int(chain[shared_blocks - 1]), shared_blocks, tokens, now_s))
        pace, fresh = self._pace, prompt_tokens - known_blocks * block_size
        for row in begun:
            beyond = max(min(fresh, prompt_tokens - self._tokens[row]), 1)
            work_s = beyond / pace.prefill_tokens_per_s + pace.answer_s
            backlog_s = self._backlog(row, scale, now_s)
            self._count[row] += scale
            self._work_s[row] += work_s * scale
            self._backlog_s[row] = backlog_s + work_s
            self._drained_at_s[row] = now_s

    def of(self, chain: Hashes) -> Trunk | None:
        """Return the longest known beginning of a prompt that needs more copies, else the longest
        known one, or None if there is none.
        """
        now_s = self._now_s
        scale, longest = self._scaled(now_s), None
        for row in sorted(self._begun_with(chain), key=self._tokens.__getitem__, reverse=True):
            trunk = self._trunk(row, scale, now_s)
            if trunk.wanted_copies > 1:
                return trunk
            longest = longest or trunk
        return longest

    def table(self) -> list[Trunk]:
        """Return all known beginnings with their figures at the last given time, the one with the
        greatest demand first.
        """
        scale = self._scaled(self._now_s)
        rows = [self._trunk(row, scale, self._now_s) for row in range(self._used)]
        return sorted(rows, key=lambda trunk: (-trunk.demand, -trunk.tokens, trunk.last_hash))

    def __len__(self) -> int:
        return self._used

    def _begun_with(self, chain: Hashes) -> list[int]:
        """Return the rows of the known beginnings with which the chain begins. Only the places
        where beginnings end are looked up.
        """
        ends = self._ends
        if not len(ends):
            return []
        if ends[-1] >= len(chain):
            ends = ends[: ends.searchsorted(len(chain))]
        found = self._row.keys() & chain.take(ends).tolist()
        return sorted([self._row[last_hash] for last_hash in found])

    def _enter(self, last_hash: int, blocks: int, tokens: int, now_s: float) -> int:
        """Return a row for a new beginning: an unused row, or that of the beginning with the fewest
        arrivals, whose count becomes the error.
        """
        left = None
        if self._used < len(self._count):
            row, self._used = self._used, self._used + 1
        else:
            row = self._count.index(min(self._count))
            left = self._last_at[row]
            self._row.pop(self._last_hash[row], None)
            self.replaced += 1
        self._last_hash[row], self._last_at[row], self._tokens[row] = last_hash, blocks - 1, tokens
        self._row[last_hash] = row
        self._ends_moved(left, blocks - 1)
        self._error[row] = self._count[row]
        self._work_s[row] = self._backlog_s[row] = 0.0
        self._drained_at_s[row] = now_s
        return row

    def _ends_moved(self, left: int | None, entered: int) -> None:
        """Record that one beginning no longer ends at block number `left` and that another one ends
        at `entered`.
        """
        heads, places = self._heads_at, len(self._heads_at)
        heads[entered] = heads.get(entered, 0) + 1
        moved = len(heads) != places
        if left is not None:
            heads[left] -= 1
            if not heads[left]:
                del heads[left]
                moved = True
        if moved:
            self._ends = np.array(sorted(heads), dtype=np.int64)

    def _trunk(self, row: int, scale: float, now_s: float) -> Trunk:
        recent = (self._count[row] - self._error[row]) / scale
        demand = self._work_s[row] / scale / _FADE_S
        backlog_s = self._backlog(row, scale, now_s)
        tokens = self._tokens[row]
        return Trunk(
            last_hash=self._last_hash[row],
            tokens=tokens,
            rate_per_s=recent / _FADE_S,
            share=min(recent * scale / self._arrivals, 1.0),
            demand=demand,
            backlog_s=backlog_s,
            wanted_copies=self._wanted(tokens, recent, demand, backlog_s),
        )

    def _wanted(self, tokens: int, recent: float, demand: float, backlog_s: float) -> int:
        """Return how many workers should hold a common beginning ("trunk").

        There are as many copies as keep up with the demand, and more as long as one more copy saves
        the waiting requests more time in all than one worker takes to compute the trunk: n requests
        that wait for half of a backlog B over r copies save n * B / (2 * r * (r + 1)). But there is
        no copy that is not used again before the counts fade, and no more copies than memory has
        room for.
        """
        pace = self._pace
        trunk_s = tokens / pace.prefill_tokens_per_s
        waiting = backlog_s * recent / (demand * _FADE_S) if demand else 0.0
        worth = waiting * backlog_s / (2 * trunk_s)  # r * (r + 1) of the last copy that pays
        copies = math.ceil(max(demand / _UTILIZATION, math.sqrt(worth + 0.25) - 0.5))
        room = min(_MEMORY_SHARE * pace.capacity_tokens / tokens, float(pace.workers), recent)
        return max(1, min(copies, int(room)))

    def _backlog(self, row: int, scale: float, now_s: float) -> float:
        """Return the seconds of work that are left if each of the copies wanted last did one second
        of work per second.
        """
        left_s, elapsed_s = self._backlog_s[row], now_s - self._drained_at_s[row]
        if not left_s or not elapsed_s:
            return left_s
        recent = (self._count[row] - self._error[row]) / scale
        demand = self._work_s[row] / scale / _FADE_S
        copies = self._wanted(self._tokens[row], recent, demand, left_s)
        return max(left_s - copies * elapsed_s, 0.0)

    def _scaled(self, now_s: float) -> float:
        """Return the weight of an arrival at `now_s`; if the first arrival was long ago, scale all
        counts down first.
        """
        if self._since_s is None:
            self._since_s = now_s
        self._now_s = now_s
        fades = (now_s - self._since_s) / _FADE_S
        if fades <= _FADES_MAX:
            return math.exp(fades)
        factor = math.exp(-min(fades, 700.0))
        for column in (self._count, self._error, self._work_s):
            column[:] = [count * factor for count in column]
        self._arrivals *= factor
        self._since_s = now_s
        return 1.0
