"""A token bucket: so much a second, and so much at once after a pause."""

from __future__ import annotations

_ROUNDING = 1e-9  # of the burst: what sums of floats may lack


class Bucket:
    """Lifetime: process. Time comes in with each question and never runs backwards.

    It may be overdrawn: by what costs more than the whole burst and could else never pass, and by
    what is known only afterwards. Whoever comes next waits until that is made good.
    """

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._at_s = now_s

    def wait_s(self, now_s: float, cost: float) -> float:
        """Seconds until something of `cost` may pass, if nothing else does before; 0: now."""
        self._fill(now_s)
        missing = min(cost, self.burst) - self._level
        return missing / self._rate_per_s if missing > self.burst * _ROUNDING else 0.0

    def take(self, now_s: float, cost: float) -> None:
        """Let something pass; below 0 gives back."""
        self._fill(now_s)
        self._level = min(self._level - cost, self.burst)

    def left(self, now_s: float) -> float:
        """What may pass at once; 0 while it is overdrawn."""
        self._fill(now_s)
        return max(self._level, 0.0)

    def full_in_s(self, now_s: float) -> float:
        """Seconds until it is as at the beginning."""
        self._fill(now_s)
        return (self.burst - self._level) / self._rate_per_s

    def change(self, now_s: float, rate_per_s: float, burst: float) -> None:
        """Go on with another rate and burst; what was taken stays taken."""
        self._fill(now_s)
        self._level += burst - self.burst
        self._rate_per_s, self.burst = rate_per_s, burst

    def _fill(self, now_s: float) -> None:
        if now_s > self._at_s:
            grown = self._level + (now_s - self._at_s) * self._rate_per_s
            self._level = min(grown, self.burst)
            self._at_s = now_s
