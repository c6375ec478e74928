"""Estimates how many requests arrive per second, and how many sessions are live."""

from __future__ import annotations

import math
from collections import OrderedDict

_TIME_CONSTANT_S = 10.0  # of the smoothed arrival rate
_SESSION_IDLE_S = 900.0  # a session unseen for longer is over
_SESSIONS_MAX = 1 << 16


class ArrivalEstimator:
    """Measures how many requests arrive per second, and counts the live sessions.

    At most 65,536 sessions are remembered. Beyond this number, the session whose last request is
    oldest is forgotten.
    Lifetime: process.
    """

    def __init__(self) -> None:
        self._rate_per_s = 0.0
        self._seen_s: float | None = None
        self._sessions: OrderedDict[tuple[str | None, str], float] = OrderedDict()

    def arrival(self, session: str | None, now_s: float, tenant: str | None = None) -> None:
        """Count an arriving request, and mark its session as live. `session` is the session's id,
        or None if the request names none. Sessions of different tenants are different, even if
        their ids are equal.
        """
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
        """Return how many requests arrive per second, smoothed exponentially over 10 s."""
        if self._seen_s is None:
            return 0.0
        return self._rate_per_s * math.exp(-max(now_s - self._seen_s, 0.0) / _TIME_CONSTANT_S)

    def live_sessions(self, now_s: float) -> int:
        """Return the number of sessions that sent a request within the last 15 minutes."""
        while self._sessions:
            named, seen_s = next(iter(self._sessions.items()))
            if now_s - seen_s <= _SESSION_IDLE_S:
                break
            del self._sessions[named]
        return len(self._sessions)
