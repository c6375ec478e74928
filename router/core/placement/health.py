"""Tracks the health of workers: ejects failing ones, reinstates them, and starts new ones slowly.

Workers that report that they are busy get fewer requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.contract import Ints
from policies.facts import Failure, Finish, Probed, Silence
from router.core.contract.actions import Action, Ejected, Probe, Reinstated
from router.core.contract.counters import CoreCounters
from router.core.contract.settings import CoreSettings
from router.core.placement.eligible import Rows
from router.core.placement.pending import AtWorker, Pending
from router.core.workers.busy import BusyWorkers
from router.core.workers.silence import Silences
from router.core.workers.table import Worker, WorkerTable


class StallDetection:
    """Finds workers whose running streams have all been silent for `stall_s` seconds.

    Lifetime: process.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._streams: dict[int, set[int]] = {}  # worker -> requests past their first token
        self._progress_s: dict[
            int, float
        ] = {}  # worker -> time of its latest byte, or probe answer
        self._probed_s: dict[int, float] = {}  # worker -> when it was probed, until it is heard

    def on_stream_progress(self, worker_id: int, request_id: int, now_s: float) -> None:
        """Record that a worker sent the first or a further part of a streamed answer."""
        streams = self._streams.get(worker_id)
        if streams is None:
            streams = self._streams[worker_id] = set()
        streams.add(request_id)
        self._progress_s[worker_id] = now_s
        self._probed_s.pop(worker_id, None)

    def over(self, worker_id: int, request_id: int) -> None:
        """Record that a request is no longer at a worker."""
        streams = self._streams.get(worker_id)
        if streams is not None:
            streams.discard(request_id)
            if not streams:
                del self._streams[worker_id], self._progress_s[worker_id]
                self._probed_s.pop(worker_id, None)

    def workers_to_probe(self, now_s: float) -> list[int]:
        """Return the ids of silent workers that should be probed now.

        A worker that stays silent is returned again after every `stall_s` seconds.
        """
        limit_s = now_s - self._stall_s
        suspects = [worker_id for worker_id, at_s in self._progress_s.items() if at_s <= limit_s]
        for worker_id in suspects:
            self._progress_s[worker_id] = self._probed_s[worker_id] = now_s
        return suspects

    def probe_answered(self, worker_id: int) -> None:
        """Record that a worker answered a probe, so it is alive although its streams are silent."""
        self._probed_s.pop(worker_id, None)

    def still(self, worker_id: int) -> bool:
        """Return True if a worker has neither answered its latest probe nor sent a token since that
        probe.
        """
        return worker_id in self._probed_s


STALLED = "stalled"  # the cause: no stream of the worker moves, and it does not answer a probe
_BACKOFF_MAX = 16.0  # an ejection lasts at most this many times `recover_s`
_PROBE_AGAIN_S = 5.0  # if no result of a probe has arrived
# The share of a broken answer that each begun answer offsets, and each ended answer again: a
# cumulative sum (Page, "Continuous Inspection Schemes", 1954). The sum stays near 0 if one in
# twenty answers breaks off, also while none has ended yet or none begins any more; beyond one in
# seven it grows.
_MADE_GOOD = 1 / 12


