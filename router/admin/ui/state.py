"""Makes the state that the page at `/ui` shows, once a second while browsers ask for it."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from typing import Any

import msgspec

from router.admin.ui import fleet as frame
from router.admin.ui.fleet import RecentHits
from router.admin.ui.problems import Problems, Rows
from router.admin.ui.samples import COLUMNS, Sampler
from router.admin.views.rows import decision_shown, policy_shown
from router.core.core import RouterCore
from router.fleet.manager import FleetManager
from router.metrics.registry import RouterMetrics
from router.record.request_record import LatestAttempts
from router.request.dispatcher import Dispatcher
from router.request.service import Service
from router.server.client_port import readiness

log = logging.getLogger(__name__)

SAMPLE_S = 1.0
_DECISIONS = 40  # per answer: a page that asks every second sees all decisions of a calm router
_PROBLEMS_EVERY = 3  # samples between two searches for problems, each of which takes 20 us a worker
_OUTCOMES = 300  # latest decisions whose outcomes are sent


class UiState:
    """Makes the state that the page at `/ui` shows, once for all browsers. Lifetime: process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        service: Service,
        fleet: FleetManager,
        decisions: LatestAttempts,
        metrics: RouterMetrics,
        sources: Rows = list,
        replicas: Rows = list,
    ) -> None:
        """Make the state from these parts of the router. `sources` returns rows of the parts that
        name workers, and `replicas` returns rows of the routers that share state.
        """
        core: RouterCore = dispatcher.core
        self.boot = secrets.token_hex(8)  # changes if another router process answers
        self._dispatcher = dispatcher
        self._service = service
        self._fleet = fleet
        self._decisions = decisions
        self.sampler = Sampler(core, metrics, dispatcher.clock)
        self._hits = RecentHits(core, decisions)
        self.problems = Problems(core, service, fleet, metrics, sources, replicas)
        self._made: int | None = None  # the sample that `_frame` was made of
        self._frame = b""
        self._roots: list[tuple[object, ...]] = []  # the objects that `_named` was made of
        self._named = b"[]"
        self.version = 0  # of `_named`
        self._judged = -math.inf  # the sample of the last verdicts on how exact hits are
        self._exactness: dict[str, Any] = {}

    async def run(self) -> None:
        """Take a sample every second, forever, whether or not a page is open."""
        clock = asyncio.get_running_loop().time
        due_s = clock() + SAMPLE_S
        while True:
            await asyncio.sleep(max(due_s - clock(), 0.0))
            due_s = max(due_s + SAMPLE_S, clock())  # samples missed in a stall are skipped
            try:
                self.sample()
            except Exception:  # a defect of the router; the page shows that it gets nothing new
                log.exception("no sample for the page")

    def sample(self) -> None:
        """Record the figures of the last second."""
        self._hits.look(SAMPLE_S)
        self.problems.look(self._dispatcher.clock())
        self.sampler.sample()

    def news_json(self, boot: str, since: int, version: int) -> bytes | None:
        """Return as JSON what is new for a page, or None if nothing is new. The page already has
        the state of the router process `boot` up to the sample number `since`, and version
        `version` of the workers' names. 0 means that the page has no samples or names.
        """
        history = self.sampler.history
        if boot != self.boot:
            since = version = 0
        self._make()
        if since == history.taken and version == self.version and since:
            return None
        parts = [
            b'{"boot":%b' % msgspec.json.encode(self.boot),
            b'"columns":%b' % msgspec.json.encode(COLUMNS),
            b'"history":%b' % msgspec.json.encode(history.after(since)),
            b'"frame":%b' % self._frame,
        ]
        if version != self.version:
            parts.append(b'"names":%b' % self._named)
        return b",".join(parts) + b"}"

    def _make(self) -> None:
        """Make the state for the latest sample, unless it was made already."""
        taken = self.sampler.history.taken
        if taken == self._made:
            return
        core = self._dispatcher.core
        self._dispatcher.advance()
        fleet = frame.rows(core, list(self._fleet.members.values()))
        roots = frame.roots(fleet)
        if roots != self._roots or not self.version:
            self._roots, self._named = roots, msgspec.json.encode(frame.names(fleet))
            self.version += 1
            self._judged = -math.inf
        if taken >= self._judged + _PROBLEMS_EVERY:
            self._judged = taken
            self._exactness = frame.exactness(fleet, self._service.hits)
        now_s = self._dispatcher.clock()
        self._frame = msgspec.json.encode(
            {
                "sample": taken,
                "version": self.version,
                "now_s": now_s,
                "unix_s": round(time.time(), 3),
                "policy": policy_shown(core.guard, now_s),
                "readiness": readiness(self._service),
                "held": core.held_requests,
                "inflight": core.inflight_requests,
                "workers": frame.columns(core, fleet, self._hits, now_s),
                **self.problems.shown(now_s),
                "exactness": self._exactness,
                "trunks": frame.trunks(core, fleet),
                "decisions": self._latest(),
                "replicas": self.problems.replicas(),
            }
        )
        self._made = taken

    def _latest(self) -> dict[str, Any]:
        """Return the newest decisions, newest first; `added` is the number of the first one.
        `outcomes` covers more decisions, because answers end later than decisions are made. An
        outcome has the seconds to the first token, and the cached tokens and all prompt tokens as
        the worker reported them; null means unknown.
        """
        latest = self._decisions.latest(_OUTCOMES)
        return {
            "added": self._decisions.added,
            "rows": [decision_shown(one) for one in latest[:_DECISIONS]],
            "outcomes": [
                (one.first_token_s, one.cached_tokens, one.worker_prompt_tokens) for one in latest
            ],
        }
