"""The memory of the policy LBGR: the work queued at each worker, and the extra time that its
answers take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.facts import Role

DECAYS_PER_S = 50.0  # the queue is multiplied by 31/32 every 20 ms
DECAY = 31.0 / 32.0
P0 = 1e6  # variance before the first observation, which then counts almost fully
MAX_INFLIGHT = 1_000_000  # requests that are remembered; beyond it the oldest is forgotten

Sent = tuple[int, Role]  # a request and its leg


@dataclass(slots=True)
class Lane:
    """The estimated queue of one worker in milliseconds, and the residual time of its answers. The
    residual is the time of an answer beyond its own work and the work queued before it. `variance`
    is the uncertainty of the residual.
    """

    queue_ms: float = 0.0
    at_s: float = 0.0
    residual_ms: float = 0.0
    variance: float = P0

    def queued_ms(self, now_s: float) -> float:
        """Return the milliseconds of work left in the queue at `now_s`."""
        return self.queue_ms * float(DECAY ** (max(now_s - self.at_s, 0.0) * DECAYS_PER_S))

    def add(self, ms: float, now_s: float) -> None:
        """Add milliseconds of work to the queue; a negative number removes work."""
        self.queue_ms = max(self.queued_ms(now_s) + ms, 0.0)
        self.at_s = now_s

    def learn(self, residual_ms: float, forgetting: float) -> None:
        """Update the residual with the residual of one answer, by recursive least squares.

        `forgetting` is the factor, up to 1, by which older answers lose weight.
        """
        gain = self.variance / (forgetting + self.variance)
        self.residual_ms += gain * (residual_ms - self.residual_ms)
        self.variance *= (1.0 - gain) / forgetting


@dataclass(slots=True)
class Lanes:
    """The estimated queue of each worker, and the requests in flight.

    For each request in flight, `sent` has the worker's id, the time when it was sent in seconds,
    its own work in milliseconds, and the work that was queued before it in milliseconds.
    """

    of: dict[int, Lane] = field(default_factory=dict)
    sent: dict[Sent, tuple[int, float, float, float]] = field(default_factory=dict)

    def send(self, sent: Sent, worker_id: int, own_ms: float, now_s: float) -> None:
        """Add a request with `own_ms` milliseconds of work to a worker's queue.

        If the request was at another worker before, remove it from that worker's queue.
        """
        self.release(sent, now_s)
        if len(self.sent) == MAX_INFLIGHT:
            self.release(next(iter(self.sent)), now_s)
        lane = self.of.setdefault(worker_id, Lane())
        self.sent[sent] = (worker_id, now_s, own_ms, lane.queued_ms(now_s))
        lane.add(own_ms, now_s)

    def answered(self, sent: Sent, now_s: float, forgetting: float) -> None:
        """Update the residual time of the worker that answered a request at `now_s`."""
        worker_id, sent_s, own_ms, before_ms = self.sent.get(sent, (-1, 0.0, 0.0, 0.0))
        lane = self.of.get(worker_id)
        if lane is not None:
            took_ms = (now_s - sent_s) * 1_000.0
            lane.learn(max(took_ms - own_ms - before_ms, 1.0), forgetting)

    def release(self, sent: Sent, now_s: float) -> None:
        """Remove the work that is left of a request from its worker's queue."""
        worker_id, sent_s, own_ms, _ = self.sent.pop(sent, (-1, 0.0, 0.0, 0.0))
        lane = self.of.get(worker_id)
        if lane is not None:
            lane.add(-own_ms * DECAY ** ((now_s - sent_s) * DECAYS_PER_S), now_s)
