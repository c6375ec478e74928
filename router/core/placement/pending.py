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
    begun_by: int | None = None  # no worker: its answer goes to the other worker, not to a client
    prediction: Prediction | Expectation | None = None  # as of `Pending`
    expected_by_events: EventHits | None = None  # as of `Pending`


@dataclass(slots=True, eq=False)
class Pending:
    """A request the core has accepted and not finished. Lifetime: request."""

    arrival: Arrival
    serial: int
    draw: float
    tried: set[int] = field(default_factory=set)  # workers that failed it
    attempts: int = 0  # failures of workers that had received it
    not_before_s: float = float("-inf")  # when it may be sent again
    sent_s: float = float("-inf")  # when it was dispatched
    begun_by: int | None = None  # the worker whose answer has begun
    begun_s: float = float("-inf")  # when it began
    begun_failed: int = 0  # failures of that worker until then
    charge: Charge | None = None  # at the worker that answers it, or prefills it first
    counted: str | None = None  # the model against whose limit it counts, while a worker has it
    leg: Role = "both"  # the leg that is dispatched, or held; "both": all of it
    decode: Choice | None = None  # of two legs one after the other: the worker of the second one
    decode_group: str | None = None  # of that worker when it was chosen
    prefill_leg: PrefillLeg | None = None  # of two legs begun at once
    unsplittable: bool = False  # its KV did not pass in time: one worker does all of it, or none
    held: bool = False
    tracked: TrackedRequest | None = None  # to its session, where sessions are tracked
    standing: Standing = "new"  # of its session, at the latest decision
    # The blocks in its worker's cache: those it finds, where that cache is mirrored; else those
    # that it leaves there.
    prediction: Prediction | Expectation | None = None
    expected_by_events: EventHits | None = None  # where its worker's KV events tell of its prompt
    work_tokens: float = 1.0  # predicted: what it must compute, and its answer
    queued_tokens: int = 0  # of its prompt, to be computed; while it waits, as was predicted
    waiting_tokens: int = 0  # of work, as was predicted when it had to wait
    turn: tuple[bool, float, int] = (True, inf, 0)  # its place in its tenant's line

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


# The part of a request at one worker: its answer, or the prefill leg of two that began at once.
AtWorker = Pending | PrefillLeg
