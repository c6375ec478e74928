"""Workers by the name that replicas call them by."""

from __future__ import annotations

from router.core.workers import WorkerTable


class Names:
    """Workers by name, as of the table's latest version. Lifetime: process."""

    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._version = -1
        self._ids: dict[str, int] = {}

    def worker_id(self, name: str) -> int | None:
        """The worker of this name; None where there is none."""
        if self._version != self._workers.version:
            self._version = self._workers.version
            self._ids = {worker.facts.name: worker.worker_id for worker in self._workers}
        return self._ids.get(name)
