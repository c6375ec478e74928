"""Counts the models that workers list, so that no caller must look through all workers for one
model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator


class ServedModels:
    """Counts by model how many workers list it. Lifetime: process.

    Only the models of workers whose list is another one than before are counted again.
    """

    def __init__(self) -> None:
        self._listed: dict[int, tuple[str, ...]] = {}  # by worker: its models
        self._workers: Counter[str] = Counter()  # by model: how many list it

    def __contains__(self, model: str) -> bool:
        return model in self._workers

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def look(self, listed: Iterable[tuple[int, tuple[str, ...]]]) -> dict[str, str]:
        """Take the models of all workers, by worker id, as they are now.

        Return the models that left with their last worker, each with that worker's first model. A
        model that a worker lists no more, as an adapter that was unloaded, is not among them.
        """
        before = self._listed
        now = dict(listed)
        for worker_id, models in now.items():
            old = before.pop(worker_id, ())
            if models is not old:
                self._workers.update(models)
                self._lose(old)
        left = dict[str, str]()
        for models in before.values():  # of workers that left
            left |= dict.fromkeys(self._lose(models), models[0] if models else "")
        self._listed = now
        return left

    def _lose(self, models: Iterable[str]) -> list[str]:
        """Remove a worker's list from the counts, and return the models that no worker
        lists now.
        """
        lost = []
        for model in models:
            self._workers[model] -= 1
            if not self._workers[model]:
                del self._workers[model]
                lost.append(model)
        return lost
