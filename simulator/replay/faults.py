"""Reads a timeline of faults from a file, and applies it to the simulated workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from simulator.replay.agenda import Agenda, Rank
from simulator.replay.relay import Relay
from simulator.replay.setup import ReplayError
from simulator.replay.signals import Health
from simulator.replay.station import Station
from simulator.yaml_file import YamlFileError, read_yaml

KINDS: dict[str, tuple[str, ...]] = {  # each with the keys it takes besides at_s and do
    "die": ("worker",),
    "restart": ("worker",),
    "drain": ("worker",),
    "join": ("group",),
    "slow": ("worker", "factor"),
    "clear": ("worker",),
    "lose_events": ("worker", "for_s"),
    "hang": ("worker", "for_s"),
}
_MAX_FACTOR = 1e6
_MAX_HANG_S = 86_400.0  # beyond it, a process that hangs is a process that died


class Fault(msgspec.Struct, frozen=True):
    """One fault of the timeline. For a worker that joins, `worker` is its group."""

    at_ns: int
    do: str
    worker: int
    factor: float = 1.0
    for_ns: int = 0


def read_faults(path: str, workers: int, groups: int) -> tuple[Fault, ...]:
    """Return the faults in the file `path` in order of time; faults of equal time keep the file's
    order.

    Raises ReplayError with the item and key at fault, and the values that are allowed there.
    """
    try:
        items = read_yaml(Path(path))
    except YamlFileError as error:
        raise ReplayError(str(error)) from error
    return parse_faults(items, path, workers, groups)


def parse_faults(items: Any, path: str, workers: int, groups: int) -> tuple[Fault, ...]:
    """Return the faults in the data of a file, as `read_faults` does; `path` is for messages."""
    if items is None:
        return ()
    if not isinstance(items, list):
        raise ReplayError(f"{path}: expected a list of faults, got {type(items).__name__}")
    faults = [_fault(_Item(item, f"{path}: [{n}]")) for n, item in enumerate(items)]
    faults.sort(key=lambda fault: fault.at_ns)
    known = workers
    for fault in faults:
        limit = groups if fault.do == "join" else known
        if fault.worker >= limit:
            what = "group" if fault.do == "join" else "worker"
            raise ReplayError(
                f"{path}: {fault.do} at {fault.at_ns / 1e9:g} s: {what} {fault.worker} does not "
                f"exist then; expected 0..{limit - 1}"
            )
        known += fault.do == "join"
    return tuple(faults)


class _Item:
    """One item of a file of faults, and its place in the file."""

    def __init__(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise ReplayError(f"{where}: expected keys such as at_s, worker, do; got {item!r}")
        self.item: dict[Any, Any] = item
        self.where = where

    def kind(self) -> str:
        """Return what the item does, which is its key `do`. Raises ReplayError if the item has a
        key that does not belong to it.
        """
        kind = self.item.get("do")
        if not isinstance(kind, str) or kind not in KINDS:
            raise ReplayError(f"{self.where}.do: {kind!r}; expected one of: {', '.join(KINDS)}")
        allowed = ("at_s", "do", *KINDS[kind])
        for key in self.item:
            if key not in allowed:
                raise ReplayError(
                    f"{self.where}.{key}: no key of {kind}; it takes: {', '.join(allowed)}"
                )
        return kind

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return the value of a key, which must be a finite number between `low` and `high`. Raises
        ReplayError if it is not.
        """
        value = self.item.get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:  # type: ignore[operator]
            got = "missing" if value is None else repr(value)
            raise ReplayError(f"{self.where}.{key}: {got}; expected a number of {low:g}..{high:g}")
        return float(value)  # type: ignore[arg-type]

    def index(self, key: str, default: int | None = None) -> int:
        """Return the value of a key, which must be a whole number of 0 or more. Raises ReplayError
        if it is not.
        """
        value = self.item.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            got = "missing" if value is None else repr(value)
            raise ReplayError(f"{self.where}.{key}: {got}; expected a whole number, 0 or more")
        return value


def _fault(item: _Item) -> Fault:
    kind = item.kind()
    factor, for_s = 1.0, 0.0
    if kind == "slow":
        factor = item.number("factor", 1 / _MAX_FACTOR, _MAX_FACTOR)
    if "for_s" in KINDS[kind]:
        for_s = item.number("for_s", 1e-9, _MAX_HANG_S if kind == "hang" else 1e9)
    worker = item.index("group", 0) if kind == "join" else item.index("worker")
    at_s = item.number("at_s", 0.0, 1e9)
    return Fault(_ns(at_s), kind, worker, factor, max(_ns(for_s), 1) if for_s else 0)


def _ns(seconds: float) -> int:
    return math.floor(seconds * 1e9 + 0.5)


