"""Lets a request of a known model wait while no worker can take it, and reads the request again
afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from policies.facts import Arrival
from router.core.contract.actions import Reject, Rejection
from router.request.dialect import Target
from router.request.dispatcher import Ticket
from router.request.quotas import Tenants
from router.request.reading import InferenceReader
from router.request.service import Service
from router.request.state import RequestState
from router.waiting.queue import Began

_RETRY_AFTER_S = 30.0  # an engine's start takes minutes
_PROBED_S = 1.0  # time until the fleet has probed a worker that did not answer, seconds
_MAX_ROUNDS = 3  # times that a request is placed again after it lost a worker
_MAX_LOSSES = 1  # workers a request may lose; after more the request may be the cause
# Refusals of the core that may mean that the last worker is gone, or about to be known as gone.
_NO_WORKER_CODES = frozenset({"no_worker_available", "model_not_found", "worker_error"})
# Failures by which a worker leaves, or was not there.
_LOST_WORKER_ERRORS = frozenset({"connect", "timeout_connect", "early_close"})


class FirstWorkerWaits:
    """Lets requests wait in `WorkerWait`, after they were read and before the core chooses a
    worker. Lifetime: process.
    """

    def __init__(self, service: Service, tenants: Tenants, reader: InferenceReader) -> None:
        self._service = service
        self._tenants = tenants
        self._reader = reader
        self._queue = service.waiting

    def can_help(self, state: RequestState, reject: Reject) -> bool:
        """Return True if a refused request should wait for a worker and then be tried again.

        That is so if its model has no worker, or if its last worker has just left. It is not so for
        a request that has lost its worker too often, because the request itself may crash workers.
        """
        if (
            state.waited_in_vain
            or reject.code not in _NO_WORKER_CODES
            or (state.stream is not None and state.stream.begun)
            or not self._queue.may_wait(state.arrival)
        ):
            return False
        latest = state.attempts[-1] if len(state.attempts) > state.attempts_before_wait else None
        if latest is None:
            return not self._queue.ready_workers(state.arrival.model)
        lost = sum(one.by_worker and one.error == "early_close" for one in state.attempts)
        rounds_left = state.rounds_after_loss < _MAX_ROUNDS and lost <= _MAX_LOSSES
        return rounds_left and latest.by_worker and latest.error in _LOST_WORKER_ERRORS

    async def wait(self, state: RequestState, target: Target | None) -> Reject | None:
        """Wait for a worker of the request's model, and return None; or return why the request is
        refused.

        The request is read again afterwards, because the new worker may have blocks of another
        size. `target` is the same as for `InferenceReader.read`. Raises ClientError as
        `InferenceReader.read` does, and if the request's key is no longer valid.
        """
        arrival, service = state.arrival, self._service
        if state.waits_since is None:
            state.waits_since = Began(service.clock(), arrival.request_id)
        if state.kept_kv is not None:  # any worker that joins prefills it again
            state.kept_kv.failed(may_be_kept=True)
        if state.ticket.request_id >= 0:  # it came before the core, which refused it
            state.ticket.close()
            state.ticket = Ticket(service.dispatcher)
            if len(state.attempts) > state.attempts_before_wait:
                state.attempts_before_wait, state.rounds_after_loss = (
                    len(state.attempts),
                    state.rounds_after_loss + 1,
                )
                await asyncio.sleep(_PROBED_S)
        if self._queue.holds(arrival.model):
            refusal = await self._queued(state, arrival, state.waits_since)
            if refusal is not None:
                return self._refused(state, refusal)
        state.account.refresh_key_terms(self._tenants.key_of(state.http))  # 401
        edits, path = state.carrier.edits, state.carrier.path(target)
        read = await self._reader.read(state.http, path, state.account.terms, target, edits)
        hold_s = arrival.hold_s
        if hold_s is not None:  # both count as from the beginning
            hold_s = max(hold_s - (service.clock() - state.waits_since.at_s), 0.0)
        bounded = replace(read.arrival, deadline_s=arrival.deadline_s, hold_s=hold_s)
        state.understood(read._replace(arrival=bounded))
        return None

    async def _queued(
        self, state: RequestState, arrival: Arrival, began: Began
    ) -> Rejection | None:
        """Wait in the queue, which counts all bytes that the request keeps in memory meanwhile."""
        body_bytes = len(state.http.body)
        if state.body is not state.http.body:
            body_bytes += len(state.body)
        names, name = self._service.names, state.name
        others: Callable[[], frozenset[str]] = frozenset
        if names is not None and name is not None and name.asked is not None:
            others = partial(names.open_models, name.asked)
        return await self._queue.wait(arrival, body_bytes, began, others)

    def _refused(self, state: RequestState, refusal: Rejection) -> Reject:
        state.waited_in_vain = True
        status, code, message = refusal
        self._service.dispatcher.core.counters.rejected(code)
        after_s = _RETRY_AFTER_S if status == 503 else None
        return Reject(state.arrival.request_id, status, code, message, after_s)
