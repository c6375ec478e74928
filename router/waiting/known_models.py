"""Knows which models exist, even if no worker serves them now."""

from __future__ import annotations

from collections.abc import Callable

from router.core.workers.served_models import ServedModels
from router.core.workers.table import WorkerTable

SEEN_MAX = 4_096


class KnownModels:
    """The models that an operator names, that workers serve, or that workers served recently.
    Lifetime: process.
    """

    def __init__(
        self,
        workers: WorkerTable,
        clock: Callable[[], float],
        named: Callable[[], frozenset[str]],
        seen_s: Callable[[], float],
    ) -> None:
        """Know only the models of `workers` and those that `named` returns. `seen_s` returns for
        how many seconds a model stays known after its last worker left.
        """
        self._workers = workers
        self._clock = clock
        self.named = named
        self._seen_s = seen_s
        self._version = -1  # of the workers, when these were noted
        self._served = ServedModels()
        # Models whose workers have left, oldest first: until when they are known, and their base
        # model.
        self._left: dict[str, tuple[float, str]] = {}

    def __contains__(self, model: str) -> bool:
        """Return True if requests of this model may wait for its first worker."""
        self._look()
        if model in self._served or model in self.named():
            return True
        return model in self._left and self._is_awaited(model)

    def names(self) -> set[str]:
        """Return all known models."""
        self._look()
        return {*self.named(), *self._served, *filter(self._is_awaited, self._left)}

    def _is_awaited(self, model: str) -> bool:
        """Return True if a model whose workers all left may return with a new worker.

        A LoRA adapter whose base model still has workers may not: those workers would have loaded
        it.
        """
        until_s, base = self._left[model]
        return self._clock() < until_s and (base == model or base not in self._served)

    def _look(self) -> None:
        """Note the models whose last worker left since the last call."""
        if self._version == self._workers.version:
            return
        self._version = self._workers.version
        until_s = self._clock() + self._seen_s()
        left = self._served.look((w.worker_id, w.facts.models) for w in self._workers)
        for model, base in left.items():
            self._left.pop(model, None)
            self._left[model] = until_s, base
        while len(self._left) > SEEN_MAX:
            del self._left[next(iter(self._left))]