class Failing:
    """Applies a timeline of faults to a replay. Lifetime: replay.

    `build(group, worker_id)` makes a worker that joins.
    """

    def __init__(
        self,
        agenda: Agenda,
        relay: Relay,
        health: Health,
        build: Callable[[int, int], Station],
    ) -> None:
        self._agenda = agenda
        self._relay = relay
        self._health = health
        self._stations = relay.stations
        self._build = build
        self._acts: dict[str, Callable[[int, Station, Fault], None]] = {
            "die": self._die,
            "restart": self._restart,
            "drain": self._drain,
            "slow": self._slow,
            "clear": self._clear,
            "lose_events": self._lose_events,
            "hang": self._hang,
        }

    def start(self, faults: Iterable[Fault]) -> None:
        """Plan all faults of the timeline."""
        for fault in faults:
            self._agenda.at(fault.at_ns, Rank.FAULT, self._apply, fault)

    def _apply(self, now_ns: int, fault: Fault) -> None:
        if fault.do == "join":
            self._join(now_ns, fault)
            return
        station = self._stations[fault.worker]
        if not station.gone:  # a drained worker may have left before its time
            self._acts[fault.do](now_ns, station, fault)

    def _join(self, now_ns: int, fault: Fault) -> None:
        station = self._build(fault.worker, len(self._stations))
        station.progress_ns = now_ns
        # Its engine's clock begins with the process.
        station.offset_ns = now_ns
        self._stations.append(station)
        self._relay.joined(station)
        self._health.joined(now_ns, station)

    def _die(self, now_ns: int, station: Station, _: Fault) -> None:
        if station.alive:
            self._kill(now_ns, station)
            station.alive = False
            self._health.died(now_ns, station)

    def _restart(self, now_ns: int, station: Station, _: Fault) -> None:
        if station.alive:
            self._kill(now_ns, station)
        station.alive = True
        station.incarnation += 1
        station.next_seq = 0
        station.kept.clear()
        self._health.serves(now_ns, station)

    def _kill(self, now_ns: int, station: Station) -> None:
        """Kill a worker: its requests break off, but tokens that it sent before still reach the
        router.
        """
        relay, local_ns = self._relay, station.local_ns(now_ns)
        relay.serving.gather(now_ns, station)
        rows, tokens = station.engine.progress(local_ns)
        given = dict(zip(rows.tolist(), tokens.tolist(), strict=True))
        unfinished = station.engine.abort(local_ns)
        if relay.serving.transfers is not None:
            relay.serving.transfers.died(now_ns, station)
        for row in unfinished:
            if row not in station.abandoned:
                relay.serving.broken(now_ns, row, "early_close", given.get(row, 0))
        for row in station.parked:
            relay.serving.broken(now_ns, row, "early_close")
        station.parked.clear()
        station.abandoned.clear()
        station.offset_ns = now_ns - local_ns  # a hang ends with the process
        station.hung_since_ns = -1
        station.wake_ns = -1

    def _drain(self, now_ns: int, station: Station, _: Fault) -> None:
        if not station.draining:
            self._health.drain(now_ns, station)

    def _slow(self, now_ns: int, station: Station, fault: Fault) -> None:
        station.speed = station.usual_speed / fault.factor
        station.engine.set_speed(station.speed, station.local_ns(now_ns))
        self._look(station)

    def _clear(self, now_ns: int, station: Station, _: Fault) -> None:
        if station.alive:
            station.engine.clear(station.local_ns(now_ns))
            self._look(station)

    def _lose_events(self, now_ns: int, station: Station, fault: Fault) -> None:
        station.lost_until_ns = max(station.lost_until_ns, now_ns + fault.for_ns)

    def _hang(self, now_ns: int, station: Station, fault: Fault) -> None:
        if not station.alive or station.hung:
            return
        station.hung_since_ns = now_ns
        self._health.hung(now_ns, station)
        self._agenda.at(now_ns + fault.for_ns, Rank.FAULT, self._wake_up, (station, now_ns))

    def _wake_up(self, now_ns: int, what: tuple[Station, int]) -> None:
        """Let a worker that hung continue. Its clock continues where it stopped; requests that
        arrived meanwhile enter its queue, and those of clients that left are dropped.
        """
        station, since_ns = what
        if station.hung_since_ns != since_ns:
            return  # it died meanwhile
        station.offset_ns += now_ns - since_ns
        station.hung_since_ns = -1
        for row in station.abandoned:
            station.engine.cancel(row, station.local_ns(now_ns))
        station.abandoned.clear()
        parked, station.parked = station.parked, []
        for row in parked:
            self._relay.serving.enter(now_ns, station, row)
        station.wake_ns = -1
        self._look(station)
        self._health.serves(now_ns, station)

    def _look(self, station: Station) -> None:
        if station.alive and not station.hung:
            self._relay.serving.look_again(station)
