"""Handles silent workers, which do not answer the router's probes because they are slow, stopped or
dead. A silent worker gets no new requests, and its requests whose answers have not begun are sent
to other workers. But if most workers of a model are silent together, the cause is probably the
host, the network or the router itself. In this case no request moves, and new requests wait until a
worker answers. This is called a panic, as in Envoy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.facts import Silence
from router.core.contract.actions import Abandon, Action, Panic
from router.core.contract.settings import CoreSettings
from router.core.workers.table import Silent, Worker, WorkerTable


def most_silent(workers: Iterable[Worker], share: float) -> bool:
    """Return True if more than `share` (0..1) of these workers do not answer probes."""
    together = list(workers)
    return sum(w.silent is not None for w in together) > share * len(together)


class Silences:
    """Tracks the workers that do not answer probes, and decides when their requests must move.

    Lifetime: process.
    """

    def __init__(
        self, settings: CoreSettings, workers: WorkerTable, stands_still: Callable[[int], bool]
    ) -> None:
        """Start without any silent worker. `stands_still` returns True if no stream of the worker
        with this id makes progress, and the worker does not answer a probe.
        """
        self._share = settings.panic_share
        self._workers = workers
        self._stands_still = stands_still
        self._silent: set[int] = set()
        # Unanswered probes allowed for a single silent worker, as the latest fact says.
        self._allowed = 2
        self.panics: set[str] = set()  # base models of which most workers are silent

    def on_silence(self, fact: Silence) -> list[Action]:
        """Record that a worker has not answered one more probe, or that it answers again.

        Return the actions that follow, as `look` does.
        """
        worker = self._workers.get(fact.worker_id)
        if worker is None or worker.state == "down":
            return []
        if not fact.probes:
            self.end_silence(worker)
        elif worker.silent is None:
            worker.silent = Silent(fact.now_s, fact.probes)
            self._silent.add(worker.worker_id)
            self._workers.changed()
        else:
            worker.silent.probes = fact.probes
        self._allowed = max(fact.allowed, 1)
        return self.look()

    def end_silence(self, worker: Worker) -> None:
        """Record that a worker is no longer silent, because it answers or is known to be dead."""
        if worker.silent is not None:
            worker.silent = None
            self._silent.discard(worker.worker_id)
            self._workers.changed()

    def look(self) -> list[Action]:
        """Return an action for each silent worker whose requests must move to other workers.

        Return also an action for each model for which a panic began or ended.
        """
        if not self._silent and not self.panics:
            return []
        actions: list[Action] = []
        silent = [w for w in map(self._workers.get, sorted(self._silent)) if w is not None]
        self._silent = {w.worker_id for w in silent}
        models = {w.facts.models[0] for w in silent}
        panics = {model for model in models if most_silent(self._pool(model), self._share)}
        for model in sorted(panics ^ self.panics):
            pool = self._pool(model)
            count = sum(w.silent is not None for w in pool)
            actions.append(Panic(model, count, len(pool), model in panics))
        self.panics = panics
        for worker in silent:
            state = worker.silent
            assert state is not None
            # When other workers answer again, this one may, too, a little later.
            if worker.facts.models[0] in panics:
                state.excused = state.probes
            elif state.probes - state.excused >= self._allowed and not state.moved:
                state.moved = True
                actions.append(Abandon(worker.worker_id))
        return actions

    def alone(self, worker: Worker) -> bool:
        """Return True if few workers of this worker's model are silent or stalled at present: at
        most `panic_share` of the model's ready workers.
        """
        pool = self._pool(worker.facts.models[0])
        quiet = sum(w.silent is not None or self._stands_still(w.worker_id) for w in pool)
        return quiet <= self._share * len(pool)

    def _pool(self, model: str) -> list[Worker]:
        return [w for w in self._workers.serving(model) if w.state == "ready"]
