"""Estimates the rate of arriving requests and the number of live sessions."""

from __future__ import annotations

import math
from collections import OrderedDict

_TIME_CONSTANT_S = 10.0  # of the smoothed arrival rate
_SESSION_IDLE_S = 900.0  # a session unseen for longer is over
_SESSIONS_MAX = 1 << 16


class ArrivalEstimator:
    """Measures the rate of arriving requests, and counts the live sessions.

    It remembers at most 65,536 sessions, and forgets those unseen for longest first. Lifetime:
    process.
    """

    def __init__(self) -> None:
        self._rate_per_s = 0.0
        self._seen_s: float | None = None
        self._sessions: OrderedDict[tuple[str | None, str], float] = OrderedDict()

    def arrival(self, session: str | None, now_s: float, tenant: str | None = None) -> None:
        """Count a request, and its session; equal session names of two tenants are two sessions."""
        self._rate_per_s = self.rate_per_s(now_s) + 1.0 / _TIME_CONSTANT_S
        self._seen_s = now_s
        if session is None:
            return
        named = tenant, session
        self._sessions[named] = now_s
        self._sessions.move_to_end(named)
        if len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)

    def rate_per_s(self, now_s: float) -> float:
        """Return the arrivals per second, smoothed exponentially over 10 s."""
        if self._seen_s is None:
            return 0.0
        return self._rate_per_s * math.exp(-max(now_s - self._seen_s, 0.0) / _TIME_CONSTANT_S)

    def live_sessions(self, now_s: float) -> int:
        """Return the number of sessions seen within the last 15 minutes."""
        while self._sessions:
            named, seen_s = next(iter(self._sessions.items()))
            if now_s - seen_s <= _SESSION_IDLE_S:
                break
            del self._sessions[named]
        return len(self._sessions)
