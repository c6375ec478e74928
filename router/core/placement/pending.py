"""A request that the core has accepted, and its prefill leg if both legs start together."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from policies.contract import Standing
from policies.facts import Arrival, Role
from router.core.placement.choice import Choice
from router.core.sessions.sessions import TrackedRequest
from router.core.workers.ledger import Charge
from router.core.workers.mirror import EventHits, Expectation, Prediction


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """The prefill of a request at one worker, while another worker starts to decode the request.

    Lifetime: until the request leaves both workers.
    """

    arrival: Arrival  # of the request
    worker_id: int
    charge: Charge | None = None  # None: the prefill is over
    sent_s: float = float("-inf")  # when it was dispatched
    begun_by: int | None = None  # always None: its answer goes to the other worker, not to a client
    prediction: Prediction | Expectation | None = None  # see `Pending`
    expected_by_events: EventHits | None = None  # see `Pending`


@dataclass(slots=True, eq=False)
class Pending:
    """A request that the core has accepted and that has not ended. Lifetime: request."""

    arrival: Arrival
    serial: int
    draw: float
    tried: set[int] = field(default_factory=set)  # workers that failed it
    cause: str = ""  # of the latest failure
    attempts: int = 0  # failures of workers that had received it
    not_before_s: float = float("-inf")  # when it may be sent again
    sent_s: float = float("-inf")  # when it was dispatched
    begun_by: int | None = None  # the worker whose answer has begun
    begun_s: float = float("-inf")  # when it began
    begun_failed: int = 0  # failures of that worker until then
    charge: Charge | None = None  # at the worker that answers it, or prefills it first
    counted: str | None = None  # the model whose limit counts it, while a worker has the request
    leg: Role = "both"  # the leg that is dispatched, or held; "both": all of it
    decode: Choice | None = None  # the worker of the second leg, if one leg follows the other
    decode_group: str | None = None  # that worker's group when it was chosen
    prefill_leg: PrefillLeg | None = None  # the prefill leg, if both legs begin at once
    unsplittable: bool = False  # a KV transfer took too long: one worker must do all of it
    held: bool = False
    tracked: TrackedRequest | None = None  # the tracked request, while sessions are tracked
    standing: Standing = "new"  # the standing of its session at the latest decision
    # The blocks in its worker's cache: those that it finds, if the cache is estimated; else those
    # that it leaves there.
    prediction: Prediction | Expectation | None = None
    expected_by_events: EventHits | None = None  # the hits that its worker's KV events promise
    work_tokens: float = 1.0  # predicted work: its uncached tokens, and its answer
    queued_tokens: int = 0  # uncached tokens of its prompt; while it waits, the prediction
    waiting_tokens: int = 0  # predicted tokens of work when it had to wait
    turn: tuple[bool, float, int] = (True, inf, 0)  # its place among its tenant's waiting requests

    @property
    def fair_work(self) -> float:
        """Return the request's predicted work in tokens, divided by its tenant's weight."""
        return self.work_tokens / self.arrival.weight

    @property
    def prompt_charge(self) -> Charge | None:
        """Return the charge at the worker that computes the prompt, or None if there is none."""
        prefill = self.prefill_leg
        if prefill is not None and prefill.charge is not None:
            return prefill.charge
        return self.charge


# The part of a request at one worker: its answer, or its prefill leg if both legs began at once.
AtWorker = Pending | PrefillLeg
