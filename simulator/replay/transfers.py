"""Transfers of KV from prefill workers to decode workers, with leases and limited links.

The transfers of a worker share its link evenly, once for what it sends and once for what it
receives. A transfer is as fast as the slower of its two ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.replay.agenda import Agenda, Rank
from simulator.replay.station import Station

EXTENSION = 2 / 3  # share of a lease that a reader's sign of life adds, as in vLLM


@dataclass(slots=True, eq=False)
class Export:
    """The KV of one prompt, kept at the worker that computed it. Lifetime: until it is read or
    lost.
    """

    station: Station
    row: int
    wanted: bool = False  # its reader has the request and keeps the lease alive


@dataclass(slots=True, eq=False)
class _Move:
    """A transfer of KV in progress. Lifetime: transfer."""

    export: Export
    target: Station
    all_bytes: int
    began_ns: int
    remaining_bytes: float
    rate: float = 0.0  # bytes per nanosecond
    since_ns: int = -1  # when `remaining_bytes` was so many; -1: it is being set up
    version: int = 0  # of its planned end


@dataclass(slots=True)
class TransferTotals:
    """The totals of all transfers of a replay. Lifetime: replay."""

    prefilled: int = 0  # requests whose KV was kept for another worker
    moved: int = 0  # reads that ended well
    moved_bytes: int = 0
    moved_ns: int = 0  # sum of their times, from the reader's wish on
    recomputed: int = 0  # requests that decode workers had to compute again
    expired: int = 0  # leases that ended before a worker read the KV


class Transfers:
    """All transfers of KV, and all KV that is kept for a transfer. Lifetime: replay. `look_again`
    is called with workers at which the next visible change may now come at another time.
    """

    def __init__(
        self, agenda: Agenda, look_again: Callable[[Station], None], setup_ns: int, lease_ns: int
    ) -> None:
        self.totals = TransferTotals()
        self._agenda = agenda
        self._look_again = look_again
        self._setup_ns = setup_ns
        self._lease_ns = lease_ns
        self._exports: dict[int, Export] = {}  # by request; the newest of each
        self._held: set[Export] = set()  # of earlier attempts, too
        self._moves: dict[int, _Move] = {}  # by request
        self._sending: dict[int, int] = {}  # transfers of each worker, by its number
        self._receiving: dict[int, int] = {}

    # --- leases -----------------------------------------------------------------------------

    def keep(self, now_ns: int, station: Station, row: int) -> None:
        """Keep the KV of a request whose prefill ended, until a decode worker reads it."""
        before = self._exports.get(row)
        if before is not None and before.station is station:
            self._held.discard(before)  # the engine gave it back when it kept this one
        self.totals.prefilled += 1
        export = self._exports[row] = Export(station, row)
        self._held.add(export)
        self._lease(now_ns + self._lease_ns, export)

    def wanted(self, row: int) -> bool:
        """Return whether the request's KV is kept. From now on the worker that waits to read it
        keeps the lease alive.
        """
        export = self._exports.get(row)
        if export is None:
            self.totals.recomputed += 1
            return False
        export.wanted = True
        return True

    def unwanted(self, now_ns: int, row: int) -> None:
        """Let the lease of a request's KV end soon, because its decode worker failed or
        refused it.
        """
        export = self._exports.get(row)
        if export is not None and export.wanted:
            export.wanted = False
            self._lease(now_ns + round(EXTENSION * self._lease_ns), export)

    def _lease(self, end_ns: int, export: Export) -> None:
        self._agenda.at(end_ns, Rank.STEP, self._expire, export)

    def _expire(self, now_ns: int, export: Export) -> None:
        if export in self._held and not export.wanted:
            self.totals.expired += 1
            self._release(now_ns, export)

    def _release(self, now_ns: int, export: Export) -> None:
        self._forget(export)
        station = export.station
        station.engine.release(export.row, station.local_ns(now_ns))
        self._changed(station)

    def _forget(self, export: Export) -> None:
        self._held.discard(export)
        if self._exports.get(export.row) is export:
            del self._exports[export.row]

    # --- reads ------------------------------------------------------------------------------

    def read(self, now_ns: int, target: Station, row: int, tokens: int) -> None:
        """Begin to transfer the KV of this many tokens to a decode worker that has room for the
        request.
        """
        export = self._exports.get(row)
        if export is None:  # its worker died meanwhile
            self._end_read(now_ns, target, row, arrived=False)
        elif not tokens:
            self._release(now_ns, export)
        else:
            size = tokens * target.kv_bytes_per_token
            move = _Move(export, target, size, now_ns, float(size))
            self._moves[row] = move
            self._agenda.at(now_ns + self._setup_ns, Rank.STEP, self._begin, move)

    def _begin(self, now_ns: int, move: _Move) -> None:
        if self._moves.get(move.export.row) is not move:
            return
        move.since_ns = now_ns
        self._count(move, +1)
        self._share(now_ns, (move.export.station, move.target))

    def _count(self, move: _Move, more: int) -> None:
        for counts, station in (
            (self._sending, move.export.station),
            (self._receiving, move.target),
        ):
            counts[station.worker_id] = counts.get(station.worker_id, 0) + more

    def _share(self, now_ns: int, stations: Iterable[Station]) -> None:
        """Compute the rates of all transfers of these workers anew from their links."""
        changed = tuple(stations)
        for move in self._moves.values():
            if move.since_ns < 0 or not (move.export.station in changed or move.target in changed):
                continue
            source, target = move.export.station, move.target
            move.remaining_bytes -= move.rate * (now_ns - move.since_ns)
            move.since_ns = now_ns
            move.rate = min(
                source.link_bytes_per_ns / self._sending[source.worker_id],
                target.link_bytes_per_ns / self._receiving[target.worker_id],
            )
            move.version += 1
            end_ns = now_ns + max(0, round(move.remaining_bytes / move.rate))
            self._agenda.at(end_ns, Rank.STEP, self._arrive, (move, move.version))

    def _arrive(self, now_ns: int, what: tuple[_Move, int]) -> None:
        move, version = what
        row = move.export.row
        if self._moves.get(row) is not move or move.version != version:
            return
        totals = self.totals
        totals.moved += 1
        totals.moved_ns += now_ns - move.began_ns
        totals.moved_bytes += move.all_bytes
        self._drop(now_ns, move)
        self._end_read(now_ns, move.target, row, arrived=True)
        self._release(now_ns, move.export)

    def _drop(self, now_ns: int, move: _Move) -> None:
        del self._moves[move.export.row]
        if move.since_ns >= 0:
            self._count(move, -1)
            self._share(now_ns, (move.export.station, move.target))

    def _end_read(self, now_ns: int, target: Station, row: int, *, arrived: bool) -> None:
        if not arrived:
            self.totals.recomputed += 1
        target.engine.end_read(row, arrived, target.local_ns(now_ns))
        self._changed(target)

    def _changed(self, station: Station) -> None:
        if station.alive and not station.hung:
            self._look_again(station)

    # --- faults -----------------------------------------------------------------------------

    def died(self, now_ns: int, station: Station) -> None:
        """Drop the KV that a dead worker held, sent or received."""
        for export in [one for one in self._held if one.station is station]:
            self._forget(export)
        for row, move in list(self._moves.items()):
            if move.target is station:
                self._drop(now_ns, move)
                self.unwanted(now_ns, row)
            elif move.export.station is station:
                self._drop(now_ns, move)
                self._end_read(now_ns, move.target, row, arrived=False)

    def held_at(self, station: Station) -> int:
        """Return the number of prompts whose KV a worker keeps for others."""
        return sum(one.station is station for one in self._held)
