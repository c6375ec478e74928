"""Requests at their workers: into the queue, step by step, and what comes out on its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.contract import Hashes
from simulator.replay.agenda import Agenda, Rank
from simulator.replay.live import Live
from simulator.replay.station import Station

Changes = list[tuple[int, int | None, Hashes]]
Answer = tuple[Station, list[int], list[int], list[int]]  # first tokens, their hits, finished
# A refusal that another worker may not share: an engine answers 503 to it, 400 to the others.
_QUEUE_FULL = "queue_full"
BUSY = "busy"  # why a request broken by it did: load, and no fault of the worker's


class Serving:
    """All workers' engines. Lifetime: replay. News takes `network_ns` to the router:

    `on_answer` tokens, `on_refused` (row, code) the worker's 400, `on_broken` (row, why, output
    tokens given) a connection that ended or a 503. `on_changes` is told of caches at once.
    """

    on_answer: Callable[[int, Answer], None]
    on_refused: Callable[[int, tuple[int, str]], None]
    on_broken: Callable[[int, tuple[int, str, int]], None]
    on_changes: Callable[[int, Station, Changes], None]

    def __init__(self, agenda: Agenda, live: dict[int, Live], network_ns: int) -> None:
        self._agenda = agenda
        self._live = live
        self._network_ns = network_ns

    def send(self, now_ns: int, station: Station, row: int) -> None:
        """A request leaves for its worker."""
        self._agenda.at(now_ns + self._network_ns, Rank.SEND, self._reach, (station, row))

    def _reach(self, now_ns: int, what: tuple[Station, int]) -> None:
        station, row = what
        live = self._live.get(row)
        if live is None or live.station is not station:
            return  # the router closed the connection meanwhile
        if not station.alive:
            self.broken(now_ns, row, "connect")
        elif station.hung:
            station.parked.append(row)
        else:
            self.enter(now_ns, station, row)

    def enter(self, now_ns: int, station: Station, row: int) -> None:
        """The worker takes a request into its queue, or refuses it."""
        live = self._live[row]
        job = live.turn.job
        refusal = station.engine.add(
            row,
            live.chain,
            job.prompt_tokens,
            job.output_tokens,
            job.priority,
            now_ns - station.offset_ns,
        )
        if not refusal:
            self.look_again(station)
        elif refusal == _QUEUE_FULL:
            self.broken(now_ns, row, BUSY)
        else:
            self._reply(now_ns, self.on_refused, (row, refusal))

    def broken(self, now_ns: int, row: int, reason: str, output_tokens: int = 0) -> None:
        """A worker failed a request just now; it had given so many tokens."""
        self._reply(now_ns, self.on_broken, (row, reason, output_tokens))

    def look_again(self, station: Station) -> None:
        """Plan to look at a worker when something of it can next be seen."""
        next_ns = station.engine.next_ns()
        if next_ns < 0:
            station.wake_ns = -1
            return
        next_ns += station.offset_ns
        if next_ns != station.wake_ns:
            station.wake_ns = next_ns
            self._agenda.wake(next_ns, station.worker_id, self._look, station)

    def _look(self, now_ns: int, station: Station) -> None:
        # A look that was planned before something changed the worker's course is passed over.
        if now_ns == station.wake_ns and not station.hung:
            station.wake_ns = -1
            self.gather(now_ns, station)
            self.look_again(station)

    def gather(self, now_ns: int, station: Station) -> None:
        """Send off what a worker has given since last time."""
        first, hit_tokens, finished, changes = station.engine.advance(station.local_ns(now_ns))
        if first or finished:
            self._reply(now_ns, self.on_answer, (station, first, hit_tokens, finished))
        if changes:
            self.on_changes(now_ns, station, changes)

    def _reply(self, now_ns: int, take: Callable[[int, Any], None], what: object) -> None:
        self._agenda.at(now_ns + self._network_ns, Rank.ANSWER, take, what)
