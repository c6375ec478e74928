"""Requests and outcomes as the messages of satellites have them, and back."""

from __future__ import annotations

import numpy as np

from policies.facts import Arrival
from router.http.desk import NOBODY, Named
from router.http.errors import ClientError, WorkerError
from router.http.explain_header import Asked
from router.http.relay.reply import Outcome, Usage
from router.processes.messages import Arrived, Ended

_HASH = np.dtype("<u8")


def arrived(arrival: Arrival, explain: Asked, whose: bytes = b"", named: Named = NOBODY) -> Arrived:
    """A request as it is told."""
    return Arrived(
        arrival.request_id,
        explain,
        arrival.model,
        arrival.prompt_tokens,
        {size: chain.astype(_HASH, copy=False).tobytes() for size, chain in arrival.chains.items()},
        arrival.approximate,
        arrival.max_output_tokens,
        arrival.session,
        arrival.tenant,
        arrival.priority,
        arrival.stream,
        arrival.longest_prompt_tokens,
        arrival.weight,
        arrival.deadline_s,
        arrival.needs,
        whose,
        named.id,
        named.trace,
        named.traced,
    )


def arrival_of(told: Arrived, now_s: float) -> Arrival:
    """The request as the core takes it. Raises ValueError for a chain that is none."""
    return Arrival(
        now_s=now_s,
        request_id=told.request_id,
        model=told.model,
        prompt_tokens=told.prompt_tokens,
        chains={size: np.frombuffer(chain, _HASH) for size, chain in told.chains.items()},
        approximate=told.approximate,
        max_output_tokens=told.max_output_tokens,
        session=told.session,
        tenant=told.tenant,
        priority=told.priority,
        stream=told.stream,
        longest_prompt_tokens=told.longest_prompt_tokens,
        weight=told.weight,
        deadline_s=told.deadline_s,
        needs=told.needs,
    )


def ended(request_id: int, outcome: Outcome, own_tokens: int | None, rest: Arrival | None) -> Ended:
    """An outcome as it is told."""
    error, usage = outcome.error, outcome.usage
    return Ended(
        request_id,
        own_tokens,
        outcome.started_s,
        outcome.status,
        error.kind if isinstance(error, WorkerError) else "client" if error else "",
        "" if error is None else error.message,
        outcome.bytes_to_client,
        outcome.resumable,
        outcome.first_byte_s,
        outcome.last_byte_s,
        outcome.events,
        None
        if usage is None
        else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        None if rest is None else arrived(rest, "no"),
        outcome.first_token_s,
        outcome.why_python,
    )


def outcome_of(told: Ended) -> Outcome:
    """The outcome as it was, but for the reply that may be held, which its satellite keeps."""
    error: WorkerError | ClientError | None = None
    if told.blame == "client":
        error = ClientError(400, told.message)
    elif told.blame != "":
        error = WorkerError(told.blame, told.message)
    return Outcome(
        started_s=told.started_s,
        status=told.status,
        error=error,
        bytes_to_client=told.bytes_to_client,
        resumable=told.resumable,
        first_byte_s=told.first_byte_s,
        last_byte_s=told.last_byte_s,
        events=told.events,
        usage=None if told.usage is None else Usage(*told.usage),
        first_token_s=told.first_token_s,
        why_python=told.why_python,
    )
