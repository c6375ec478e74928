"""Reports the end of each attempt to the decision core, the fleet, the metrics and the logs."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from enum import Enum
from typing import Literal

from policies.facts import Role
from router.core.placement.retries import NO_MODEL
from router.http.errors import ClientError, WorkerError
from router.http.reply import Outcome, Usage
from router.record.logs import about
from router.record.request_record import Attempt
from router.request.service import Service
from router.request.state import AttemptEnd, RequestState

# vLLM (`sampling_params.py`) and SGLang compute a prompt whole, whatever is cached, if a request
# asks for the prompt's log probabilities. Words found in the prompt's text do no harm.
_UNCACHED_FIELDS = (b"prompt_logprobs", b"logprob_start_len", b'"echo"')
# A request for several answers. Found in a tool's schema, too: then one figure is left out.
_SEVERAL = re.compile(rb'"(?:n|best_of)"[ \t\r\n]*:[ \t\r\n]*(?:[2-9]|1[0-9])')
_HEALTHY_ERRORS = ("busy", "out_of_files", "moved", "no_model")  # kinds of a worker's error

log = logging.getLogger(__name__)


class Next(Enum):
    """The action after an attempt: the core chooses another worker, or the request ends."""

    AGAIN = "the core is asked for another worker"
    OVER = "the client has its answer"


def settle(service: Service, state: RequestState, attempt: Attempt, end: AttemptEnd) -> Next:
    """Report the end of an attempt to the decision core, the metrics and the request's account.

    The attempt then no longer counts as load of its worker. Return what follows.
    """
    outcome = end.outcome
    if outcome is None:  # the worker was removed after it was chosen
        state.account.note_decision_start()
        state.ticket.fail("busy", retry=True, reason=end.unsent, leg=end.faulty_leg)
        return Next.AGAIN
    if end.handed_over:
        _prefill_served(service, state, attempt, outcome)
        return Next.AGAIN
    if end.faulty_leg == "prefill" and state.prefill is not None:
        attempt.ended_s = service.clock()
        attempt = state.prefill
    _complete_usage(service, state, attempt, outcome)
    if state.sidecar_prefill is not None and outcome.error is None and outcome.answers:
        settle_sidecar(service, state)
    now_s = service.clock()
    service.metrics.requests.count_attempt(
        state.arrival_at_router(), attempt.worker_id, outcome, now_s
    )
    attempt.end(outcome, now_s)
    _compare_tokens(service, state, outcome, end.prompt_tokens)
    if outcome.resumable:
        state.account.lost_outcome = outcome
    if outcome.error is None:
        _answered(service, state, attempt.worker_id, outcome)
        follows = False
    else:
        if outcome.retryable:
            state.account.note_decision_start()
        follows = _failed(service, state, attempt.worker_id, outcome, end)
    if follows:
        return Next.AGAIN
    state.account.used(outcome)
    return Next.OVER


def settle_prefill(service: Service, state: RequestState, outcome: Outcome) -> None:
    """Report the end of a prefill leg that was sent together with the decode leg.

    The decision core and the metrics get the report. For the decode leg see `settle`.
    """
    attempt = state.prefill
    assert attempt is not None, "of two legs"
    error = outcome.error
    if error is None and outcome.answers:
        _prefill_served(service, state, attempt, outcome, waits=False)
        return
    now_s = service.clock()
    service.metrics.requests.count_attempt(
        state.arrival_at_router(), attempt.worker_id, outcome, now_s
    )
    attempt.end(outcome, now_s)
    kind = error.kind if isinstance(error, WorkerError) else f"status {outcome.status}"
    line = "request %d: %s failed (%s) when its KV had been fetched"
    who = service.dispatcher.core.workers.label(attempt.worker_id)
    log.warning(line, attempt.request_id, who, kind, extra=_log_ids(state))
    blame, busy_s = _fault_of(error), error.busy_s if isinstance(error, WorkerError) else None
    state.ticket.fail(blame, retry=False, reason=kind, leg="prefill", busy_s=busy_s)


def settle_sidecar(service: Service, state: RequestState) -> None:
    """Report the end of a prefill leg that the decode worker's sidecar sent. The prefill counts as
    ended when the answer begins.
    """
    attempt, state.sidecar_prefill = state.sidecar_prefill, None
    if attempt is not None:
        now_s = service.clock()
        attempt.end(Outcome(attempt.sent_s, status=200, first_byte_s=now_s), now_s)
        state.ticket.prefilled(None, waits=False)


def is_own_hit(body: bytes, leg: Role) -> bool:
    """Return True if `cached_tokens` in an answer counts tokens of the worker's own cache.

    Return False for a request that wants several answers: vLLM (0.32) reports the cached tokens of
    a later answer, which finds the prompt that was computed for the first one. Return False also
    for a decode leg, whose worker reports the cached tokens of the prefill worker.
    """
    if leg == "decode":
        return False
    asks = b'"n"' in body or b'"best_of"' in body  # a tenth of the time of the expression
    return not (asks and _SEVERAL.search(body))


def _prefill_served(
    service: Service, state: RequestState, attempt: Attempt, outcome: Outcome, waits: bool = True
) -> None:
    """Report a successful prefill leg to the metrics and the decision core. `waits` True means that
    the decode leg has not been sent yet.
    """
    now_s = service.clock()
    service.metrics.requests.prefilled(attempt.worker_id, outcome, now_s)
    attempt.end(outcome, now_s)
    if waits:
        state.account.note_decision_start()
    usage = outcome.usage
    state.ticket.prefilled(None if usage is None else usage.cached_tokens, waits=waits)


def _answered(service: Service, state: RequestState, worker_id: int, outcome: Outcome) -> None:
    """Tell the decision core that the worker answered, or refused with a 4xx status."""
    usage, answers = outcome.usage, outcome.answers
    if usage is None:
        usage = Usage(completion_tokens=outcome.events or None)
    if service.fleet.denials and answers:
        service.fleet.has_model(worker_id, state.arrival.model)
    cached_tokens = _cached_tokens(state.body, usage)
    counts = usage.prompt_tokens, cached_tokens, usage.completion_tokens
    state.ticket.finish(*counts, refused=not answers)


def _failed(
    service: Service, state: RequestState, worker_id: int, outcome: Outcome, end: AttemptEnd
) -> bool:
    """Tell the decision core that the attempt failed.

    Return True if another attempt follows.
    """
    error, retry, ticket = outcome.error, outcome.retryable, state.ticket
    if isinstance(error, ClientError):
        ticket.fail("client", retry=False, reason="client left")
        return False
    assert error is not None, "it failed"
    if error.kind == "absent":
        service.fleet.lacks(worker_id, state.arrival.needs)
        ticket.fail("busy", retry=retry, reason="absent")
        return retry
    rest = end.rest
    if retry and (changed := state.carrier.rest(state.arrival)) is not None:
        rest = changed
    if error.kind == NO_MODEL:
        service.fleet.denied(worker_id, state.arrival.model)
    else:
        _log_failure(state, service.dispatcher.core.workers.label(worker_id), error, retry)
    ticket.fail(
        _fault_of(error),
        retry=retry,
        reason=error.kind,
        rest=rest,
        leg=end.faulty_leg,
        busy_s=error.busy_s,
    )
    return retry


def _log_failure(state: RequestState, worker: str, error: WorkerError, retry: bool) -> None:
    request_id = state.arrival.request_id
    if error.busy_s is not None:
        return  # the core logs it once, and not for each request
    if error.kind == "out_of_files":
        line = "request %d: not sent to %s, no more files may be open here: %s"
        log.error(line, request_id, worker, error.message, extra=_log_ids(state))
        return
    follows = "; asking for another worker" if retry else ""
    what = (request_id, worker, error.kind, error.message, follows)
    log.warning("request %d: %s failed (%s): %s%s", *what, extra=_log_ids(state))


def _log_ids(state: RequestState) -> dict[str, str]:
    """Return the fields of a log line that identify the request: its id and its trace's id."""
    return about(state.account.id, state.account.trace_id() or "")


