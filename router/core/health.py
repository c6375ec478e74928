"""What the core makes of how requests fare at their workers: whom to leave alone, whom to ask."""

from __future__ import annotations

from policies.facts import Failure, Finish, Probed
from router.core.actions import Action, Probe
from router.core.counters import CoreCounters
from router.core.hold_queue import Pending
from router.core.outliers import Outliers
from router.core.settings import CoreSettings
from router.core.silence import Silence
from router.core.workers import Worker, WorkerTable


class Health:
    """Told of every request's way, in the order of time. Lifetime: process."""

    def __init__(
        self, settings: CoreSettings, workers: WorkerTable, counters: CoreCounters
    ) -> None:
        self._workers = workers
        self._outliers = Outliers(settings, workers, counters)
        self._silence = Silence(settings.stall_s)
        self._stall_s = settings.stall_s

    def sent(self, worker: Worker, pending: Pending, now_s: float) -> None:
        """A request was charged to a worker."""
        pending.sent_s = now_s
        self._outliers.dispatched(worker, pending.arrival.request_id)

    def begun(self, worker_id: int, pending: Pending, now_s: float) -> list[Action]:
        """Its answer began: the worker works."""
        self.grew(worker_id, pending.arrival.request_id, now_s)
        worker = self._workers.get(worker_id)
        if worker is None or worker.repute.place == "in":  # its end will say so as well
            return []
        return self._outliers.succeeded(worker, pending.sent_s, now_s)

    def grew(self, worker_id: int, request_id: int, now_s: float) -> None:
        """Its answer grew."""
        self._silence.heard(worker_id, request_id, now_s)

    def left(self, worker_id: int, request_id: int) -> None:
        """It is at this worker no more, whatever the reason."""
        self._silence.over(worker_id, request_id)
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._outliers.released(worker, request_id)

    def answered(self, worker: Worker | None, pending: Pending, fact: Finish) -> list[Action]:
        """Its answer is complete; `worker` None: by one that is gone since."""
        if worker is None or fact.refused:
            return []
        return self._outliers.succeeded(worker, pending.sent_s, fact.now_s)

    def failed(self, worker: Worker, pending: Pending, fact: Failure) -> list[Action]:
        """The worker is to blame for its end."""
        return self._outliers.failed(worker, pending.sent_s, fact.reason, fact.now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Whom to ask now."""
        asked = self._outliers.due(now_s)
        for worker_id in self._silence.suspects(now_s):
            worker = self._workers.get(worker_id)
            if worker is not None and worker.is_in:
                asked.append(Probe(worker_id, self._stall_s))
        return asked

    def probed(self, fact: Probed) -> list[Action]:
        """A worker that was asked is well, or not."""
        worker = self._workers.get(fact.worker_id)
        if worker is None or worker.state != "ready":
            return []
        if worker.repute.place == "in":
            silent = not fact.well and self._silence.still(fact.worker_id)
            return self._outliers.silent(worker, fact.now_s) if silent else []
        return self._outliers.probed(worker, fact.well, fact.now_s)
