"""What an attempt at a request is told, and how a request is known outside."""

from __future__ import annotations

from typing import Any

from policies.record import record
from router.fleet_io.member import Member
from router.http.relay.reply import Header


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


@record
class Errand:
    """One attempt: to which worker, and what the router adds to that worker's answer."""

    worker_id: int
    headers: tuple[Header, ...]
    carrier: Member | None  # None: the worker is gone since it was chosen
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
