"""A queue of requests for models whose workers come and go, with a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from policies.facts import Arrival, WorkerChange, WorkerFacts
from policies.load import load
from router.core.contract.actions import Rejection
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.waiting.known_models import KnownModels
from router.waiting.queue import Began, WorkerWait
from router.waiting.settings import WaitingSettings

FACTS = WorkerFacts(name="http://worker", models=("m",), block_size=16)


class WaitWorld:
    """The workers, the queue of waiting requests and the clock. Lifetime: test."""

    def __init__(self, terms: WaitingSettings) -> None:
        self.now_s = 100.0
        self.terms = terms
        self.core = RouterCore(load("least_requests"), CoreSettings(max_workers=8))
        workers = self.core.workers
        self.known = KnownModels(
            workers,
            lambda: self.now_s,
            lambda: frozenset(self.terms.models),
            lambda: self.terms.seen_s,
        )
        self.queue = WorkerWait(workers, self.known, lambda: self.now_s, lambda: self.terms)
        self.went: list[int] = []  # request ids, in the order in which they were let go
        self.refused: dict[int, Rejection] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._ids = iter(range(1_000_000))

    def arrival(self, model: str = "m", **fields: object) -> Arrival:
        one = Arrival(self.now_s, next(self._ids), model, 10, {})
        return replace(one, **fields)  # type: ignore[arg-type]

    async def start_waiting(
        self,
        arrival: Arrival,
        body_bytes: int = 100,
        others: frozenset[str] = frozenset(),
    ) -> int:
        """Let a request wait in a task of its own; return its number."""

        async def wait() -> None:
            began = Began(arrival.now_s, arrival.request_id)
            refusal = await self.queue.wait(arrival, body_bytes, began, lambda: others)
            if refusal is None:
                self.went.append(arrival.request_id)
            else:
                self.refused[arrival.request_id] = refusal

        self.tasks[arrival.request_id] = asyncio.create_task(wait())
        await settled()
        return arrival.request_id

    def worker(self, state: str, worker_id: int = 0, facts: WorkerFacts = FACTS) -> None:
        """Tell the core that a worker is ready, draining, down or gone."""
        spec = facts if state == "ready" else None
        change = WorkerChange(self.now_s, worker_id, state, spec)  # type: ignore[arg-type]
        self.core.on_worker(change)

    async def pass_s(self, seconds: float, tick_s: float = 0.05) -> None:
        """Let time pass, with a tick every `tick_s` seconds."""
        for _ in range(round(seconds / tick_s)):
            self.now_s += tick_s
            self.queue.tick()
            await settled()

    def waiting(self) -> Iterator[int]:
        return (number for number, task in self.tasks.items() if not task.done())


async def settled() -> None:
    """Let the event loop run until every task waits."""
    for _ in range(5):
        await asyncio.sleep(0)
