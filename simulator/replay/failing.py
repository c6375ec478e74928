"""The faults of the timeline, done to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.replay.agenda import Agenda, Rank
from simulator.replay.faults import Fault
from simulator.replay.health import Health
from simulator.replay.relay import Relay
from simulator.replay.station import Station


class Failing:
    """Lifetime: replay. `build(group, worker_id)` makes a worker that joins."""

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
        """Plan the whole timeline."""
        for fault in faults:
            self._agenda.at(fault.at_ns, Rank.FAULT, self._befall, fault)

    def _befall(self, now_ns: int, fault: Fault) -> None:
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
        """Everything under way breaks off; what was given before still reaches the router."""
        relay, local_ns = self._relay, station.local_ns(now_ns)
        relay.serving.gather(now_ns, station)
        rows, tokens = station.engine.progress(local_ns)
        given = dict(zip(rows.tolist(), tokens.tolist(), strict=True))
        unfinished = station.engine.abort(local_ns)
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
        """Its clock goes on where it stood; it finds what arrived and who has left meanwhile."""
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
