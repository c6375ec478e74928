"""Learns from past sessions how likely an idle session is to send another request, and when.

The model is a discrete hazard: idle time is divided into bins, and each bin has a chance of return.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from policies.contract import Floats, Ints

_FIRST_S = 0.25
_PER_OCTAVE = 2
_BINS = 25
_PRIOR_RISK, _PRIOR_RETURNS = 2.0, 0.5  # of each bin: three of four are still away after it
_RISK_MAX = 20_000.0  # beyond it the past counts half: traffic changes

# Where bins begin, and the last one's end. Rounded: a power's last digit is the machine's own.
_EDGES = (0.0, *(round(_FIRST_S * 2.0 ** (n / _PER_OCTAVE), 6) for n in range(_BINS)))
EDGES_S: Floats = np.array(_EDGES)


def bins_of(idle_s: Floats) -> Ints:
    """Return the number of the bin into which each idle time (in seconds) falls, int64.

    The last bin has no upper end.
    """
    bins: Ints = EDGES_S.searchsorted(idle_s, side="right") - 1
    return bins


class ReturnHazard:
    """Estimates the chance that an idle session sends another request, learned from past sessions.
    Idle time is divided into bins. For each bin, the class counts the idle periods that reached the
    bin and those that ended in it. The caller must report each period once per bin. `renew`
    computes the chances from the counts in advance, so that a decision only looks them up.
    Lifetime: process.
    """

    def __init__(self) -> None:
        self._risk = np.full(_BINS + 1, _PRIOR_RISK)
        self._returns = np.full(_BINS + 1, _PRIOR_RETURNS)
        self.renew()

    def entered(self, before: Ints, now: Ints) -> None:
        """Count sessions' idle periods that still last and have reached new bins of idle time.
        `before` has the last bin in which each period was counted, or -1 if it was not counted yet.
        `now` has the bin that each period has reached.
        """
        starts = np.bincount(before + 1, minlength=_BINS + 2)
        ends = np.bincount(now + 1, minlength=_BINS + 2)
        self._risk += np.cumsum(starts - ends)[: _BINS + 1]

    def returned(self, before: int, idle_s: float) -> None:
        """Count a session's idle period that ended because the session sent a request. `before` is
        the last bin of idle time in which the period was counted, or -1 if it was not counted yet.
        `idle_s` is the length of the period in seconds.
        """
        last = bisect_right(_EDGES, idle_s) - 1
        if last > before:
            self._risk[before + 1 : last + 1] += 1.0
        self._returns[last] += 1.0

    def renew(self) -> None:
        """Compute the chances of return from the counts of idle periods.

        If the counts are large, halve them, so that old periods lose weight.
        """
        if self._risk[0] > _RISK_MAX:
            self._risk *= 0.5
            self._returns *= 0.5
        stay = 1.0 - np.minimum(self._returns / self._risk, 0.999)
        # Log of the share still away at each edge; native code reads it.
        self.away: Floats = np.concatenate(([0.0], np.cumsum(np.log(stay[:_BINS]))))
        self._away_at: list[float] = self.away.tolist()

    def within(self, span_s: Floats, idle_s: Floats) -> Floats:
        """Return each idle session's chance, 0..1, to send a request in the next `span_s` seconds.
        `idle_s` is the number of seconds that each session has been idle so far.
        """
        then = np.interp(idle_s + span_s, EDGES_S, self.away)
        chance: Floats = -np.expm1(then - np.interp(idle_s, EDGES_S, self.away))
        # Rounded: numpy's exponentials differ in the last bit from one processor to another.
        return np.round(chance, 9)

    def soon(self, span_s: float) -> float:
        """Return a newly idle session's chance, 0..1, to send a request within `span_s` seconds."""
        bin_ = bisect_right(_EDGES, span_s) - 1
        if bin_ >= _BINS:
            away = self._away_at[_BINS]
        else:
            start_s, before = _EDGES[bin_], self._away_at[bin_]
            part = (span_s - start_s) / (_EDGES[bin_ + 1] - start_s)
            away = before + part * (self._away_at[bin_ + 1] - before)
        return round(-math.expm1(away), 9)


_HORIZON_S = 60.0  # within this time a return counts, for blocks of unknown cost


class UnownedBlocks:
    """Counts the tokens in each worker's cache that belong to no session known to this router.

    `wanted_tokens` is the count times the chance that these unknown sessions return.
    Lifetime: process.
    """

    def __init__(self, slots: int) -> None:
        self._tokens = np.zeros(slots)
        self._found_s = np.zeros(slots)
        # By the chance of a return, as of `weigh`; native code reads it where it lies.
        self.wanted_tokens: Floats = np.zeros(slots)

    def found(self, slot: int, tokens: float, now_s: float) -> None:
        """Set how many tokens of unknown sessions a worker's cache has at the time `now_s`."""
        self._tokens[slot] = self.wanted_tokens[slot] = max(tokens, 0.0)
        self._found_s[slot] = now_s

    def known(self, slot: int, tokens: float) -> None:
        """Subtract tokens from a worker's count, because the session that has them is known now."""
        left = max(float(self._tokens[slot]) - tokens, 0.0)
        if self._tokens[slot] > 0.0:
            self.wanted_tokens[slot] *= left / self._tokens[slot]
        self._tokens[slot] = left

    def clear(self, slot: int) -> None:
        """Set a worker's count of unknown sessions' tokens to 0, because its cache is lost."""
        self._tokens[slot] = self.wanted_tokens[slot] = 0.0

    def weigh(self, hazard: ReturnHazard, now_s: float) -> None:
        """Compute `wanted_tokens` again: the counted tokens times their sessions' chance to return.

        The chance is that of a return within the next minute, for sessions that have been idle
        since the tokens were found.
        """
        if self._tokens.any():
            away_s = np.maximum(now_s - self._found_s, 0.0)
            chance = hazard.within(np.full(len(away_s), _HORIZON_S), away_s)
            np.multiply(self._tokens, chance, out=self.wanted_tokens)
