"""The signals that the router gets from its workers besides answers: KV events, probes and load
reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.contract import Hashes
from policies.facts import KvEvent, KvEvents, LoadReport, ReplayEnd, Tick, WorkerChange
from simulator.replay.agenda import Agenda, Rank
from simulator.replay.relay import Relay
from simulator.replay.replicas import Replicas
from simulator.replay.station import Station

# Pauses of `router.events.resync` after an answered and after an unanswered replay.
_BETWEEN_SYNCS_NS = 100_000_000
_ASK_AGAIN_NS = 1_000_000_000

Source = Literal["live", "replay", "snapshot"]


class Feed:
    """The KV events of all workers on their way to the router. Lifetime: replay."""

    def __init__(
        self,
        core: Replicas,
        agenda: Agenda,
        relay: Relay,
        lag_ns: int,
        loss: float,
        resync_ns: int,
    ) -> None:
        self.lost_batches = 0
        self.resyncs = 0
        self._core = core
        self._agenda = agenda
        self._relay = relay
        self._lag_ns = lag_ns
        self._loss = loss
        self._resync_ns = resync_ns
        relay.serving.on_changes = self._publish
        relay.on_resync = self._request_missed

    # --- live batches -----------------------------------------------------------------------

    def _publish(
        self,
        now_ns: int,
        station: Station,
        changes: Sequence[tuple[int, int | None, Hashes]],
    ) -> None:
        seq, events = station.next_seq, station.batch(changes)
        station.next_seq = seq + 1
        station.kept.append((seq, events))
        lost = now_ns < station.lost_until_ns
        if self._loss:  # drawn for every batch, so that a fault does not shift later draws
            lost = station.random.random() < self._loss or lost
        if lost:
            self.lost_batches += 1
            return
        what = (station, station.stream, seq, events)
        self._agenda.at(now_ns + self._lag_ns, Rank.EVENTS, self._deliver, what)

    def _deliver(self, now_ns: int, what: tuple[Station, int, int, tuple[KvEvent, ...]]) -> None:
        station, stream, seq, events = what
        if station.stream == stream and station.followed:
            fact = KvEvents(now_ns / 1e9, station.worker_id, seq, events)
            self._relay.carry_out(now_ns, self._core.handle_fact(fact))

    # --- what was missed --------------------------------------------------------------------

    def subscribe(self, now_ns: int, station: Station) -> None:
        """Let the router follow the worker's event stream; it asks for all past events first."""
        station.stream += 1
        station.syncing = False
        station.wanted_seq = -1
        if station.facts.has_events:
            self._request_missed(now_ns, station, 0)

    def start(self, station: Station) -> None:
        """Let the router follow an engine that has published nothing yet; the request for past
        events is answered at once.
        """
        if station.facts.has_events:
            self._core.handle_fact(KvEvents(0.0, station.worker_id, -1, (), "snapshot"))
            self._core.handle_fact(ReplayEnd(0.0, station.worker_id, True))

    def _request_missed(self, now_ns: int, station: Station, from_seq: int) -> None:
        """Ask the worker for missed batches. One request is under way at a time and one more waits,
        which covers any further one.
        """
        if station.syncing:
            if station.wanted_seq < 0:
                station.wanted_seq = from_seq
            return
        station.syncing = True
        self.resyncs += 1
        what = (station, station.stream, from_seq)
        self._agenda.at(now_ns + self._resync_ns, Rank.EVENTS, self._sync, what)

    def _sync(self, now_ns: int, what: tuple[Station, int, int]) -> None:
        """Deliver a worker's answer to the router: its whole cache to a router that joined late,
        else the batches of events that it kept.
        """
        station, stream, from_seq = what
        if station.stream != stream:
            return
        answered = station.alive and not station.hung
        if answered:
            for seq, events, source in self._answer(now_ns, station, from_seq):
                fact = KvEvents(now_ns / 1e9, station.worker_id, seq, events, source)
                self._relay.carry_out(now_ns, self._core.handle_fact(fact))
        if station.wanted_seq < 0:  # otherwise the waiting request covers the present gap, too
            fact_end = ReplayEnd(now_ns / 1e9, station.worker_id, answered)
            self._relay.carry_out(now_ns, self._core.handle_fact(fact_end))
        if not answered and station.wanted_seq < 0:
            station.wanted_seq = 0  # a snapshot of its cache repairs what a replay cannot
        pause_ns = _BETWEEN_SYNCS_NS if answered else _ASK_AGAIN_NS
        self._agenda.at(now_ns + pause_ns, Rank.EVENTS, self._rested, (station, stream))

    def _answer(
        self, now_ns: int, station: Station, from_seq: int
    ) -> list[tuple[int, tuple[KvEvent, ...], Source]]:
        self._relay.serving.gather(now_ns, station)  # visible changes have been published, too
        if from_seq == 0:
            return [(station.next_seq - 1, station.snapshot(now_ns), "snapshot")]
        return [(seq, events, "replay") for seq, events in station.kept if seq >= from_seq]

    def _rested(self, now_ns: int, what: tuple[Station, int]) -> None:
        station, stream = what
        if station.stream != stream:
            return
        station.syncing = False
        if station.wanted_seq >= 0:
            from_seq, station.wanted_seq = station.wanted_seq, -1
            self._request_missed(now_ns, station, from_seq)