def _fault_of(error: WorkerError | ClientError | None) -> Literal["busy", "worker"]:
    """Return "worker" if the error is a fault of the worker, and "busy" if it is not.

    Only faults count against the worker's health.
    """
    healthy = not isinstance(error, WorkerError) or error.kind in _HEALTHY_ERRORS
    return "busy" if healthy else "worker"


def _complete_usage(
    service: Service, state: RequestState, attempt: Attempt, outcome: Outcome
) -> None:
    """Complete the token counts of an answer.

    The count of cached tokens is removed if it counts hits in another worker's cache.
    """
    if outcome.kept:
        outcome.usage = _usage_of_kept(service, state, attempt, outcome) or outcome.usage
        outcome.kept = b""  # else its text would live as long as its attempt is remembered
    usage = outcome.usage
    reports_hit = usage is not None and usage.cached_tokens is not None
    if usage is not None and reports_hit and not is_own_hit(state.body, attempt.leg):
        outcome.usage = replace(usage, cached_tokens=None)


def _usage_of_kept(
    service: Service, state: RequestState, attempt: Attempt, outcome: Outcome
) -> Usage | None:
    """Return the token counts in an answer of another format than OpenAI's.

    Return None for OpenAI's format, or if the answer contains no counts.
    """
    if (answers := state.path.answers) is None:
        return None
    member = service.fleet.members.get(attempt.worker_id)
    known = None if member is None else member.recognized
    size = None if known is None else known.kv_block_tokens
    return answers.usage(outcome.kept, outcome.events, size)


def _compare_tokens(
    service: Service, state: RequestState, outcome: Outcome, own_tokens: int | None
) -> None:
    """Compare the router's own count of prompt tokens with the count in the worker's answer."""
    check, usage = service.check, outcome.usage
    if check is None or own_tokens is None or usage is None or outcome.error is not None:
        return
    if usage.prompt_tokens is None:
        return
    model, renderer = state.arrival.model, state.prompt.rendered_by
    if not renderer:
        check.counted(model, own_tokens, usage.prompt_tokens)
    elif service.renderers is not None:
        service.renderers.counted(renderer, model, own_tokens, usage.prompt_tokens)


def _cached_tokens(body: bytes, usage: Usage) -> int | None:
    """Return how many prompt tokens the worker had cached, or None if unknown.

    The number is unknown if the worker reports few cached tokens and the request may have forced
    the engine to compute the prompt without its cache.
    """
    cached, prompt = usage.cached_tokens, usage.prompt_tokens
    if cached is None or prompt is None or 2 * cached >= prompt:
        return cached
    return None if any(word in body for word in _UNCACHED_FIELDS) else cached
