"""What of one source is believed: its word, but not at once when it loses everybody, or flaps.

No I/O and no clock: the time comes with the questions. A source that fails, or that names nobody
any more, is not believed for a grace; after that the workers go that are down by the router's own
probes, and those that answer stay: a registry that is broken for long must not empty the pool. A
worker that vanished and came back lately is kept the longer when it vanishes again, up to a minute:
its heartbeat is what is ill, and each turn would cost the requests that run there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.discovery.source import Report, Seen
from router.fleet_io.wanted import Key, key_of
from router.worker_spec import WorkerSpec

FLAP_S = 60.0  # gone and back within so long: it flaps
STEADY_S = 300.0  # in without a break for so long: it flaps no more
LINGER_MAX_S = 60.0
_PASTS_MAX = 8_192

Answers = Callable[[WorkerSpec], bool]


@dataclass(slots=True)
class _Past:
    """How a worker came and went lately."""

    came_s: float
    lost_s: float = 0.0
    flaps: int = 0


class Believed:
    """Lifetime: as long as its source is named."""

    def __init__(self) -> None:
        self.heard = False  # it has said something, if only that it cannot be asked
        self.trouble = ""
        self.refused: tuple[str, ...] = ()
        self.joined = self.left = self.flaps = 0  # counted since the start
        self._seen: dict[Key, Seen] = {}
        self._silent_s: float | None = None  # since when it names nobody
        self._lingering: dict[Key, tuple[Seen, float]] = {}  # vanished, kept until then
        self._past: dict[Key, _Past] = {}

    @property
    def moves(self) -> bool:
        """Whether time alone can change what is believed."""
        return self._silent_s is not None or bool(self._lingering)

    def silent_s(self, now_s: float) -> float:
        """For how long it has named nobody although it did before."""
        return 0.0 if self._silent_s is None else now_s - self._silent_s

    def take(self, report: Report, now_s: float) -> None:
        """It says this."""
        self.heard = True
        self.trouble = report.trouble
        if report.workers is None:
            self._fall_silent(now_s)
            return
        self.refused = report.refused
        seen = {key_of(one.spec): one for one in report.workers}
        if not seen and any(not one.stopping for one in self._seen.values()):
            self.trouble = self.trouble or "it names no worker any more"
            self._fall_silent(now_s)
            return
        self._silent_s = None
        for key, one in self._seen.items():
            if key not in seen:
                self._lose(key, one, now_s)
        for key in seen.keys() - self._seen.keys():
            self._gain(key, now_s)
        self._seen = seen

    def remember(self, seen: tuple[Seen, ...], now_s: float) -> None:
        """It said this to the router before this one; what it says itself has yet to come."""
        self.take(Report(seen), now_s)
        self.heard = False

    def workers(self, now_s: float, grace_s: float, answers: Answers) -> list[Seen]:
        """Who is there, as far as it is believed; `answers`: whether a worker does, to probes."""
        if self._silent_s is not None and now_s - self._silent_s >= grace_s:
            for key in [k for k, one in self._seen.items() if not answers(one.spec)]:
                del self._seen[key]
                self.left += 1
            if not self._seen:
                self._silent_s = None
        for key in [k for k, (_, until_s) in self._lingering.items() if until_s <= now_s]:
            del self._lingering[key]
            self.left += 1
        return [*self._seen.values(), *(one for one, _ in self._lingering.values())]

    @property
    def lingering(self) -> list[str]:
        """Names of those that vanished and are kept for a while."""
        return [one.spec.name for one, _ in self._lingering.values()]

    def _fall_silent(self, now_s: float) -> None:
        if self._silent_s is None and self._seen:
            self._silent_s = now_s

    def _lose(self, key: Key, one: Seen, now_s: float) -> None:
        past = self._past.get(key)
        if one.stopping or past is None:  # it said so, or nobody remembers it
            self.left += 1
            return
        if now_s - past.came_s >= STEADY_S:
            past.flaps = 0
        past.lost_s = now_s
        if past.flaps:
            linger_s = min(2.0**past.flaps, LINGER_MAX_S)
            self._lingering[key] = one, now_s + linger_s
        else:
            self.left += 1

    def _gain(self, key: Key, now_s: float) -> None:
        past = self._past.pop(key, None)
        back = past is not None and past.lost_s > 0.0 and now_s - past.lost_s < FLAP_S
        if past is None or not back:
            past = _Past(now_s)
        else:
            past.came_s = now_s
            past.lost_s = 0.0
            past.flaps = min(past.flaps + 1, 16)
            self.flaps += 1
        if len(self._past) >= _PASTS_MAX:
            del self._past[next(iter(self._past))]  # who came first of all that are known
        self._past[key] = past
        if self._lingering.pop(key, None) is None:
            self.joined += 1
