"""The memory of the policy Prequal: the requests in flight at each worker, and the results of
recent probes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from policies.facts import Role

MAX_INFLIGHT = 1_000_000  # requests whose worker is remembered; beyond it the oldest is forgotten

Sent = tuple[int, Role]  # a request and its leg


@dataclass(slots=True)
class Probes:
    """The requests in flight at each worker, and a pool of the latest probe results. A probe reads
    how many requests are in flight at a worker. A result is (worker id, this router's requests in
    flight there, time in seconds).
    """

    pool: deque[tuple[int, int, float]]  # bounded: the oldest is dropped
    worker_of: dict[Sent, int] = field(default_factory=dict)  # unfinished -> worker
    inflight: dict[int, int] = field(default_factory=dict)  # worker -> own requests
    workers: list[int] = field(default_factory=list)  # in the order in which they joined
    turn: int = 0  # index of the worker that is probed next

    def send(self, sent: Sent, worker_id: int) -> None:
        """Count a request as in flight at a worker, and no longer at its former worker."""
        self.release(sent)
        if len(self.worker_of) == MAX_INFLIGHT:
            self.release(next(iter(self.worker_of)))
        self.worker_of[sent] = worker_id
        if worker_id in self.inflight:
            self.inflight[worker_id] += 1
        else:  # it joined before this policy was chosen
            self.change(worker_id, gone=False)

    def release(self, sent: Sent) -> None:
        """Count a request as no longer in flight at its worker."""
        worker_id = self.worker_of.pop(sent, None)
        if worker_id in self.inflight:
            self.inflight[worker_id] -= 1

    def probe(self, count: int, now_s: float) -> None:
        """Probe the next `count` workers in turn at `now_s`, and add the results to the pool."""
        for _ in range(min(count, len(self.workers))):
            worker = self.workers[self.turn % len(self.workers)]
            self.turn += 1
            self.pool.append((worker, self.inflight[worker], now_s))

    def change(self, worker_id: int, *, gone: bool) -> None:
        """Add a worker that joined, or remove a worker that left for good."""
        if gone:
            self.inflight.pop(worker_id, None)
        elif worker_id not in self.inflight:
            self.inflight[worker_id] = sum(one == worker_id for one in self.worker_of.values())
        self.workers = list(self.inflight)
