"""Stand-ins for Redis and for timers in tests of leases, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

from router.replicas.lease import GIVE_BACK

LEASE_S = 3.0


class Server:
    """Does what Redis does with the scripts of leases, on a clock of its own. Lifetime: one
    history.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.held: dict[str, tuple[str, int, float]] = {}  # key -> holder, token, until
        self.fences: dict[str, int] = {}

    def run(self, command: tuple) -> int:
        _, script, _, key, fence, me, *_ = command
        holder, token, until_s = self.held.get(key, ("", 0, -1.0))
        free = until_s <= self.now_s
        if script == GIVE_BACK:
            if holder == me:
                self.held.pop(key)
            return 0
        if free:
            token = self.fences[fence] = self.fences.get(fence, 0) + 1
        elif holder != me:
            return 0
        self.held[key] = (me, token, self.now_s + LEASE_S)
        return token


class Timers:
    """A stand-in for `loop.call_at` that keeps one timer at a time. Lifetime: one history."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ring_s: float | None = None
        self.ring: Callable[[], None] = lambda: None

    def call_at(self, when_s: float, ring: Callable[[], None]) -> Timers:
        self.ring_s, self.ring = when_s, ring
        return self

    def cancel(self) -> None:
        self.ring_s = None

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        if self.ring_s is not None and self.ring_s <= self.now_s:
            self.ring_s = None
            self.ring()
