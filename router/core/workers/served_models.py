"""Counts how many workers list each model, so that no caller must look through all workers for one
model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator


class ServedModels:
    """Counts for each model how many workers list it. Only workers whose list of models has changed
    are counted again. Lifetime: process.
    """

    def __init__(self) -> None:
        self._listed: dict[int, tuple[str, ...]] = {}  # by worker: its models
        self._workers: Counter[str] = Counter()  # by model: how many list it

    def __contains__(self, model: str) -> bool:
        return model in self._workers

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def look(self, listed: Iterable[tuple[int, tuple[str, ...]]]) -> dict[str, str]:
        """Update the counts by the models that each worker lists now. Return the models that no
        worker lists any more because their last worker left, each with that worker's first model. A
        model that a remaining worker stopped listing, such as an unloaded adapter, is not returned.
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
        """Remove the models in a worker's list from the counts, and return those that no worker
        lists now.
        """
        lost = []
        for model in models:
            self._workers[model] -= 1
            if not self._workers[model]:
                del self._workers[model]
                lost.append(model)
        return lost
