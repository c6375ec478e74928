"""Holds the parts of the router that are needed to serve a request: the core, the fleet, counters
and logs.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from router.core.contract.actions import Reject
from router.core.workers.table import HalfMissing, serves
from router.fleet.manager import FleetManager
from router.http.messages import Request
from router.keys.tenant_counts import TenantCounts
from router.metrics.registry import RouterMetrics
from router.record.access_log import AccessLog
from router.record.request_log import RequestLog
from router.record.request_record import LatestAttempts, RequestRecord
from router.record.trace import Tracer
from router.record.trace_export import Exporter
from router.request.dispatcher import Dispatcher
from router.request.naming import NameResolver
from router.request.sequences import Sequences
from router.request.worker_hits import WorkerHits
from router.tokens.check import TokenCheck
from router.tokens.renderers import Renderers
from router.waiting.known_models import KnownModels
from router.waiting.queue import WorkerWait
from router.waiting.settings import WaitingSettings

ID_HEADER = "x-request-id"
_DRAINING = "draining"  # a rejection's code
_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger(__name__)


def _no_waiting(dispatcher: Dispatcher) -> WorkerWait:
    workers, clock = dispatcher.core.workers, dispatcher.clock
    known = KnownModels(workers, clock, frozenset, lambda: 0.0)
    return WorkerWait(workers, known, clock, lambda: WaitingSettings(wait_s=0.0))


class Service:
    """The parts of the router that serving a request needs. Lifetime: process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        fleet: FleetManager,
        metrics: RouterMetrics,
        request_log: RequestLog | None = None,
        check: TokenCheck | None = None,
        *,
        hits: WorkerHits | None = None,
        renderers: Renderers | None = None,
        access: AccessLog | None = None,
        traces: Exporter | None = None,
        tracer: Tracer | None = None,
        hangs: Callable[[], str] = str,
        refuses: Callable[[], bool] = lambda: False,
        waiting: WorkerWait | None = None,
    ) -> None:
        """Collect the parts. `hits` judges how exactly workers' caches are known. `tracer` is None
        if no traces are exported.

        `hangs` returns which part of this router hangs, or "" if none does. `refuses` returns
        whether the router refuses new requests while it drains. `waiting` has the requests that
        wait for a first worker; it is None if requests never wait.
        """
        self.dispatcher = dispatcher
        self.fleet = fleet
        self.metrics = metrics
        self.check = check
        self.renderers = renderers
        self.hits = hits
        self.request_log = request_log
        self.access = access
        self.traces = traces
        self.tracer = tracer
        self.latest = LatestAttempts()
        self.sequences = Sequences()
        self.counts = TenantCounts()
        # Resolves names other than those of models; set by the builder.
        self.names: NameResolver | None = None
        self.draining = False  # an operator wants no new requests
        self.retired = ""  # why this router is about to end
        self.hangs = hangs
        self.refuses = refuses
        self.clock = dispatcher.clock
        self.waiting = _no_waiting(dispatcher) if waiting is None else waiting
        self.next_request_id = dispatcher.next_request_id
        self.models = dispatcher.core.workers.models
        self.block_sizes = dispatcher.core.workers.block_sizes
        self.identity = dispatcher.core.workers.identity
        self.splits = dispatcher.core.workers.splits
        self._id_prefix = secrets.token_hex(6)
        self._id_numbers = itertools.count()
        self._told_version = -1  # of the workers, when it was looked which roles do nothing
        self._told_halves: set[str] = set()

    def retire(self, why: str) -> None:
        """Make `/ready` answer that the router is not ready from now on, with the reason `why`."""
        self.retired = why

    def id_of(self, request: Request) -> str:
        """Return the id that the client gave a request, or else a new one that no other router
        uses.
        """
        given = request.headers.get(ID_HEADER)
        if given is not None and _ID.fullmatch(given):
            return given
        return f"{self._id_prefix}-{next(self._id_numbers):x}"

    def write(self, record: RequestRecord) -> None:
        """Pass the record of a request to the logs and traces. It never waits."""
        if self.request_log is not None and record.arrival is not None:
            self.request_log.put(record)
        if self.access is not None:
            self.access.put(record)
        if self.traces is not None and record.trace is not None and record.trace.sampled:
            self.traces.put(record)

    def ready_workers(self) -> int:
        """Return how many workers take requests now."""
        return sum(w.takes_requests for w in self.dispatcher.core.workers)

    def ready_by_model(self) -> dict[str, int]:
        """Return the number of workers that take requests now, for each served model; the models
        are sorted.
        """
        workers = self.dispatcher.core.workers
        return {m: sum(w.takes_requests for w in workers.serving(m)) for m in workers.models()}

    def takes(self, model: str) -> bool:
        """Return True if a worker of the model takes requests now, or if requests are held because
        most of its workers do not answer probes.
        """
        core = self.dispatcher.core
        panics = core.health.silences.panics
        return any(
            w.takes_requests or (w.silent is not None and w.facts.models[0] in panics)
            for w in core.workers.serving(model)
        )

    def promises(self, model: str | None = None) -> bool:
        """Return True if the operator wants requests of a model although it has no worker
        (`waiting.models`); for None, if this is so for any model.
        """
        return self.waiting.is_promised(model)

    def takes_any(self) -> bool:
        """Return True if the router `takes` requests for at least one model, or holds them for a
        first worker.
        """
        return self.promises() or any(map(self.takes, self.dispatcher.core.workers.models()))

    def halves_missing(self) -> dict[str, list[HalfMissing]]:
        """Return, for each model, which of its workers' roles (prefill or decode) cannot be used
        now, and why.
        """
        workers = self.dispatcher.core.workers
        found = ((model, workers.halves_missing(model)) for model in workers.models())
        return {model: halves for model, halves in found if halves}

    def unserved(self, model: str) -> str:
        """Return why neither a ready worker of a model nor a pair of its workers can serve
        requests; "" if they can.
        """
        workers = self.dispatcher.core.workers
        ready = [w.facts for w in workers.serving(model) if w.state == "ready"]
        if not ready or serves(ready):
            return ""
        why = "; ".join(map(str, workers.halves_missing(model)))
        return f"the model {model!r} cannot be served: {why}"

    def log_unusable_roles(self) -> None:
        """Log which roles of workers cannot be used, if that changed. It is called at
        every tick.
        """
        workers = self.dispatcher.core.workers
        if workers.version == self._told_version:
            return
        self._told_version = workers.version
        now = {f"model {m!r}: {h}" for m, halves in self.halves_missing().items() for h in halves}
        for line in sorted(now - self._told_halves):
            log.warning("%s; it is used only as far as it serves alone", line)
        for line in sorted(self._told_halves - now):
            log.info("no longer so: %s", line)
        self._told_halves = now

    def reasons(self) -> tuple[str, ...]:
        """Return the reasons, apart from its workers' state, why this router wants no new requests;
        empty if it wants them.
        """
        drained = "the router is draining" if self.draining else ""
        return tuple(why for why in (drained, self.retired) if why)

    def drain(self, by: str) -> None:
        """Make the router not ready. New requests are still served, or refused if the configuration
        says so. `by` names in the log who asked for it.
        """
        log.info("the router is draining, by %s", by)
        self.draining = True

    def undrain(self, by: str) -> None:
        """Make the router ready again after `drain`."""
        log.info("the router is no longer draining, by %s", by)
        self.draining = False

    def refusal(self, request_id: int) -> Reject | None:
        """Return the refusal of a new request, or None if the router accepts the request.

        The router refuses requests only while it drains, and only if it is configured to.
        """
        if not (self.draining and self.refuses()):
            return None
        core = self.dispatcher.core
        core.counters.rejections[_DRAINING] += 1
        why = "the router is draining"
        return Reject(request_id, 503, _DRAINING, why, core.settings.retry_after_s)

    def faulty(self, status: int) -> None:
        """Count a request that was refused because of its client, or, with status 500, that a
        defect of the router ended.
        """
        self.metrics.requests.faulty(status)

    def cards(self) -> list[dict[str, Any]]:
        """Return a card for each model, as `GET /v1/models` shows it, with the shortest context
        limit of its workers.
        """
        limits: dict[str, list[int]] = {}
        for member in self.fleet.members.values():
            if member.recognized is None:
                continue
            facts = member.recognized.facts
            for name in facts.models:
                known = limits.setdefault(name, [])
                if facts.max_model_tokens is not None:
                    known.append(facts.max_model_tokens)
        cards = [self._card(name, min(known, default=None)) for name, known in limits.items()]
        return cards if self.names is None else self.names.with_cards(cards)

    def card(self, name: str) -> dict[str, Any] | None:
        """Return the card of one model; None if the model is unknown."""
        card = self._model_card(name)
        return card if card or self.names is None else self.names.card(name, self._model_card)

    def _model_card(self, name: str) -> dict[str, Any] | None:
        recognized = (member.recognized for member in self.fleet.members.values())
        listing = [one.facts for one in recognized if one and name in one.facts.models]
        known = (f.max_model_tokens for f in listing if f.max_model_tokens is not None)
        return self._card(name, min(known, default=None)) if listing else None

    def _card(self, name: str, max_tokens: int | None) -> dict[str, Any]:
        base, adapter = self.identity(name)
        limit = {} if max_tokens is None else {"max_model_len": max_tokens}
        return {
            "id": name,
            "object": "model",
            "created": 0,  # the time is unknown, but OpenAI's clients want a number
            "owned_by": "warmroute",
            "parent": None if adapter is None else base,  # of an adapter, as vLLM has it
            **limit,
        }
