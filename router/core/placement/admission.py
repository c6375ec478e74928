"""Decides which requests are admitted, held or rejected, and estimates how long they would wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import Generic, TypeVar

from policies.facts import Arrival
from router.core.contract.actions import Reject, Rejection
from router.core.contract.counters import CoreCounters
from router.core.contract.settings import CoreSettings
from router.core.placement.hold_queue import HoldQueue, Watcher, most_s
from router.core.placement.pending import Pending

K = TypeVar("K")
_MEMORY_S = 10.0  # older samples count little
_LET_IN_MEMORY_S = 60.0  # the same for held requests, of which few are let in at a time
_LEAST_BUSY_S = 0.5  # of measuring, before a rate is used
_MODELS_MAX = 1_024


@dataclass(slots=True)
class _Pool:
    """Counts the queued and the recently computed prompt tokens of one model, or of one kind of the
    model's requests. The clock of the pool runs only while there are tokens to compute.
    """

    at_s: float
    queued_tokens: int = 0
    computed_tokens: float = 0.0  # with older ones fading
    busy_s: float = 0.0  # with older ones fading

    def advance(self, now_s: float, memory_s: float) -> None:
        passed_s = now_s - self.at_s
        self.at_s = max(now_s, self.at_s)
        if passed_s > 0 and self.queued_tokens:
            kept = exp(-passed_s / memory_s)
            self.computed_tokens *= kept
            self.busy_s = self.busy_s * kept + memory_s * (1 - kept)


class Drain(Generic[K]):
    """Counts the queued prompt tokens of each pool, and measures how fast the pool computes them.
    The key `K` of a pool is a model, or a model and a kind of its requests. Lifetime: process.
    """

    def __init__(self, memory_s: float = _MEMORY_S) -> None:
        self._memory_s = memory_s
        self._pools: dict[K, _Pool] = {}
        self.queued_tokens = 0  # tokens dispatched and still to be computed, of all models

    def sent(self, of: K, tokens: int, now_s: float) -> None:
        """Add `tokens` to the queue of the pool `of`, which must compute them."""
        pool = self._pools.get(of)
        if pool is None:
            if len(self._pools) >= _MODELS_MAX:
                self._pools = {m: p for m, p in self._pools.items() if p.queued_tokens}
            pool = self._pools[of] = _Pool(now_s)
        pool.advance(now_s, self._memory_s)
        pool.queued_tokens += tokens
        self.queued_tokens += tokens

    def over(self, of: K, tokens: int, computed: bool, now_s: float) -> None:
        """Remove `tokens` from the queue of the pool `of`.

        `computed` is True if the pool computed the tokens, and False if they are no longer wanted.
        """
        pool = self._pools[of]
        pool.advance(now_s, self._memory_s)
        pool.queued_tokens -= tokens
        self.queued_tokens -= tokens
        if computed:
            pool.computed_tokens += tokens

    def queued_of(self, of: K) -> int:
        """Return the number of tokens that the pool `of` has yet to compute."""
        pool = self._pools.get(of)
        return 0 if pool is None else pool.queued_tokens

    def rate(self, of: K, now_s: float) -> float | None:
        """Return the tokens per second that the pool `of` computes while busy; None if unknown."""
        pool = self._pools.get(of)
        if pool is None:
            return None
        pool.advance(now_s, self._memory_s)
        if pool.busy_s < _LEAST_BUSY_S or pool.computed_tokens < 1.0:
            return None
        return pool.computed_tokens / pool.busy_s


ANY_MODEL = "*"  # in the limits: every model without limits of its own


@dataclass(frozen=True, slots=True)
class ModelLimit:
    """The limits of a model: unfinished requests and queued prompt tokens at all workers together.

    Lifetime: until the configuration is reloaded.
    """

    max_requests: float = inf  # unfinished
    max_queued_tokens: float = inf  # of prompts that were sent and are not known to be computed


class ModelLimits:
    """Compares the unfinished requests that this router sent for each model with the model's
    limits. Lifetime: process.
    """

    def __init__(self, drain: Drain[str]) -> None:
        self.limits: Mapping[str, ModelLimit] = {}  # replaced on reload
        self._drain = drain
        self._requests: Counter[str] = Counter()

    def requests(self, model: str) -> int:
        """Return the number of a model's unfinished requests that are at a worker."""
        return self._requests[model]

    def sent(self, pending: Pending) -> None:
        """Count a request against its model's limit. The request counts once, even if its legs are
        sent separately.
        """
        if pending.counted is None:
            pending.counted = pending.arrival.model
            self._requests[pending.counted] += 1

    def over(self, pending: Pending) -> None:
        """Stop counting a request against its model's limit, because no worker has it any more.

        Do nothing if the request is not counted.
        """
        model, pending.counted = pending.counted, None
        if model is not None:
            self._requests[model] -= 1
            if not self._requests[model]:
                del self._requests[model]

    def reached(self, pending: Pending) -> str:
        """Return a text that names the model's limit that blocks a request, or "" if none does."""
        model = pending.arrival.model
        limit = self.limits.get(model) or self.limits.get(ANY_MODEL)
        if limit is None or pending.counted is not None:
            return ""
        requests, tokens = self._requests[model], self._drain.queued_of(model)
        if requests >= limit.max_requests:
            return f"the model's limit of {limit.max_requests:.0f} requests is reached"
        if tokens >= limit.max_queued_tokens:
            return f"the model's limit of {limit.max_queued_tokens:.0f} queued tokens is reached"
        return ""