NS_PER_MS = 1_000_000
_PROBE_NS = 2_000 * NS_PER_MS  # a probe's timeout, as the router's `timeouts.probe_s`
_SCRAPES_PER_S_MAX = 200  # of the whole fleet


class Health:
    """The probes and load reports of all workers. Lifetime: replay. Times are in ns; a `report_ns`
    of 0 means no load reports.
    """

    def __init__(
        self,
        core: Replicas,
        agenda: Agenda,
        relay: Relay,
        feed: Feed,
        *,
        report_ns: int,
        report_lag_ns: int,
        health_ns: int,
        tick_ns: int,
    ) -> None:
        self._core = core
        self._agenda = agenda
        self._relay = relay
        self._feed = feed
        self._stations = relay.stations
        self._leaving: list[Station] = []  # they drain, and are removed once idle
        self._report_ns = report_ns
        self._report_lag_ns = report_lag_ns
        self._health_ns = health_ns
        self._tick_ns = tick_ns

    def start(self) -> None:
        """Plan the first tick and the first reports, spread over their interval."""
        self._agenda.at(self._tick_ns, Rank.TICK, self._tick, None)
        count = len(self._stations)
        for station in self._stations:
            if self._report_ns:
                first_ns = (station.worker_id + 1) * self._interval_ns // count
                self._agenda.at(first_ns, Rank.REPORT, self._scrape, station)

    @property
    def _interval_ns(self) -> int:
        return max(self._report_ns, len(self._stations) * 1000 * NS_PER_MS // _SCRAPES_PER_S_MAX)

    def _tick(self, now_ns: int, _: None) -> None:
        self._agenda.at(now_ns + self._tick_ns, Rank.TICK, self._tick, None)
        self._relay.carry_out(now_ns, self._core.handle_fact(Tick(now_ns / 1e9)))
        if self._leaving:
            self._remove_idle(now_ns)

    def _remove_idle(self, now_ns: int) -> None:
        for station in [one for one in self._leaving if self._relay.idle(one)]:
            self._leaving.remove(station)
            station.gone = True
            self._report_change(now_ns, station, "gone")

    # --- load reports -----------------------------------------------------------------------

    def _scrape(self, now_ns: int, station: Station) -> None:
        if station.gone:
            return
        self._agenda.at(now_ns + self._interval_ns, Rank.REPORT, self._scrape, station)
        if not station.followed or station.hung:
            return
        if not station.alive:
            self._down(now_ns, station)
        elif station.incarnation != station.seen_incarnation:
            self._down(now_ns, station)
            self._ready(now_ns, station)
        else:
            stats = station.engine.stats(station.local_ns(now_ns))
            used_tokens = float(stats.used_blocks * station.facts.block_size)
            what = (station, station.stream, stats.running, stats.waiting, used_tokens)
            if self._report_lag_ns:
                self._agenda.at(now_ns + self._report_lag_ns, Rank.REPORT, self._report, what)
            else:
                self._report(now_ns, what)

    def _report(self, now_ns: int, what: tuple[Station, int, int, int, float]) -> None:
        station, stream, running, waiting, used_tokens = what
        if station.followed and station.stream == stream:
            fact = LoadReport(now_ns / 1e9, station.worker_id, running, waiting, used_tokens)
            self._relay.carry_out(now_ns, self._core.handle_fact(fact))

    # --- down and back ----------------------------------------------------------------------

    def joined(self, now_ns: int, station: Station) -> None:
        """Tell the core that a new worker was recognized, and probe it from now on."""
        self._ready(now_ns, station)
        if self._report_ns:
            self._agenda.at(now_ns + self._interval_ns, Rank.REPORT, self._scrape, station)

    def drain(self, now_ns: int, station: Station) -> None:
        """Drain a worker, as an operator would: it finishes its requests and is removed once it is
        idle.
        """
        station.draining = True
        self._leaving.append(station)
        if station.followed:
            self._report_change(now_ns, station, "draining")

    def died(self, now_ns: int, station: Station) -> None:
        """Note that a worker's process ended; the router has not noticed yet."""
        probe_ns = self._next_probe_ns(now_ns, station)
        self._agenda.at(probe_ns, Rank.HEALTH, self._probe_dead, station)

    def hung(self, now_ns: int, station: Station) -> None:
        """Note that a worker's process stopped.

        It counts as down when two probes in a row have timed out.
        """
        second_ns = self._next_probe_ns(now_ns, station) + _PROBE_NS + self._health_ns
        what = (station, station.hung_since_ns)
        self._agenda.at(second_ns + _PROBE_NS, Rank.HEALTH, self._probe_hung, what)

    def serves(self, now_ns: int, station: Station) -> None:
        """Note that a worker's process answers again.

        If it was down, the router recognizes it again at the next probe.
        """
        probe_ns = self._next_probe_ns(now_ns, station)
        self._agenda.at(probe_ns, Rank.HEALTH, self._recognize, station)

    def _next_probe_ns(self, now_ns: int, station: Station) -> int:
        """Return the time of a worker's first probe at or after now; workers are probed one after
        the other.
        """
        offset_ns = station.worker_id * self._health_ns // len(self._stations)
        return now_ns + (offset_ns - now_ns) % self._health_ns

    def _probe_dead(self, now_ns: int, station: Station) -> None:
        if not station.alive:
            self._down(now_ns, station)

    def _probe_hung(self, now_ns: int, what: tuple[Station, int]) -> None:
        station, since_ns = what
        if station.hung_since_ns != since_ns or not station.followed:
            return
        self._down(now_ns, station)
        if any(s is not station and s.followed and not s.draining for s in self._stations):
            for row in self._relay.silent_rows(station):  # others can answer them
                if row in station.parked:
                    station.parked.remove(row)
                else:
                    station.abandoned.append(row)
                self._relay.give_up(now_ns, (row, "early_close", 0))

    def _recognize(self, now_ns: int, station: Station) -> None:
        if station.alive and not station.hung and not station.followed and not station.gone:
            self._ready(now_ns, station)

    def _down(self, now_ns: int, station: Station) -> None:
        if station.followed and not station.gone:
            station.followed = False
            station.stream += 1  # events still on their way are dropped
            self._report_change(now_ns, station, "down")

    def _ready(self, now_ns: int, station: Station) -> None:
        station.followed = True
        station.seen_incarnation = station.incarnation
        self._report_change(now_ns, station, "draining" if station.draining else "ready")
        self._feed.subscribe(now_ns, station)

    def _report_change(self, now_ns: int, station: Station, state: str) -> None:
        facts = None if state in ("down", "gone") else station.facts
        fact = WorkerChange(now_ns / 1e9, station.worker_id, state, facts)  # type: ignore[arg-type]
        self._relay.carry_out(now_ns, self._core.handle_fact(fact))
