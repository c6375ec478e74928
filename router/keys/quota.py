"""Counts what each API key has left of its quota, at this router and at all replicas together.

Header names and the form of durations are those of OpenAI's API ("Rate limits", Headers, 2024),
which its clients know. Replicas exchange totals and not differences, so that a lost or repeated
message is corrected by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router.keys.key_file import KeyTerms

_ROUNDING = 1e-9  # share of the burst that sums of floats may lack


class Bucket:
    """A token bucket. Lifetime: process.

    Each call passes the time in seconds, which never decreases. The bucket may go below zero by a
    cost that exceeds the whole burst, which could never pass otherwise, or by a cost that is known
    only afterwards. The next caller waits until it is above zero again.
    """

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._at_s = now_s

    def wait_s(self, now_s: float, cost: float) -> float:
        """Return for how many seconds a request of `cost` must wait if no other is admitted before
        it; 0 means that it may pass now.
        """
        self._fill(now_s)
        missing = min(cost, self.burst) - self._level
        return missing / self._rate_per_s if missing > self.burst * _ROUNDING else 0.0

    def take(self, now_s: float, cost: float) -> None:
        """Take `cost` from the bucket; a negative cost gives it back."""
        self._fill(now_s)
        self._level = min(self._level - cost, self.burst)

    def left(self, now_s: float) -> float:
        """Return the largest cost that may pass now; 0 while the bucket is below zero."""
        self._fill(now_s)
        return max(self._level, 0.0)

    def full_in_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full again."""
        self._fill(now_s)
        return (self.burst - self._level) / self._rate_per_s

    def change(self, now_s: float, rate_per_s: float, burst: float) -> None:
        """Set another rate and burst; what was taken before stays taken."""
        self._fill(now_s)
        self._level += burst - self.burst
        self._rate_per_s, self.burst = rate_per_s, burst

    def _fill(self, now_s: float) -> None:
        if now_s > self._at_s:
            grown = self._level + (now_s - self._at_s) * self._rate_per_s
            self._level = min(grown, self.burst)
            self._at_s = now_s


