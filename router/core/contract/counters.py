"""Counters of the decision core: totals since the start, and counts over the last seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate

from policies.contract import Standing
from policies.facts import Role
from router.core.contract.actions import Decision

_STEPS = 10
_NEVER = -1 << 62  # the number of no step


class Window:
    """Counts two kinds of events, such as successes and failures, over the last `span_s` seconds.

    Lifetime: that of the object which owns the window.
    """

    __slots__ = ("_first", "_last", "_second", "_step_s", "_steps")

    def __init__(self, span_s: float) -> None:
        self._step_s = span_s / _STEPS
        self._steps: deque[list[int]] = deque()  # [number of the step, first, second], oldest first
        self._last = [_NEVER, 0, 0]  # the latest entry of `_steps`
        self._first, self._second = 0, 0  # the sums of all

    def add(self, now_s: float, first: int, second: int) -> None:
        """Add `first` events of the first kind and `second` of the second kind at the time `now_s`.

        Times must not decrease from call to call.
        """
        step, last = int(now_s // self._step_s), self._last
        if last[0] != step:
            self._forget(step)
            last = self._last = [step, 0, 0]
            self._steps.append(last)
        if first:
            last[1] += first
            self._first += first
        if second:
            last[2] += second
            self._second += second

    def take_back(self, then_s: float) -> None:
        """Subtract one event of the first kind, counted at `then_s`, if the window still has it."""
        number = int(then_s // self._step_s)
        for step in self._steps:
            if step[0] == number and step[1]:
                step[1] -= 1
                self._first -= 1

    def sums(self, now_s: float) -> tuple[int, int]:
        """Return both counts over the last `span_s` seconds.

        The window moves on in steps of a tenth of `span_s`.
        """
        self._forget(int(now_s // self._step_s))
        return self._first, self._second

    def clear(self) -> None:
        """Set the counts of both kinds of events to 0."""
        self._steps.clear()
        self._last = [_NEVER, 0, 0]
        self._first, self._second = 0, 0

    def _forget(self, step: int) -> None:
        steps = self._steps
        while steps and steps[0][0] <= step - _STEPS:
            _, first, second = steps.popleft()
            self._first -= first
            self._second -= second


HELD_SECONDS = (0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)


@dataclass(slots=True)
class HeldTimes:
    """A histogram of the seconds that requests waited at the router. The core has one for each
    standing, which says if the request's session is new, warm (its KV is cached) or cold. Lifetime:
    process.
    """

    sum_s: float = 0.0
    # Waits up to each of HELD_SECONDS and above the previous one, then longer waits.
    counts: list[int] = field(default_factory=lambda: [0] * (len(HELD_SECONDS) + 1))

    def add(self, wait_s: float) -> None:
        """Add one finished wait of `wait_s` seconds."""
        wait_s = max(wait_s, 0.0)
        self.sum_s += wait_s
        self.counts[bisect_left(HELD_SECONDS, wait_s)] += 1

    def buckets(self) -> list[tuple[str, int]]:
        """Return (upper bound in seconds, number of waits up to it) for each bucket.

        The format is that of Prometheus: each number includes the waits of all lower buckets.
        """
        names = (*(f"{bound:g}" for bound in HELD_SECONDS), "+Inf")
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(slots=True)
class CoreCounters:
    """Counts decisions and how requests ended; the counts only grow. Lifetime: process."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (policy, reason)
    # By the part of a request that a worker was to do.
    legs: Counter[Role] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)  # by code
    expected_hit_tokens: int = 0
    prompt_tokens: int = 0  # of dispatched requests
    holds: int = 0
    retries: int = 0
    retries_refused: int = 0  # for want of a budget
    ejections: int = 0
    ejections_withheld: int = 0  # too much of the pool was ejected already
    held: dict[Standing, HeldTimes] = field(
        default_factory=lambda: {"new": HeldTimes(), "cold": HeldTimes(), "warm": HeldTimes()}
    )

    def dispatched(self, decision: Decision, leg: Role) -> None:
        """Count the dispatch of a request, or of its prefill or decode leg."""
        self.decisions[decision.policy, decision.reason] += 1
        self.legs[leg] += 1
        if leg == "decode":  # its prompt counted with the other leg
            return
        self.expected_hit_tokens += decision.hit_tokens + decision.loaded_tokens
        self.prompt_tokens += decision.prompt_tokens

    def rejected(self, code: str) -> None:
        """Count a rejected request under its error code."""
        self.rejections[code] += 1
