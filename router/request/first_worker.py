"""Lets a request of a known model wait while no worker takes it, and reads it anew afterwards."""

from __future__ import annotations

from dataclasses import replace

from router.core.contract.actions import Reject
from router.request.dialect import Target
from router.request.dispatcher import Ticket
from router.request.reading import InferenceReader
from router.request.service import Service
from router.request.state import RequestState
from router.waiting.queue import Began

_RETRY_AFTER_S = 30.0  # an engine's start takes minutes
_LEAST_S = 1.0  # until the fleet has probed a worker that did not answer
_LOSSES = 3  # workers that a request may lose: beyond it, it may be what they die of
# Refusals of the core that may mean that the last worker is gone, or about to be known as gone.
_GONE = frozenset({"no_worker_available", "model_not_found", "worker_error"})
# Failures that a request did not cause: its worker was not there, or left.
_UNREACHED = frozenset({"connect", "timeout_connect"})
_LEFT = _UNREACHED | {"early_close"}


class FirstWorkerWaits:
    """Lets requests wait in `WorkerWait`, between their reading and the core. Lifetime: process."""

    def __init__(self, service: Service, reader: InferenceReader) -> None:
        self._service = service
        self._reader = reader
        self._queue = service.waiting

    def can_help(self, state: RequestState, reject: Reject) -> bool:
        """Return True if a refused request should wait for a worker, and be placed anew then.

        This is so if its model lost its last worker while the request was at it, or on its way.
        """
        if (
            state.waited_in_vain
            or reject.code not in _GONE
            or (state.stream is not None and state.stream.begun)
            or not self._queue.may_wait(state.arrival)
        ):
            return False
        lost = [one.error for one in state.attempts if one.by_worker and one.error in _LEFT]
        if sum(kind not in _UNREACHED for kind in lost) >= _LOSSES:
            return False
        return bool(lost) or not self._queue.ready_workers(state.arrival.model)

    async def wait(self, state: RequestState, target: Target | None) -> Reject | None:
        """Wait for a worker of the request's model; else return why the request is refused.

        The request is read anew afterwards: the worker that came may have blocks of another size.
        target: as of `InferenceReader.read`.
        Raises ClientError as `InferenceReader.read` does.
        """
        arrival, service, least_s = state.arrival, self._service, 0.0
        if state.waits_since is None:
            state.waits_since = Began(service.clock(), arrival.request_id)
        if state.kept_kv is not None:  # whichever worker comes prefills it anew
            state.kept_kv.failed(may_be_kept=True)
        if state.ticket.request_id >= 0:  # it came before the core, which refused it
            state.ticket.close()
            state.ticket, least_s = Ticket(service.dispatcher), _LEAST_S
        others = frozenset[str]()
        if state.name is not None and state.name.asked is not None and service.names is not None:
            others = service.names.models_of(state.name.asked)
        waits = arrival, len(state.body), state.waits_since, least_s, others
        refusal = await self._queue.wait(*waits)
        if refusal is not None:
            state.waited_in_vain = True
            status, code, message = refusal
            service.dispatcher.core.counters.rejected(code)
            after_s = _RETRY_AFTER_S if status == 503 else None
            return Reject(arrival.request_id, status, code, message, after_s)
        path = state.carrier.path(target)
        edits = state.carrier.edits
        read = await self._reader.read(state.http, path, state.account.terms, target, edits)
        bounded = replace(read.arrival, deadline_s=arrival.deadline_s)  # as from the beginning
        state.understood(read._replace(arrival=bounded))
        return None