_FIRST_OUTPUT_TOKENS = 128.0  # tokens of an answer, assumed before one has ended
_SMOOTHING = 0.02  # weight of the latest answer's length
_RETRY_MAX_S = 600.0  # the longest Retry-After

DISPLACED = Rejection(503, "displaced", "others that go first need the place of this request")


class Admission:
    """Decides if a request is admitted, held or refused, and owns the hold queue. `modelled_rate`
    returns the tokens per second that a model's workers should prefill by calibration; it is used
    until their real rate is measured. Lifetime: process.
    """

    def __init__(
        self,
        settings: CoreSettings,
        counters: CoreCounters,
        modelled_rate: Callable[[str], float],
        watcher: Watcher | None = None,
        drain: Drain[str] | None = None,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._modelled_rate = modelled_rate
        self.held = HoldQueue(settings.hold_requests, watcher)
        self.drain = drain or Drain()
        self._let_in: Drain[tuple[str, bool]] = Drain(_LET_IN_MEMORY_S)  # by `_kind`
        self._output_tokens = _FIRST_OUTPUT_TOKENS

    def admit(
        self, arrival: Arrival, inflight_requests: int
    ) -> tuple[Rejection | None, Pending | None]:
        """Decide if an arriving request may come in; it may if both results are None. The first
        result is the rejection of the arriving request. The second result is a held request of
        lower priority that the caller must reject to make room.
        """
        settings = self._settings
        if inflight_requests >= settings.inflight_requests:
            rejection = Rejection(
                503, "router_full", "the router is at its request limit (limits.inflight_requests)"
            )
        elif (queued := self.drain.queued_tokens + self.held.tokens) >= settings.queued_tokens:
            rejection = Rejection(
                503,
                "router_full",
                f"{queued} tokens of prompts wait to be computed (limits.queued_tokens)",
            )
        else:
            return None, None
        victim = self.held.victim(arrival)
        if victim is None or victim.arrival.priority <= arrival.priority:
            return rejection, None
        return None, victim

    def hold(
        self, pending: Pending, missing_tokens: int, now_s: float
    ) -> tuple[Rejection | None, Pending | None]:
        """Add a request to the hold queue if there is room; then both results are None.

        If the queue is full, the first result is the rejection of the request, or the second result
        is a held request that must be rejected first. `missing_tokens` is the number of prompt
        tokens that even the best worker would have to compute.
        """
        pending.work_tokens = missing_tokens + self._answer_tokens(pending.arrival)
        pending.waiting_tokens = max(round(pending.work_tokens), 1)
        if self.held.full:
            victim = self.held.victim(pending.arrival)
            if victim is None:
                why = f"{len(self.held)} requests wait for a worker already (limits.hold_requests)"
                return Rejection(503, "hold_queue_full", why), None
            return None, victim
        pending.queued_tokens = missing_tokens
        self.held.add(pending)
        self._let_in.sent(_kind(pending), pending.waiting_tokens, now_s)
        self._counters.holds += 1
        return None, None

    def waited_too_long(self, pending: Pending, now_s: float, why: str = "") -> Rejection:
        """Return the rejection of a request that waited too long at the router.

        `why` is a text about the limit that kept the request from being sent, or "".
        """
        deadline_s = pending.arrival.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            return Rejection(
                504, "deadline_exceeded", "no worker could take the request in its client's time"
            )
        longest_s = most_s(pending.arrival, self._settings.hold_s)
        key = " (limits.hold_s)" if longest_s == self._settings.hold_s else ""
        within = f"within {longest_s:g} s{key}"
        because = f": {why}" if why else ""
        return Rejection(503, "hold_timeout", f"no worker could take the request {within}{because}")

    def sent(self, pending: Pending, uncached_tokens: int, now_s: float) -> None:
        """Count a request as sent to a worker that must compute `uncached_tokens` of the prompt."""
        if self.held.size:  # else no request is held
            pending.work_tokens = uncached_tokens + self._answer_tokens(pending.arrival)
            self.held.served(pending)
            self.wait_over(pending, now_s, True)
        pending.queued_tokens = uncached_tokens
        self.drain.sent(pending.arrival.model, uncached_tokens, now_s)

    def prefill_over(self, pending: Pending, computed: bool, now_s: float) -> None:
        """Remove a request's prompt from the queued tokens.

        `computed` is True if the prompt was computed, and False if it was given up. Do nothing if
        the prompt was removed before.
        """
        if pending.queued_tokens and not pending.held:
            self.drain.over(pending.arrival.model, pending.queued_tokens, computed, now_s)
            pending.queued_tokens = 0

    @property
    def output_tokens(self) -> float:
        """The moving average of the number of tokens in an answer."""
        return self._output_tokens

    def answered(self, output_tokens: int | None) -> None:
        """Update the average answer length by an answer of `output_tokens` tokens, if known."""
        if output_tokens is not None:
            self._output_tokens += _SMOOTHING * (output_tokens - self._output_tokens)

    def wait_over(self, pending: Pending, now_s: float, let_in: bool = False) -> None:
        """Remove a request from the hold queue if it is held.

        `let_in` is True if the request is sent to a worker, and False if it is given up.
        """
        if pending.held:
            self._let_in.over(_kind(pending), pending.waiting_tokens, let_in, now_s)
            self.held.remove(pending)
            pending.queued_tokens = 0
            self._counters.held[pending.standing].add(now_s - pending.arrival.now_s)

    def wait_s(
        self, arrival: Arrival, now_s: float, begun: bool = False, own_tokens: float = 0.0
    ) -> float:
        """Return the seconds that a tenant's next request would wait in the hold queue.

        `begun` is True if its session has sent a request before. By Little's law, the wait is the
        work ahead of the request plus `own_tokens`, divided by the rate at which work leaves the
        hold queue. While this rate is unknown, the wait is the time until a worker would compute
        the request: all sent and held work of the model, divided by the rate at which the pool
        computes prompts.
        """
        before = self.held.work_before(arrival, begun)
        let_in = self._let_in.rate((arrival.model, begun), now_s)
        if let_in and before + own_tokens:
            return (before + own_tokens) / let_in
        ahead = self.drain.queued_of(arrival.model) + before
        rate = self.drain.rate(arrival.model, now_s) or self._modelled_rate(arrival.model)
        return ahead / rate if rate > 0 else 0.0

    def refuse(
        self,
        arrival: Arrival,
        now_s: float,
        rejection: Rejection,
        pending: Pending | None = None,
    ) -> Reject:
        """Return the `Reject` action for a request, with the seconds to wait before a retry.

        `pending` is the request if it was admitted before.
        """
        status, code, message = rejection
        self._counters.rejected(code)
        retry_after_s = None
        if status in (429, 503):
            # A client that came back sooner would only wait here, or be refused again.
            begun, own = False, 0
            if pending is not None:
                begun, own = pending.standing != "new", pending.waiting_tokens
            wait_s = self.wait_s(arrival, now_s, begun, own)
            retry_after_s = min(max(wait_s, self._settings.retry_after_s), _RETRY_MAX_S)
        return Reject(arrival.request_id, status, code, message, retry_after_s)

    def _answer_tokens(self, arrival: Arrival) -> float:
        """Return how many tokens an answer will probably have: the number that the client expects,
        or else the average of earlier answers, but not more than the request's limit.
        """
        most, expected = arrival.max_output_tokens, float(arrival.expected_output_tokens or 0)
        expected = expected or self._output_tokens
        return max(expected if most is None else min(expected, most), 0.0)


def _kind(pending: Pending) -> tuple[str, bool]:
    """Return a request's model, and True if its session has sent a request before. For each such
    pair the throughput of the hold queue is measured separately.
    """
    return pending.arrival.model, not pending.turn[0]