class OutlierDetection:
    """Ejects workers that fail requests too often, so that they get no requests for a while. After
    an ejection, only requests that were sent later count. Otherwise the many requests that fail
    when a worker dies would each count against it. Lifetime: process.
    """

    def __init__(
        self, settings: CoreSettings, workers: WorkerTable, counters: CoreCounters
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._counters = counters
        self._ejected: set[int] = set()  # workers that are not "healthy"

    def dispatched(self, worker: Worker, request_id: int) -> None:
        """Record that a request was sent to a worker.

        A worker that is tried again after an ejection gets no other request until this one ends.
        """
        health = worker.health
        if health.state == "trial" and health.trial is None:
            health.trial = request_id
            self._workers.changed()

    def released(self, worker: Worker, request_id: int) -> None:
        """Record that a request left a worker; a worker on trial may then get the next request."""
        worker.health.running.pop(request_id, None)
        if worker.health.trial == request_id:
            worker.health.trial = None
            self._workers.changed()

    def begun(self, worker: Worker, pending: Pending, now_s: float) -> list[Action]:
        """Count a success of a worker that began an answer; if it was ejected, reinstate it.

        The beginning counts as a success whatever happens to the rest of the answer. Long answers
        end late, so if only their ends counted, failures would be seen first.
        """
        health = worker.health
        pending.begun_by, pending.begun_s = worker.worker_id, now_s
        pending.begun_failed = health.running[pending.arrival.request_id] = health.failed
        if health.state != "healthy":
            if pending.sent_s < health.since_s:
                return []
            return self._reinstate(worker, "it answers a new request", now_s)
        health.recent.add(now_s, 1, 0)
        if health.broken:
            health.broken = max(health.broken - _MADE_GOOD, 0.0)
        return []

    def given_up(self, worker: Worker, pending: Pending) -> None:
        """Count a begun answer as a success of its worker, because the client left early."""
        if pending.begun_by == worker.worker_id:
            worker.health.well_at = max(worker.health.well_at, pending.begun_failed)

    def succeeded(self, worker: Worker, pending: AtWorker, now_s: float) -> list[Action]:
        """Count a completed answer of a worker, and reinstate the worker if it was ejected."""
        health = worker.health
        if pending.begun_by is None:
            health.recent.add(now_s, 1, 0)
        elif health.broken:
            health.broken = max(health.broken - _MADE_GOOD, 0.0)
        if health.state == "healthy":
            health.end_row()
            if health.ejections and now_s >= health.until_s:
                health.ejections = 0  # it has served well for a while: reset the count
            return []
        if pending.sent_s < health.since_s:
            return []
        return self._reinstate(worker, "it answers a new request", now_s)

    def failed(self, worker: Worker, pending: Pending, cause: str, now_s: float) -> list[Action]:
        """Count a failure of a worker, and eject the worker if it fails too often.

        `cause` is the reason under which the failure is counted.
        """
        health, settings = worker.health, self._settings
        health.count_failure(cause)
        if worker.silent is not None:  # it gets no new requests, and may be healthy
            return []
        if health.state != "healthy":
            on_trial = health.state == "trial" and pending.sent_s >= health.since_s
            event = "it fails a new request"
            return self._eject(worker, event, cause, now_s) if on_trial else []
        health.failed += 1
        health.recent.add(now_s, 0, 1)
        broke_off = pending.begun_by == worker.worker_id
        if broke_off:
            health.recent.take_back(pending.begun_s)
            health.broken = min(health.broken + 1.0, float(settings.ejection_breaks))
        if (
            health.failures < settings.ejection_failures + broke_off  # it had begun well, after all
            and health.broken < settings.ejection_breaks
            and not self._too_often(worker, now_s)
        ):
            return []
        return self._eject(worker, "too many requests fail", cause, now_s)

    def silent(self, worker: Worker, now_s: float) -> list[Action]:
        """Eject a worker whose streams are all silent and that did not answer a probe."""
        worker.health.count_failure(STALLED)
        if worker.health.state != "healthy":
            return []
        ejected = self._eject(worker, "all its streams stall", STALLED, now_s)
        worker.health.stalled = bool(ejected)
        return ejected

    def answers(self, worker: Worker, now_s: float) -> list[Action]:
        """Reinstate a worker that was ejected because it was silent and that now answers probes."""
        stalled = worker.health.stalled
        return self._reinstate(worker, "its stall ends", now_s) if stalled else []

    def due(self, now_s: float) -> list[Action]:
        """Return probes of workers whose ejection is over, and reinstate workers that got no
        request during their trial. A worker that answers its probe is on trial: its next request
        decides. But a policy may send every request to workers with a cached prefix. So a worker
        that gets no request for long is reinstated; otherwise it would stay on trial for ever.
        """
        actions: list[Action] = []
        for worker_id in sorted(self._ejected):
            worker = self._workers.get(worker_id)
            # Removed, or healthy again after being down.
            if worker is None or worker.health.state == "healthy":
                self._ejected.discard(worker_id)
                continue
            health = worker.health
            if worker.state != "ready" or now_s < health.until_s:
                continue
            if health.state == "trial":
                if health.trial is None:
                    actions += self._reinstate(worker, "no request came to try it", now_s)
            else:
                again = health.state == "probed"
                health.move("its probe gets no answer" if again else "its ejection ends")
                health.until_s = now_s + _PROBE_AGAIN_S
                actions.append(Probe(worker_id))
        return actions

    def probed(self, worker: Worker, well: bool, now_s: float) -> list[Action]:
        """Put an ejected worker on trial if its probe succeeded, or else eject it again."""
        if worker.health.state != "probed":
            return []
        if not well:
            worker.health.count_failure("probe")
            return self._eject(worker, "its probe fails", "probe", now_s)
        worker.health.move("its probe succeeds")
        worker.health.until_s = now_s + self._settings.recover_s
        self._workers.changed()
        return []

    def _too_often(self, worker: Worker, now_s: float) -> bool:
        answers, failures = worker.health.recent.sums(now_s)
        both = answers + failures
        least = self._settings.ejection_requests
        return both >= least and failures >= self._settings.ejection_rate * both

    def _eject(self, worker: Worker, event: str, cause: str, now_s: float) -> list[Action]:
        """Eject the worker for a while, unless too few healthy workers would remain.

        `event` names the change of state in `HEALTH_STATES`, and `cause` is the failure.
        """
        health = worker.health
        if health.state == "healthy":
            if not self._may_eject(worker):
                self._counters.ejections_withheld += 1
                return []
            self._counters.ejections += 1
            self._ejected.add(worker.worker_id)
        ejected_s = self._settings.recover_s * min(2.0**health.ejections, _BACKOFF_MAX)
        health.move(event)
        health.ejections += 1
        health.stalled = False
        health.end_row()
        # So that its next broken answer ejects it again.
        health.broken = max(health.broken - 1.0, 0.0)
        health.since_s = now_s
        health.until_s = now_s + ejected_s
        health.trial = None
        health.recent.clear()
        self._workers.changed()
        return [Ejected(worker.worker_id, ejected_s, cause)]

    def _may_eject(self, worker: Worker) -> bool:
        """Return True if enough workers of the model take requests without this one."""
        pool = [w for w in self._workers.serving(worker.facts.models[0]) if w.state == "ready"]
        away = sum(w.health.state != "healthy" for w in pool if w is not worker)
        most = max(int(self._settings.ejection_max_share * len(pool)), 1)
        return away + 1 <= most and away + 1 < len(pool)

    def _reinstate(self, worker: Worker, event: str, now_s: float) -> list[Action]:
        """Mark the worker as healthy, so that it gets requests again.

        `event` names the change of state in `HEALTH_STATES`.
        """
        health = worker.health
        health.move(event)
        health.stalled = False
        health.until_s = now_s + self._settings.ejection_window_s
        health.end_row()
        health.trial = None
        health.recent.clear()
        self._ejected.discard(worker.worker_id)
        self._workers.changed()
        return [Reinstated(worker.worker_id)]


# Golden ratio: the positions of two requests in a row are as far apart as possible.
_GOLDEN = 0.6180339887498949
# Between two workers, so that they are not left out of the same requests.
_BETWEEN = 0.7548776662466927
_KNOWN_MAX = 64


class SlowStart:
    """Gives a new worker in a running pool few requests at first, and a share that grows with time.

    Lifetime: process.
    """

    def __init__(self, slow_start_s: float) -> None:
        self._slow_start_s = slow_start_s
        self._since: dict[int, float] = {}  # by worker: when it joined
        self._rows: Rows | None = None  # the rows whose selections are in `_known`
        self._known: dict[tuple[int, ...], Rows] = {}  # by the rows left out

    def __len__(self) -> int:
        """Return the number of workers that are in slow start.

        A worker whose slow start has just ended counts until the next decision.
        """
        return len(self._since)

    def joined(self, worker: Worker, others: Iterable[Worker], now_s: float) -> None:
        """Begin the slow start of a new worker, if another worker of its model has run
        long enough.
        """
        models = set(worker.facts.models)
        settled_s = now_s - self._slow_start_s
        if self._slow_start_s > 0.0 and any(
            one.is_in and one.joined_s <= settled_s and models.intersection(one.facts.models)
            for one in others
        ):
            self._since[worker.worker_id] = now_s

    def left(self, worker_id: int) -> None:
        """Forget the slow start of a worker that was removed."""
        self._since.pop(worker_id, None)

    def share(self, worker_id: int, now_s: float) -> float:
        """Return the share of new requests that a worker may get, 0..1; 1 after its slow start."""
        since_s = self._since.get(worker_id)
        return (
            1.0 if since_s is None else min(max((now_s - since_s) / self._slow_start_s, 0.0), 1.0)
        )

    def rows(self, serial: int, rows: Rows, hits: Ints, now_s: float) -> Rows:
        """Return `rows` without the workers in slow start that may not get this request.

        `serial` is the request's number, which decides if it belongs to a worker's share. `hits`
        are the request's hit tokens on each worker, int64[rows]. A worker with more hits than all
        others stays in the result. The result is `rows` itself if no worker is left out, or if none
        would be left.
        """
        starting = [(row, w) for row, w in enumerate(rows.worker_ids) if w in self._since]
        if not starting or len(starting) == len(rows):
            return rows
        out: list[int] = []
        inside = {row for row, _ in starting}
        best = max(int(hits[row]) for row in range(len(rows)) if row not in inside)
        for row, worker_id in starting:
            share = self.share(worker_id, now_s)
            if share >= 1.0:
                del self._since[worker_id]
            elif (serial * _GOLDEN + worker_id * _BETWEEN) % 1.0 >= share and hits[row] <= best:
                out.append(row)
        return self._without(rows, tuple(out)) if out else rows

    def _without(self, rows: Rows, out: tuple[int, ...]) -> Rows:
        if self._rows is not rows or len(self._known) >= _KNOWN_MAX:
            self._rows = rows
            self._known.clear()
        known = self._known.get(out)
        if known is None:
            left = [worker for row, worker in enumerate(rows.workers) if row not in out]
            known = self._known[out] = Rows.of(left)
        return known


class Health:
    """Tracks the requests at each worker, and decides which workers are healthy and get requests.

    The calls come in the order of time. Lifetime: process.
    """

    def __init__(
        self, settings: CoreSettings, workers: WorkerTable, counters: CoreCounters
    ) -> None:
        self._workers = workers
        self._outliers = OutlierDetection(settings, workers, counters)
        self.busy = BusyWorkers(settings, workers)
        self._stalls = StallDetection(settings.stall_s)
        self._stall_s = settings.stall_s
        self.silences = Silences(settings, workers, self._stalls.still)

    def sent(self, worker: Worker, pending: AtWorker, now_s: float) -> None:
        """Record that a request was charged to a worker."""
        pending.sent_s, pending.begun_by = now_s, None
        self._outliers.dispatched(worker, pending.arrival.request_id)

    def begun(self, worker_id: int, pending: Pending, now_s: float) -> list[Action]:
        """Record that a worker began to answer a request, which shows that the worker is alive."""
        self.grew(worker_id, pending.arrival.request_id, now_s)
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        if worker.spell.times:
            self.busy.request_answered(worker, pending.sent_s)
        return self._outliers.begun(worker, pending, now_s)

    def grew(self, worker_id: int, request_id: int, now_s: float) -> None:
        """Record that a worker sent a further part of an answer."""
        self._stalls.on_stream_progress(worker_id, request_id, now_s)

    def left(self, worker_id: int, request_id: int) -> None:
        """Record that a request is no longer at its worker, for any reason."""
        self._stalls.over(worker_id, request_id)
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._outliers.released(worker, request_id)

    def given_up(self, worker: Worker | None, pending: Pending) -> None:
        """Record that the client of a request left before the end of the answer."""
        if worker is not None:
            self._outliers.given_up(worker, pending)

    def answered(self, worker: Worker | None, pending: AtWorker, fact: Finish) -> list[Action]:
        """Record that an answer is complete; `worker` is None if the worker was removed since."""
        if worker is None or fact.refused:
            return []
        if worker.spell.times:
            self.busy.request_answered(worker, pending.sent_s)
        return self._outliers.succeeded(worker, pending, fact.now_s)

    def failed(self, worker: Worker, pending: Pending, fact: Failure) -> list[Action]:
        """Record a failed request, and count it against its worker if the worker is at fault.

        If the worker refused the request as busy, record the worker as busy instead.
        """
        if fact.busy_s is not None:
            return self.busy.on_busy_refusal(worker, pending.sent_s, fact.busy_s, fact.now_s)
        if fact.blame != "worker":
            return []
        return self._outliers.failed(worker, pending, fact.reason, fact.now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due: probes of silent or ejected workers, and reports about
        busy and silent workers.
        """
        actions = [*self.silences.look(), *self.busy.tick(now_s), *self._outliers.due(now_s)]
        for worker_id in self._stalls.workers_to_probe(now_s):
            worker = self._workers.get(worker_id)
            if worker is not None and worker.is_in:
                actions.append(Probe(worker_id, self._stall_s))
        return actions

    def silence(self, fact: Silence) -> list[Action]:
        """Record that a worker stops answering the router's probes, or answers them again."""
        worker = self._workers.get(fact.worker_id)
        actions = self.silences.on_silence(fact)
        if worker is not None and not fact.probes:
            self._stalls.probe_answered(fact.worker_id)
            actions += self._outliers.answers(worker, fact.now_s)
        return actions

    def probed(self, fact: Probed) -> list[Action]:
        """Handle the result of a probe of a worker."""
        worker = self._workers.get(fact.worker_id)
        if worker is None or worker.state != "ready":
            return []
        if worker.health.state == "healthy":
            if fact.well:
                self._stalls.probe_answered(fact.worker_id)
                return []
            # If other workers are silent, too, the next probe tells more.
            known = worker.silent is not None or not self._stalls.still(fact.worker_id)
            if known or not self.silences.alone(worker):
                return []
            return self._outliers.silent(worker, fact.now_s)
        return self._outliers.probed(worker, fact.well, fact.now_s)