_FIRST_GUESS_S = 1.0  # how long a request takes, before one has ended
_SMOOTHING = 0.2  # weight of the latest request's time


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The reason why a request is over its key's quota, and when the next one may pass. Lifetime:
    request.
    """

    what: str  # for the client
    retry_after_s: float


class Allowance:
    """The usage and the remaining quota of one API key. Lifetime: as long as the file has the
    key.
    """

    def __init__(self, terms: KeyTerms, now_s: float) -> None:
        self._terms = terms
        self._requests = _bucket(None, terms.requests_per_s, terms.requests_burst, now_s)
        self._tokens = _bucket(None, terms.tokens_per_s, terms.tokens_burst, now_s)
        self._inflight = 0
        self._inflight_elsewhere = 0  # at other replicas
        self.used_requests = self.used_tokens = 0  # here, since it began
        self.on_use: Callable[[], None] = lambda: None  # called at each change of these
        self._request_s = _FIRST_GUESS_S

    @property
    def inflight(self) -> int:
        """The number of this router's requests with the key that have begun and not ended."""
        return self._inflight

    def change(self, terms: KeyTerms, now_s: float) -> None:
        """Set other terms of the key; its usage so far still counts."""
        self._terms = terms
        requests, tokens = terms.requests_per_s, terms.tokens_per_s
        self._requests = _bucket(self._requests, requests, terms.requests_burst, now_s)
        self._tokens = _bucket(self._tokens, tokens, terms.tokens_burst, now_s)

    def begin(self, now_s: float) -> Exhausted | None:
        """Admit a request before its size is known, or return why it is not admitted. After an
        admission, `end` must be called once.
        """
        most = self._terms.inflight
        inflight = self._inflight + self._inflight_elsewhere
        if most is not None and inflight >= most:
            # One of them ends next after about so long, if they are spread evenly.
            wait_s = self._request_s / inflight
            return Exhausted(f"this key may have {most} requests at a time", wait_s)
        tokens_s = 0.0 if self._tokens is None else self._tokens.wait_s(now_s, 1.0)
        requests_s = 0.0 if self._requests is None else self._requests.wait_s(now_s, 1.0)
        if requests_s:
            rate = f"{self._terms.requests_per_s:g} requests a second"
            return Exhausted(f"this key may send {rate}", max(requests_s, tokens_s))
        if tokens_s:  # whatever its size, it is too much: its body need not be read
            return Exhausted(self._tokens_rate(), tokens_s)
        if self._requests is not None:
            self._requests.take(now_s, 1.0)
        self._inflight += 1
        self.used_requests += 1
        self.on_use()
        return None

    def spend(self, now_s: float, tokens: int) -> Exhausted | None:
        """Take the tokens of a request's prompt from the quota, or return why they may not be
        taken.
        """
        if self._tokens is None:
            return None
        if wait_s := self._tokens.wait_s(now_s, tokens):
            if self._requests is not None:
                wait_s = max(wait_s, self._requests.wait_s(now_s, 1.0))
            return Exhausted(self._tokens_rate(), wait_s)
        self.settle(now_s, tokens)
        return None

    def settle(self, now_s: float, tokens: int) -> None:
        """Take the tokens that a request used beyond those taken before; a negative number gives
        tokens back.
        """
        if self._tokens is not None:
            self._tokens.take(now_s, tokens)
            self.used_tokens += tokens
            self.on_use()

    def taken_elsewhere(self, now_s: float, requests: int, tokens: int, inflight: int) -> None:
        """Take what another replica admitted since its last message: requests, tokens, and the
        change in its number of running requests.
        """
        if self._requests is not None:
            self._requests.take(now_s, requests)
        if self._tokens is not None:
            self._tokens.take(now_s, tokens)
        self._inflight_elsewhere = max(self._inflight_elsewhere + inflight, 0)

    def end(self, took_s: float) -> None:
        """End a request that `begin` admitted, whatever its outcome was."""
        assert self._inflight > 0, "a request of this key ended twice"
        self._inflight -= 1
        self.on_use()
        self._request_s += _SMOOTHING * (max(took_s, 0.0) - self._request_s)

    def headers(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return the headers `x-ratelimit-...`: the limits, what is left of them, and when they are
        full again.
        """
        shown: list[tuple[str, str]] = []
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                shown += (
                    (f"x-ratelimit-limit-{what}", f"{int(bucket.burst)}"),
                    (f"x-ratelimit-remaining-{what}", f"{int(bucket.left(now_s))}"),
                    (f"x-ratelimit-reset-{what}", duration(bucket.full_in_s(now_s))),
                )
        return tuple(shown)

    def _tokens_rate(self) -> str:
        return f"this key may use {self._terms.tokens_per_s:g} tokens a second"


def duration(seconds: float) -> str:
    """Return a duration in the form of OpenAI's headers: `6m0s`, `1.5s`, `20ms`, rounded up."""
    milliseconds = -int(-max(seconds, 0.0) * 1e3 // 1)
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{rest / 1e3:g}s"
    if hours:
        return f"{hours}h{minutes}m{shown}"
    return f"{minutes}m{shown}" if minutes else shown


def _bucket(old: Bucket | None, rate: float | None, burst: float, now_s: float) -> Bucket | None:
    if rate is None:
        return None
    if old is None:
        return Bucket(rate, burst, now_s)
    old.change(now_s, rate, burst)
    return old


class Grant:
    """The share of its key's quota that one request uses. Lifetime: request; `end` must be called
    in any case.

    Times are seconds on the clock of the allowance.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._began_s: float | None = None  # while it counts as one in flight
        self._taken_tokens = 0  # for its prompt

    def begin(self, now_s: float) -> Exhausted | None:
        """Admit the request before its size is known. Return None if it may pass, otherwise why
        not.
        """
        exhausted = self._allowance.begin(now_s)
        if exhausted is None:
            self._began_s = now_s
        return exhausted

    def spend(self, now_s: float, prompt_tokens: int) -> Exhausted | None:
        """Take the tokens of the request's prompt. Return None if they were taken, otherwise why
        not.
        """
        exhausted = self._allowance.spend(now_s, prompt_tokens)
        if exhausted is None:
            self._taken_tokens = prompt_tokens
        return exhausted

    def used(self, now_s: float, prompt_tokens: int, answer_tokens: int) -> None:
        """Correct the tokens that were taken to those that the answered request really used."""
        self._allowance.settle(now_s, prompt_tokens + answer_tokens - self._taken_tokens)
        self._taken_tokens = prompt_tokens

    def end(self, now_s: float) -> None:
        """End the request. Further calls do nothing."""
        if self._began_s is not None:
            self._allowance.end(now_s - self._began_s)
            self._began_s = None

    def headers(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """Return the headers that tell the client what its key has left."""
        return self._allowance.headers(now_s)


class KeyUsage(NamedTuple):
    """The usage of one key at one replica since that replica started: the key's digest, totals, and
    running requests.
    """

    key: str
    requests: int
    tokens: int
    inflight: int


_KEYS = 100_000  # of one peer, remembered


class SharedUse:
    """Exchanges the usage of API keys with other replicas. Lifetime: process.

    `allowances` returns the current allowances by the digests of their keys.
    """

    def __init__(self, allowances: Callable[[], Mapping[str, Allowance]]) -> None:
        self._allowances = allowances
        self._touched: set[str] = set()
        self._reported: dict[str, dict[str, KeyUsage]] = {}  # by peer and key, the latest

    def touched(self, key: str) -> None:
        """Note that a request of this router used the key with this digest."""
        self._touched.add(key)

    def changed(self) -> list[KeyUsage]:
        """Return this router's usage of each key whose usage changed since the last call."""
        touched, self._touched = self._touched, set()
        known = self._allowances()
        return [_use(key, known[key]) for key in sorted(touched) if key in known]

    def all(self) -> list[KeyUsage]:
        """Return this router's usage of each key that has been used."""
        self._touched.clear()
        uses = [_use(key, allowance) for key, allowance in self._allowances().items()]
        return [use for use in uses if use.requests or use.inflight]

    def on_peer_usage(self, peer: str, uses: list[KeyUsage], again: bool, now_s: float) -> None:
        """Take the usage that a peer router reported from the keys' allowances.

        `again` True means that the peer repeated all its totals for a router that knew nothing of
        it; then usage from before this router knew the peer is not taken.
        """
        told = self._reported.setdefault(peer, {})
        allowances = self._allowances()
        for use in uses:
            before = told.get(use.key)
            if before is None:
                if len(told) >= _KEYS:
                    continue
                before = use._replace(inflight=0) if again else KeyUsage(use.key, 0, 0, 0)
            told[use.key] = use
            allowance = allowances.get(use.key)
            if allowance is not None:
                requests, tokens = use.requests - before.requests, use.tokens - before.tokens
                allowance.taken_elsewhere(now_s, requests, tokens, use.inflight - before.inflight)

    def drop_peer(self, peer: str, now_s: float) -> None:
        """Stop counting the running requests of a peer router that is gone."""
        allowances = self._allowances()
        for use in self._reported.pop(peer, {}).values():
            allowance = allowances.get(use.key)
            if allowance is not None:
                allowance.taken_elsewhere(now_s, 0, 0, -use.inflight)


def _use(key: str, allowance: Allowance) -> KeyUsage:
    return KeyUsage(key, allowance.used_requests, allowance.used_tokens, allowance.inflight)
