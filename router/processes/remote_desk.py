"""The desk of a satellite: each question goes to the leader.

A satellite keeps no load and no cache: it knows the workers' addresses and by which blocks a
model's prompts are hashed, as the leader told it last.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from policies.facts import Arrival
from router.config.schema import Config
from router.core.actions import Reject
from router.http.desk import NOBODY, Errand, Named, card
from router.http.errors import ClientError
from router.http.explain_header import Asked
from router.processes.carriers import Carriers, terms_of
from router.processes.line import Line
from router.processes.messages import (
    Beat,
    Faulty,
    OfLeader,
    Pool,
    Sent,
    Settings,
    Turned,
    View,
    Welcome,
)
from router.processes.remote_case import RemoteCase
from router.processes.told import arrived
from router.processes.trouble import Trouble

log = logging.getLogger(__name__)

SILENT_S = 5.0  # a leader that says nothing for so long is not waited for
_RETRY_AFTER_S = 1.0
_UNKNOWN = Pool("", "", None, (), None, True, 0)


class RemoteDesk:
    """Lifetime: process."""

    def __init__(self) -> None:
        """To be made in the event loop."""
        self.line: Line[OfLeader] = Line(OfLeader, self._heard, self._lost)
        self.clock = time.monotonic
        self.carriers = Carriers(self.clock)
        self.config: Config | None = None  # None: the leader has not welcomed us yet
        self.key_secret: bytes | None = None  # of the leader's ring of API keys
        self.welcomed = asyncio.Event()  # or lost
        self.lost = ""  # why there is no leader any more
        self.leaving = False  # we end, and need none
        self.unanswered = Trouble("requests were refused: the leader does not answer")
        self.on_settings: Callable[[], None] = lambda: None  # the configuration is another one
        self.cases: dict[int, RemoteCase] = {}
        self._ids = itertools.count()
        self._heard_s = self.clock()
        self._view = View((), (), 0, ())
        self._pools: dict[str, Pool] = {}

    def next_request_id(self) -> int:
        """See `Desk`."""
        return next(self._ids)

    def models(self) -> list[str]:
        """See `Desk`."""
        return [pool.model for pool in self._view.pools if pool.block_sizes]

    def block_sizes(self, model: str) -> frozenset[int]:
        """See `Desk`."""
        return frozenset(self._pools.get(model, _UNKNOWN).block_sizes)

    def identity(self, model: str) -> tuple[str, str | None]:
        """See `Desk`."""
        pool = self._pools.get(model)
        return (model, None) if pool is None else (pool.base, pool.adapter)

    def trusts(self, model: str) -> bool:
        """Whether prompts of `model` are placed by our token ids."""
        return self._pools.get(model, _UNKNOWN).exact

    def case(
        self, arrival: Arrival, explain: Asked, whose: bytes = b"", named: Named = NOBODY
    ) -> RemoteCase:
        """See `Desk`."""
        return RemoteCase(self, arrived(arrival, explain, whose, named))

    def cards(self) -> list[dict[str, Any]]:
        """See `Desk`."""
        return [
            card(pool.model, (pool.base, pool.adapter), pool.max_model_tokens)
            for pool in self._view.pools
        ]

    def ready_workers(self) -> int:
        """See `Desk`; none without a leader."""
        return 0 if self.lost else self._view.ready_workers

    def ready_by_model(self) -> dict[str, int]:
        """See `Desk`."""
        return {pool.model: pool.ready_workers for pool in self._view.pools if pool.block_sizes}

    def reasons(self) -> tuple[str, ...]:
        """See `Desk`."""
        why = self.unanswerable()
        return self._view.reasons if why is None else (*self._view.reasons, why)

    def faulty(self, status: int) -> None:
        """See `Desk`."""
        self.line.say(Faulty(status))

    def unanswerable(self) -> str | None:
        """Why it is no use to ask the leader now; None: it is."""
        if self.lost:
            return f"the router begins anew ({self.lost})"
        if self.clock() - self._heard_s > SILENT_S:
            return f"the router's deciding process has said nothing for {SILENT_S:g} s"
        return None

    def no_answer(self, request_id: int, why: str) -> Reject:
        """The refusal of a request that the leader does not decide."""
        self.unanswered.met(why)
        return Reject(request_id, 503, "router_restarting", why, _RETRY_AFTER_S)

    def look(self) -> None:
        """Refuse those that wait for a leader that says nothing. To be called every second."""
        if not self.lost and (why := self.unanswerable()) is not None:
            for case in list(self.cases.values()):
                case.give_up(why)

    def _heard(self, messages: Sequence[OfLeader]) -> None:
        self._heard_s = self.clock()
        for message in messages:
            match message:
                case Sent():
                    self._sent(message)
                case Turned():
                    self._turned(message)
                case View():
                    self._see(message)
                case Settings():
                    self.config = message.config
                    self.on_settings()
                    log.info("reloaded")
                case Welcome():
                    self.config = message.config
                    self.key_secret = message.key_secret
                    self.carriers.terms = terms_of(message.config)
                    self._ids = itertools.count(message.first_request_id)
                    self._see(message.view)
                    self.welcomed.set()
                case Beat():
                    pass  # `_heard_s` is what it is for

    def _sent(self, message: Sent) -> None:
        if (case := self.cases.get(message.request_id)) is not None:
            worker_id = message.worker_id
            carrier = self.carriers.get(worker_id)
            how = (message.uncached_tokens, message.wait_s, message.why)
            case.put(Errand(worker_id, message.headers, carrier, *how))

    def _turned(self, message: Turned) -> None:
        case = self.cases.get(message.request_id)
        if case is not None and message.headers:
            told = (message.status, message.message)
            case.put(ClientError(*told, code=message.code, headers=message.headers))
        elif case is not None:
            case.why = message.why
            parts = (message.status, message.code, message.message, message.retry_after_s)
            case.put(Reject(message.request_id, *parts))

    def _see(self, view: View) -> None:
        self._view = view
        self._pools = {pool.model: pool for pool in view.pools}
        self.carriers.see(view.workers)

    def _lost(self, why: str) -> None:
        self.lost = why
        self.welcomed.set()
        if not self.leaving:
            log.error("the leader is gone (%s): running answers go on, new requests get 503", why)
        for case in list(self.cases.values()):
            case.orphan(why)
