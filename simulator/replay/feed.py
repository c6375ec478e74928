"""KV events on their way to the router: late, lost, asked for again; `router.events` live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.contract import Hashes
from policies.facts import KvEvent, KvEvents, ReplayEnd
from simulator.replay.agenda import Agenda, Rank
from simulator.replay.relay import Relay
from simulator.replay.replicas import Replicas
from simulator.replay.station import Station

# Of `router.events.missed`: pauses after a replay that was answered, and after one that was not.
_BETWEEN_SYNCS_NS = 100_000_000
_ASK_AGAIN_NS = 1_000_000_000

Source = Literal["live", "replay", "snapshot"]


class Feed:
    """All workers' event streams. Lifetime: replay."""

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
        relay.on_resync = self._ask

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
            self._relay.carry_out(now_ns, self._core.on_kv_events(fact))

    # --- what was missed --------------------------------------------------------------------

    def subscribe(self, now_ns: int, station: Station) -> None:
        """The router begins to follow the worker's stream: it asks for all there is."""
        station.stream += 1
        station.syncing = False
        station.wanted_seq = -1
        if station.facts.has_events:
            self._ask(now_ns, station, 0)

    def start(self, station: Station) -> None:
        """As `subscribe`, of an engine that has published nothing yet: answered at once."""
        if station.facts.has_events:
            self._core.on_kv_events(KvEvents(0.0, station.worker_id, -1, (), "snapshot"))
            self._core.on_replay_end(ReplayEnd(0.0, station.worker_id, True))

    def _ask(self, now_ns: int, station: Station, from_seq: int) -> None:
        """One request at a time; one more waits, and any further one is said by it."""
        if station.syncing:
            if station.wanted_seq < 0:
                station.wanted_seq = from_seq
            return
        station.syncing = True
        self.resyncs += 1
        what = (station, station.stream, from_seq)
        self._agenda.at(now_ns + self._resync_ns, Rank.EVENTS, self._sync, what)

    def _sync(self, now_ns: int, what: tuple[Station, int, int]) -> None:
        """The worker answered: its whole cache for a late joiner, else what it kept."""
        station, stream, from_seq = what
        if station.stream != stream:
            return
        answered = station.alive and not station.hung
        if answered:
            for seq, events, source in self._answer(now_ns, station, from_seq):
                fact = KvEvents(now_ns / 1e9, station.worker_id, seq, events, source)
                self._relay.carry_out(now_ns, self._core.on_kv_events(fact))
        if station.wanted_seq < 0:  # else the next one speaks for the gap that is open now
            fact_end = ReplayEnd(now_ns / 1e9, station.worker_id, answered)
            self._relay.carry_out(now_ns, self._core.on_replay_end(fact_end))
        if not answered and station.wanted_seq < 0:
            station.wanted_seq = 0  # its whole cache mends what no replay can
        pause_ns = _BETWEEN_SYNCS_NS if answered else _ASK_AGAIN_NS
        self._agenda.at(now_ns + pause_ns, Rank.EVENTS, self._rested, (station, stream))

    def _answer(
        self, now_ns: int, station: Station, from_seq: int
    ) -> list[tuple[int, tuple[KvEvent, ...], Source]]:
        self._relay.serving.gather(now_ns, station)  # what is visible has been published, too
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
            self._ask(now_ns, station, from_seq)
