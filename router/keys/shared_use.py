"""What keys use at all replicas together: each tells its own totals, and takes off the others'.

Totals and not differences, so that a message lost or told twice changes nothing: the next one
makes it good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.keys.allowance import Allowance


class Use(NamedTuple):
    """Of one key, since its replica began: its digest, totals, and requests in flight now."""

    key: str
    requests: int
    tokens: int
    inflight: int


_KEYS = 100_000  # of one peer, remembered


class SharedUse:
    """Lifetime: process. `allowances` gives those there are by the digests of their keys."""

    def __init__(self, allowances: Callable[[], Mapping[str, Allowance]]) -> None:
        self._allowances = allowances
        self._touched: set[str] = set()
        self._told: dict[str, dict[str, Use]] = {}  # by peer and key, the latest

    def touched(self, key: str) -> None:
        """A request of ours used some of this key's."""
        self._touched.add(key)

    def changed(self) -> list[Use]:
        """What we used of each key, of those where that changed since this was asked."""
        touched, self._touched = self._touched, set()
        known = self._allowances()
        return [_use(key, known[key]) for key in sorted(touched) if key in known]

    def all(self) -> list[Use]:
        """What we used of each key of which we used anything."""
        self._touched.clear()
        uses = [_use(key, allowance) for key, allowance in self._allowances().items()]
        return [use for use in uses if use.requests or use.inflight]

    def heard(self, peer: str, uses: list[Use], again: bool, now_s: float) -> None:
        """A peer told what it used. `again`: all there ever was, to whoever knows nothing of it;
        what was used before we knew of the peer is not taken off here.
        """
        told = self._told.setdefault(peer, {})
        allowances = self._allowances()
        for use in uses:
            before = told.get(use.key)
            if before is None:
                if len(told) >= _KEYS:
                    continue
                before = use._replace(inflight=0) if again else Use(use.key, 0, 0, 0)
            told[use.key] = use
            allowance = allowances.get(use.key)
            if allowance is not None:
                requests, tokens = use.requests - before.requests, use.tokens - before.tokens
                allowance.taken_elsewhere(now_s, requests, tokens, use.inflight - before.inflight)

    def gone(self, peer: str, now_s: float) -> None:
        """A peer is no more, nor are its requests."""
        allowances = self._allowances()
        for use in self._told.pop(peer, {}).values():
            allowance = allowances.get(use.key)
            if allowance is not None:
                allowance.taken_elsewhere(now_s, 0, 0, -use.inflight)


def _use(key: str, allowance: Allowance) -> Use:
    return Use(key, allowance.used_requests, allowance.used_tokens, allowance.inflight)
