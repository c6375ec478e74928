"""Carries each simulated request from its arrival to its end, as the live router does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from policies.contract import Hashes
from policies.facts import Arrival, Failure, Finish, FirstToken, Prefilled, Probed, Progress
from router.core.contract.actions import Action, Dispatch, Ejected, Probe, Reject, Resync
from simulator.replay.agenda import Agenda, Rank
from simulator.replay.arrivals import Arrivals, Live, NamedSessions, TimedTurn
from simulator.replay.observer import Observer
from simulator.replay.replicas import Replicas
from simulator.replay.result import NEVER, Book, Verdict
from simulator.replay.station import Station
from simulator.replay.transfers import Transfers
from simulator.traces.chain import Chainer

Changes = list[tuple[int, int | None, Hashes]]
Answer = tuple[Station, list[int], list[int], list[int]]  # first tokens, their hits, finished
# A refusal that another worker may not share: an engine answers 503 to it, 400 to the others.
_QUEUE_FULL = "queue_full"
BUSY = "busy"  # reason of a request that failed by load, not by a fault of the worker
_RETRY_AFTER_S = 1.0  # that our engine's 503 says (engine.server.errors)


class Serving:
    """The engines of all workers of a replay.

    Lifetime: replay. An engine's output reaches the router after `network_ns`: `on_answer` gets
    tokens, `on_refused` (row, code) gets an answer 400 of the worker, and `on_broken` (row, reason,
    output tokens so far) gets a broken connection or a 503. `on_changes` gets changes of caches at
    once.
    """

    on_answer: Callable[[int, Answer], None]
    on_refused: Callable[[int, tuple[int, str]], None]
    on_broken: Callable[[int, tuple[int, str, int]], None]
    on_changes: Callable[[int, Station, Changes], None]

    def __init__(self, agenda: Agenda, live: dict[int, Live], network_ns: int) -> None:
        self.transfers: Transfers | None = None  # of workers with roles
        self._agenda = agenda
        self._live = live
        self._network_ns = network_ns

    def send(self, now_ns: int, station: Station, row: int) -> None:
        """Send a request to its worker."""
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
        """Put a request into the worker's queue, or refuse it."""
        live = self._live[row]
        job, transfers = live.turn.job, self.transfers
        of_legs: tuple[bool, ...] = ()  # its prompt's KV: received, kept for another worker
        if transfers is not None:
            imports = live.leg == "decode" and transfers.wanted(row)
            of_legs = (imports, live.leg == "prefill")
        refusal = station.engine.add(
            row,
            live.chain,
            job.prompt_tokens,
            1 if live.leg == "prefill" else job.output_tokens,
            job.priority,
            now_ns - station.offset_ns,
            *of_legs,
        )
        if refusal and transfers is not None:
            transfers.unwanted(now_ns, row)
        if not refusal:
            self.look_again(station)
        elif refusal == _QUEUE_FULL:
            self.broken(now_ns, row, BUSY)
        else:
            self._reply(now_ns, self.on_refused, (row, refusal))

    def broken(self, now_ns: int, row: int, reason: str, output_tokens: int = 0) -> None:
        """Report that a worker just failed a request, after it had sent this number of output
        tokens.
        """
        self._reply(now_ns, self.on_broken, (row, reason, output_tokens))

    def look_again(self, station: Station) -> None:
        """Plan a call for the next time at which something visible happens in a worker."""
        next_ns = station.engine.next_ns()
        if next_ns < 0:
            station.wake_ns = -1
            return
        next_ns += station.offset_ns
        if next_ns != station.wake_ns:
            station.wake_ns = next_ns
            self._agenda.wake(next_ns, station.worker_id, self._look, station)

    def _look(self, now_ns: int, station: Station) -> None:
        # A planned call is skipped if the worker's course has changed since then.
        if now_ns == station.wake_ns and not station.hung:
            station.wake_ns = -1
            self.gather(now_ns, station)
            self.look_again(station)

    def gather(self, now_ns: int, station: Station) -> None:
        """Send to the router what a worker has produced since the last call."""
        first, hit_tokens, finished, changes = station.engine.advance(station.local_ns(now_ns))
        if self.transfers is not None:
            self._move(now_ns, station, self.transfers, finished)
        if first or finished:
            self._reply(now_ns, self.on_answer, (station, first, hit_tokens, finished))
        if changes:
            self.on_changes(now_ns, station, changes)

    def _move(
        self, now_ns: int, station: Station, transfers: Transfers, finished: list[int]
    ) -> None:
        """Keep the KV of prefills that ended at this worker for decode workers, and start reading
        the KV that this worker waits for.
        """
        for row in finished:
            live = self._live.get(row)
            if live is not None and live.station is station and live.leg == "prefill":
                transfers.keep(now_ns, station, row)
        for row, start, stop in station.engine.take_reads(station.local_ns(now_ns)):
            transfers.read(now_ns, station, row, stop - start)

    def _reply(self, now_ns: int, take: Callable[[int, Any], None], what: object) -> None:
        self._agenda.at(now_ns + self._network_ns, Rank.ANSWER, take, what)


