"""What serving a client needs of whoever decides, be that in this process or in another.

Reading requests and carrying them to workers goes on in every process of a router; deciding, and
all that is kept of requests, in one (`local_desk.py`; `router.processes` reaches it from the
others).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from policies.facts import Arrival
from policies.record import record
from router.core.actions import Reject
from router.http.explain_header import Asked
from router.http.relay.reply import Header, Outcome
from router.http.relay.upstream import Upstream


def card(name: str, identity: tuple[str, str | None], max_tokens: int | None) -> dict[str, Any]:
    """A model as `GET /v1/models` shows it, adapters as vLLM does."""
    base, adapter = identity
    limit = {} if max_tokens is None else {"max_model_len": max_tokens}
    return {
        "id": name,
        "object": "model",
        "created": 0,  # nobody says, and OpenAI's clients want a number
        "owned_by": "warmroute",
        "parent": None if adapter is None else base,
        **limit,
    }


class Carrier(Protocol):
    """A worker, as far as sending it a request goes. Lifetime: worker."""

    upstream: Upstream

    @property
    def rank(self) -> int | None:
        """What its engine calls its data-parallel rank; None: it is not one of several."""
        ...

    @property
    def kind(self) -> str | None:
        """Which engine it is, a key of `fleet_io.engines.table`; None: not known yet."""
        ...


@record
class Errand:
    """One attempt: to which worker, and what the router adds to that worker's answer."""

    worker_id: int
    headers: tuple[Header, ...]
    carrier: Carrier | None  # None: the worker is gone since it was chosen
    uncached_tokens: int = 0  # of its prompt, as expected there
    wait_s: float = 0.0  # before it is begun, after another worker failed the request
    why: bytes = b""  # of a traced request: the decision, `record.explanation.explanation` as JSON


@record
class Named:
    """How a request is known outside, for log lines and spans."""

    id: str = ""  # `x-request-id`; "": it has none, for nobody writes it down
    trace: str = ""  # its trace id; "": it is part of none that is known here
    traced: bool = False  # spans are made of it


NOBODY = Named()


class Case(Protocol):
    """One request before the desk; leaving it tells its end if nobody did. Lifetime: request."""

    request_id: int

    def __enter__(self) -> Case: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def arrive(self) -> None:
        """Ask for a decision."""
        ...

    async def next_errand(self) -> Errand | Reject:
        """Where to send the request, or how to turn it away; waits while it is held.

        Raises ClientError(429) where its key is at a limit that the desk counts.
        """
        ...

    def first_token(self, now_s: float) -> None:
        """The answer began."""
        ...

    def progress(self, now_s: float, output_tokens: int) -> None:
        """The answer grew."""
        ...

    def gone(self) -> None:
        """The errand's worker is gone: nothing was sent. Another errand follows."""
        ...

    def ended(self, outcome: Outcome, own_tokens: int | None, rest: Arrival | None = None) -> bool:
        """An errand is over; True when another one follows.

        `own_tokens`: our exact count of the prompt's tokens, to be held against the worker's.
        `rest`: what is left of the request where the outcome is resumable.
        """
        ...

    def why_refused(self, reject: Reject) -> str | None:
        """The explanation's line for a refusal's header; None where there is none to give."""
        ...

    def refused(self, reject: Reject, status: int) -> None:
        """The client was turned away with `status`."""
        ...


class Desk(Protocol):
    """Where requests are brought. Lifetime: process."""

    def clock(self) -> float:
        """Monotonic seconds, the same in all processes of a machine."""
        ...

    def next_request_id(self) -> int:
        """A number no other request of this router has."""
        ...

    def models(self) -> list[str]:
        """Names of all models served, sorted."""
        ...

    def block_sizes(self, model: str) -> frozenset[int]:
        """Block sizes of a model's pool; none where it is not served."""
        ...

    def identity(self, model: str) -> tuple[str, str | None]:
        """(base model, LoRA adapter or None) behind a model's name; its own where unknown."""
        ...

    def case(
        self, arrival: Arrival, explain: Asked, whose: bytes = b"", named: Named = NOBODY
    ) -> Case:
        """A request that was read and understood. `whose`: its key, where the desk counts what
        that uses (`keys.ring.Key.whose`).
        """
        ...

    def cards(self) -> list[dict[str, Any]]:
        """Each model once, as `GET /v1/models` shows it."""
        ...

    def ready_workers(self) -> int:
        """How many workers take requests now."""
        ...

    def ready_by_model(self) -> dict[str, int]:
        """Of each model served, sorted: how many of its workers take requests now."""
        ...

    def reasons(self) -> tuple[str, ...]:
        """Why no new requests are wanted here, whatever the workers say; none: they are."""
        ...

    def faulty(self, status: int) -> None:
        """A request was refused as its client's own fault, or (500) ended by a defect of ours."""
        ...
