"""What one key may still use: requests and tokens a second, requests at the same time.

Header names and the form of durations are those of OpenAI's API ("Rate limits", Headers, 2024),
which its clients know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.keys.buckets import Bucket
from router.keys.terms import KeyTerms

_FIRST_GUESS_S = 1.0  # how long a request takes, before one has ended
_SMOOTHING = 0.2  # weight of the latest request's time


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Why a request may not pass, and how long until one would. Lifetime: request."""

    what: str  # for the client
    retry_after_s: float


class Allowance:
    """Lifetime: process, as long as its key is in the file."""

    def __init__(self, terms: KeyTerms, now_s: float) -> None:
        self._terms = terms
        self._requests = _bucket(None, terms.requests_per_s, terms.requests_burst, now_s)
        self._tokens = _bucket(None, terms.tokens_per_s, terms.tokens_burst, now_s)
        self._inflight = 0
        self._inflight_elsewhere = 0  # at other replicas
        self.used_requests = self.used_tokens = 0  # here, since it began
        self.on_use: Callable[[], None] = lambda: None  # told of each change of these
        self._request_s = _FIRST_GUESS_S

    @property
    def inflight(self) -> int:
        """Requests that were begun and not ended."""
        return self._inflight

    def change(self, terms: KeyTerms, now_s: float) -> None:
        """Go on by other terms; what was used stays used."""
        self._terms = terms
        requests, tokens = terms.requests_per_s, terms.tokens_per_s
        self._requests = _bucket(self._requests, requests, terms.requests_burst, now_s)
        self._tokens = _bucket(self._tokens, tokens, terms.tokens_burst, now_s)

    def begin(self, now_s: float) -> Exhausted | None:
        """A request comes, of unknown size. Where it may pass, `end` must be called once."""
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
        """Its prompt turns out to have so many tokens; these are taken where they may pass."""
        if self._tokens is None:
            return None
        if wait_s := self._tokens.wait_s(now_s, tokens):
            if self._requests is not None:
                wait_s = max(wait_s, self._requests.wait_s(now_s, 1.0))
            return Exhausted(self._tokens_rate(), wait_s)
        self.settle(now_s, tokens)
        return None

    def settle(self, now_s: float, tokens: int) -> None:
        """It used so many tokens more than was taken before (less: below 0)."""
        if self._tokens is not None:
            self._tokens.take(now_s, tokens)
            self.used_tokens += tokens
            self.on_use()

    def taken_elsewhere(self, now_s: float, requests: int, tokens: int, inflight: int) -> None:
        """Another replica let pass so many requests, used so many tokens, and has so many
        requests more (less: below 0) at the same time.
        """
        if self._requests is not None:
            self._requests.take(now_s, requests)
        if self._tokens is not None:
            self._tokens.take(now_s, tokens)
        self._inflight_elsewhere = max(self._inflight_elsewhere + inflight, 0)

    def end(self, took_s: float) -> None:
        """A request that passed `begin` is over, however it ended."""
        assert self._inflight > 0, "a request of this key ended twice"
        self._inflight -= 1
        self.on_use()
        self._request_s += _SMOOTHING * (max(took_s, 0.0) - self._request_s)

    def headers(self, now_s: float) -> tuple[tuple[str, str], ...]:
        """`x-ratelimit-...`: the limit, what is left of it, when it is whole again."""
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
    """As OpenAI's headers have it: `6m0s`, `1.5s`, `20ms`; never less than it is."""
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