MODEL = "model"
_PROBE_S = 2.0  # longest wait for a worker's answer to a probe
_REPORT_EVERY = 256  # ends of requests between two calls of `on_ended`


class Relay:
    """Gives facts to the decision core, as the live router does, and carries out its actions.
    Lifetime: replay.

    `on_resync(now_ns, station, from_seq)` is called when the core misses events.
    """

    def __init__(
        self,
        core: Replicas,
        agenda: Agenda,
        stations: list[Station],
        arrivals: Arrivals,
        chainer: Chainer,
        network_ns: int,
        progress_ns: int,
        observers: Sequence[Observer],
        named: NamedSessions,
    ) -> None:
        self.core = core
        self.book = Book()
        self.stations = stations
        self.coming = 0  # arrivals on the agenda
        self.ended = 0
        self.last_end_ns = 0
        self.ejections = 0
        self.on_resync: Callable[[int, Station, int], None]
        self.on_ended: Callable[[int], None] | None = None  # called every `_REPORT_EVERY` ends
        self._agenda = agenda
        self._arrivals = arrivals
        self._chainer = chainer
        self._block_size = chainer.engine_block
        self._progress_ns = progress_ns
        self._observers = tuple(observers)
        self._named = named
        self._live: dict[int, Live] = {}
        self.serving = Serving(agenda, self._live, network_ns)
        self.serving.on_answer = self._answered
        self.serving.on_refused = self._refused
        self.serving.on_broken = self.give_up
        self._growing: deque[Station] = deque(stations)  # by `Station.progress_ns`
        for observer in observers:
            observer.on_start(self.book)

    # --- arrivals ---------------------------------------------------------------------------

    def start(self) -> None:
        """Plan the first arrival."""
        self._plan(self._arrivals.pull(), self._arrive_next)

    def joined(self, station: Station) -> None:
        """Tell the core that a worker joined."""
        self._growing.appendleft(station)

    def _plan(self, turn: TimedTurn | None, arrive: Callable[[int, TimedTurn], None]) -> None:
        if turn is not None:
            self.coming += 1
            self._agenda.at(max(turn.at_ns, self._agenda.now_ns), Rank.ARRIVAL, arrive, turn)

    def _arrive_next(self, now_ns: int, turn: TimedTurn) -> None:
        """Plan the next arrival whose time is known beforehand; the agenda has only one of these at
        a time.
        """
        self._plan(self._arrivals.pull(), self._arrive_next)
        self._arrive(now_ns, turn)

    def _arrive(self, now_ns: int, turn: TimedTurn) -> None:
        self.coming -= 1
        self._report_progress(now_ns)
        job, size = turn.job, self._block_size
        blocks = job.prompt_tokens // size
        row = self.book.add(now_ns, job.prompt_tokens, blocks, job.session, job.group)
        # Index and engine take whole buffers; of a source with small blocks it is every k-th name.
        chain = np.ascontiguousarray(self._chainer.chain(job, row))
        self._live[row] = Live(turn, chain)
        session, identity = self._named.of(job)
        arrival = Arrival(
            now_s=now_ns / 1e9,
            request_id=row,
            model=MODEL,
            prompt_tokens=job.prompt_tokens,
            chains={size: chain if len(chain) == blocks else chain[:blocks]},
            session=session,
            identity=identity,
            tenant=job.tenant,
            priority=job.priority,
            splits=self.serving.transfers is not None,
        )
        self.carry_out(now_ns, self.core.handle_fact(arrival))

    def _report_progress(self, now_ns: int) -> None:
        """Tell the core how many tokens a worker's answers have.

        That happens at most every `progress_ns`, and only before a decision that could use it,
        because nothing else reads the progress.
        """
        growing, due_ns = self._growing, now_ns - self._progress_ns
        for _ in range(len(growing)):
            if growing[0].progress_ns > due_ns:
                break
            station = growing.popleft()
            if station.gone:
                continue
            station.progress_ns = now_ns
            growing.append(station)
            if station.hung or not station.alive:
                continue
            rows, tokens = station.engine.progress(now_ns - station.offset_ns)
            if len(rows):
                now_s, tell = now_ns / 1e9, self.core.handle_fact
                for row, count in zip(rows.tolist(), tokens.tolist(), strict=True):
                    tell(Progress(now_s, row, count))

    # --- what the core asks for -------------------------------------------------------------

    def carry_out(self, now_ns: int, actions: list[Action]) -> None:
        """Carry out the actions that the core returned."""
        for action in actions:
            if isinstance(action, Dispatch):
                self._dispatch(now_ns, action)
            elif isinstance(action, Reject):
                self.book.turned_away(action.request_id, action.code)
                self._end(now_ns, action.request_id, Verdict.REJECTED)
            elif isinstance(action, Resync):
                self.on_resync(now_ns, self.stations[action.worker_id], action.from_seq)
            elif isinstance(action, Ejected):
                self.ejections += 1
            elif isinstance(action, Probe):
                self._probe(now_ns, action)
            # A held request waits for a later action; a worker is removed when it is idle only,
            # so nothing is ever cancelled.

    def _dispatch(self, now_ns: int, action: Dispatch) -> None:
        row, book = action.request_id, self.book
        live, station = self._live[row], self.stations[action.worker_id]
        live.station, live.leg = station, action.stages[-1].role
        station.dispatches += 1
        book.worker[row] = action.worker_id
        if live.leg != "decode":  # whose prompt was sent, expected and found with the other leg
            book.dispatched_ns[row] = now_ns
            decision = action.decision
            book.expected_hit_tokens[row] = decision.hit_tokens + decision.loaded_tokens
            book.hit_tokens[row] = NEVER
        if not book.attempts[row]:
            book.held_ns[row] = now_ns - book.arrival_ns[row]
        book.attempts[row] += 1
        for observer in self._observers:
            observer.on_dispatch(row, live.turn.job, live.chain, action.decision, self.stations)
        self.serving.send(now_ns + round(action.after_s * 1e9), station, row)

    def _probe(self, now_ns: int, action: Probe) -> None:
        """Probe a worker. If the worker hangs, the probe fails when its time limit is over."""
        station = self.stations[action.worker_id]
        within_s = _PROBE_S if action.within_s is None else action.within_s
        after_ns = round(within_s * 1e9) if station.hung else 0
        what = (station, station.alive and not station.hung)
        self._agenda.at(now_ns + after_ns, Rank.HEALTH, self._probed, what)

    def _probed(self, now_ns: int, what: tuple[Station, bool]) -> None:
        station, well = what
        if not station.gone:
            fact = Probed(now_ns / 1e9, station.worker_id, well)
            self.carry_out(now_ns, self.core.handle_fact(fact))

    # --- answers ----------------------------------------------------------------------------

    def _answered(self, now_ns: int, what: tuple[Station, list[int], list[int], list[int]]) -> None:
        station, first, hit_tokens, finished = what
        now_s, book, live = now_ns / 1e9, self.book, self._live
        for row, hits in zip(first, hit_tokens, strict=True):
            if self._answers(row, station):
                if live[row].leg != "decode":
                    book.hit_tokens[row] = hits
                if live[row].leg != "prefill":
                    live[row].begun = True
                    book.first_token_ns[row] = now_ns
                    self.core.handle_fact(FirstToken(now_s, row))
        for row in finished:
            if self._answers(row, station):
                if live[row].leg == "prefill":
                    fact = Prefilled(now_s, row, book.hit_tokens[row])
                    self.carry_out(now_ns, self.core.handle_fact(fact))
                    continue
                job = live[row].turn.job
                given = min(job.output_tokens, station.sequence_tokens - job.prompt_tokens)
                book.finish_ns[row] = now_ns
                book.output_tokens[row] = given
                # The decode worker does not know the hits of the prefill worker.
                own_hits = None if live[row].leg == "decode" else book.hit_tokens[row]
                actions = self.core.handle_fact(
                    Finish(now_s, row, job.prompt_tokens, own_hits, given)
                )
                self._end(now_ns, row, Verdict.COMPLETED)
                self.carry_out(now_ns, actions)

    def _answers(self, row: int, station: Station) -> bool:
        """Return whether the request still waits for this worker; the router may have sent it
        elsewhere.
        """
        live = self._live.get(row)
        return live is not None and live.station is station

    def _refused(self, now_ns: int, what: tuple[int, str]) -> None:
        """Pass a worker's answer 400 to the client like any other answer, but not as a
        first token.
        """
        row, code = what
        actions = self.core.handle_fact(Finish(now_ns / 1e9, row, refused=True))
        self.book.turned_away(row, code)
        self._end(now_ns, row, Verdict.REJECTED)
        self.carry_out(now_ns, actions)

    def give_up(self, now_ns: int, what: tuple[int, str, int]) -> None:
        """Tell the core that a dispatch failed, with the row, the reason, and the tokens that the
        client got.
        """
        row, reason, output_tokens = what
        live = self._live[row]
        live.station = None
        retry = not live.begun
        blame: Literal["worker", "busy"] = "busy" if reason == BUSY else "worker"
        busy_s = _RETRY_AFTER_S if reason == BUSY else None
        failure = Failure(now_ns / 1e9, row, blame, retry, reason, busy_s=busy_s)
        actions = self.core.handle_fact(failure)
        if not retry:
            # A preempted request is not in `progress`: only its first token is certain.
            self.book.output_tokens[row] = max(output_tokens, 1)
            self._end(now_ns, row, Verdict.FAILED)
        self.carry_out(now_ns, actions)

    def silent_rows(self, station: Station) -> list[int]:
        """Return the requests at a worker whose clients have received nothing yet, oldest first."""
        return [r for r, live in self._live.items() if live.station is station and not live.begun]

    def idle(self, station: Station) -> bool:
        """Return whether a worker has no request."""
        return all(live.station is not station for live in self._live.values())

    # --- ends -------------------------------------------------------------------------------

    def _end(self, now_ns: int, row: int, verdict: Verdict) -> None:
        """End a request. Each request ends exactly once; every replay checks that."""
        live = self._live.pop(row)
        assert self.book.verdict[row] == NEVER, f"request {row} ended twice"
        self.book.verdict[row] = verdict
        if not self.book.attempts[row]:
            self.book.held_ns[row] = now_ns - self.book.arrival_ns[row]
        self.ended += 1
        self.last_end_ns = now_ns
        for observer in self._observers:
            observer.on_end(row)
        if self.on_ended is not None and not self.ended % _REPORT_EVERY:
            self.on_ended(now_ns)
        for turn in self._arrivals.after(live.turn, now_ns):
            self._plan(turn, self._arrive)
        if not self._live and not self.coming:
            self._agenda.over = True

    def check(self) -> None:
        """Raise AssertionError unless every request has ended and the ledger is empty."""
        assert not self._live, f"{len(self._live)} requests never ended"
        assert self.ended == len(self.book), "requests got lost"
        left = self.core.inflight_requests
        assert left == 0, f"the core still counts {left} requests"
