"""Workers that fail are put aside, asked whether they are well, and tried again with one request.

A circuit breaker for each worker (Nygard, Release It!, 2007), opened by failures in a row and by
their rate, as Envoy's outlier detection is, and bounded by a share of the pool like that one.
"""

from __future__ import annotations

from router.core.actions import Action, Probe, PutAside, TakeBack
from router.core.counters import CoreCounters
from router.core.settings import CoreSettings
from router.core.workers import Worker, WorkerTable

STALLED = "stalled"  # the cause: all its streams stand still, and a probe goes unanswered
_BACKOFF_MAX = 16.0  # the time aside grows to at most this many times `recover_s`
_ASK_AGAIN_S = 5.0  # where nobody told a probe's answer


class Outliers:
    """Whom to leave alone for a while. Lifetime: process.

    Only what comes of a request that was sent since a worker was put aside says anything new of
    it: those from before fail by the dozen when a worker dies.
    """

    def __init__(
        self, settings: CoreSettings, workers: WorkerTable, counters: CoreCounters
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._counters = counters
        self._away: set[int] = set()  # those that are not "in"

    def dispatched(self, worker: Worker, request_id: int) -> None:
        """A request is sent there; while it is on trial, no other is until this one's end."""
        repute = worker.repute
        if repute.place == "trial" and repute.trial is None:
            repute.trial = request_id
            self._workers.changed()

    def released(self, worker: Worker, request_id: int) -> None:
        """A request is there no more, however it ended: another may be tried."""
        if worker.repute.trial == request_id:
            worker.repute.trial = None
            self._workers.changed()

    def succeeded(self, worker: Worker, sent_s: float, now_s: float) -> list[Action]:
        """It answered a request sent at `sent_s`."""
        repute = worker.repute
        repute.recent.add(now_s, 1, 0)
        if repute.place == "in":
            repute.failures = 0
            if repute.asides and now_s >= repute.until_s:
                repute.asides = 0  # it has served well for a while: all is forgiven
            return []
        if sent_s < repute.since_s:
            return []
        return self._take_back(worker, now_s)

    def failed(self, worker: Worker, sent_s: float, cause: str, now_s: float) -> list[Action]:
        """It failed a request sent at `sent_s`."""
        repute = worker.repute
        repute.blamed(cause)
        if repute.place != "in":
            on_trial = repute.place == "trial" and sent_s >= repute.since_s
            return self._put_aside(worker, cause, now_s) if on_trial else []
        repute.failures += 1
        repute.recent.add(now_s, 0, 1)
        if repute.failures < self._settings.ejection_failures and not self._too_often(
            worker, now_s
        ):
            return []
        return self._put_aside(worker, cause, now_s)

    def silent(self, worker: Worker, now_s: float) -> list[Action]:
        """All its streams stand still, and it does not answer a probe."""
        worker.repute.blamed(STALLED)
        return self._put_aside(worker, STALLED, now_s) if worker.repute.place == "in" else []

    def due(self, now_s: float) -> list[Action]:
        """Probes of those whose time aside is over."""
        actions: list[Action] = []
        for worker_id in sorted(self._away):
            worker = self._workers.get(worker_id)
            if worker is None or worker.repute.place == "in":  # gone, or back from being down
                self._away.discard(worker_id)
                continue
            repute = worker.repute
            waits = repute.place in ("aside", "asked") and worker.state == "ready"
            if waits and now_s >= repute.until_s:
                repute.place = "asked"
                repute.until_s = now_s + _ASK_AGAIN_S
                actions.append(Probe(worker_id))
        return actions

    def probed(self, worker: Worker, well: bool, now_s: float) -> list[Action]:
        """The answer to the probe of one whose time aside was over."""
        if worker.repute.place != "asked":
            return []
        if not well:
            worker.repute.blamed("probe")
            return self._put_aside(worker, "probe", now_s)
        worker.repute.place = "trial"
        self._workers.changed()
        return []

    def _too_often(self, worker: Worker, now_s: float) -> bool:
        answers, failures = worker.repute.recent.sums(now_s)
        both = answers + failures
        least = self._settings.ejection_requests
        return both >= least and failures >= self._settings.ejection_rate * both

    def _put_aside(self, worker: Worker, cause: str, now_s: float) -> list[Action]:
        repute = worker.repute
        if repute.place == "in":
            if not self._may_spare(worker):
                self._counters.ejections_withheld += 1
                return []
            self._counters.ejections += 1
            self._away.add(worker.worker_id)
        aside_s = self._settings.recover_s * min(2.0**repute.asides, _BACKOFF_MAX)
        repute.place = "aside"
        repute.asides += 1
        repute.failures = 0
        repute.since_s = now_s
        repute.until_s = now_s + aside_s
        repute.trial = None
        repute.recent.clear()
        self._workers.changed()
        return [PutAside(worker.worker_id, aside_s, cause)]

    def _may_spare(self, worker: Worker) -> bool:
        """Whether enough of its pool takes requests without it."""
        pool = [w for w in self._workers.serving(worker.facts.models[0]) if w.state == "ready"]
        away = sum(w.repute.place != "in" for w in pool if w is not worker)
        most = max(int(self._settings.ejection_max_share * len(pool)), 1)
        return away + 1 <= most and away + 1 < len(pool)

    def _take_back(self, worker: Worker, now_s: float) -> list[Action]:
        repute = worker.repute
        repute.place = "in"
        repute.until_s = now_s + self._settings.ejection_window_s
        repute.failures = 0
        repute.trial = None
        repute.recent.clear()
        self._away.discard(worker.worker_id)
        self._workers.changed()
        return [TakeBack(worker.worker_id)]
