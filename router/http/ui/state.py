"""What the page is told, made once a second however many pages ask, and never when none does."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from router.core.core import RouterCore
from router.fleet_io.manager import FleetManager
from router.http.decisions import DecisionLog
from router.http.explain_pages import decision_shown
from router.http.local_desk import LocalDesk
from router.http.policy_shown import policy_shown
from router.http.readiness import readiness
from router.http.ui import frame
from router.http.ui.history import COLUMNS
from router.http.ui.hits import RecentHits
from router.http.ui.sampler import Sampler
from router.metrics.registry import RouterMetrics
from router.switchboard import Switchboard

log = logging.getLogger(__name__)

SAMPLE_S = 1.0
_DECISIONS = 40  # told at once: a page that asks each second sees all of a calm router
_OUTCOMES = 300  # decisions whose outcome is told

Replicas = Callable[[], list[dict[str, Any]]]


class UiState:
    """Lifetime: process."""

    def __init__(
        self,
        switchboard: Switchboard,
        desk: LocalDesk,
        fleet: FleetManager,
        decisions: DecisionLog,
        metrics: RouterMetrics,
    ) -> None:
        core: RouterCore = switchboard.core
        self.boot = secrets.token_hex(8)  # tells a page that another router answers now
        self.replicas: Replicas = list
        self._switchboard = switchboard
        self._desk = desk
        self._fleet = fleet
        self._decisions = decisions
        self.sampler = Sampler(core, metrics, switchboard.clock)
        self._hits = RecentHits(core, decisions)
        self._made: int | None = None  # the sample that `_frame` goes with
        self._frame = b""
        self._roots: list[tuple[object, ...]] = []  # of the names told
        self._named = b"[]"
        self.version = 0  # of `_named`

    async def run(self) -> None:
        """Take a sample a second, for ever, whether anybody looks or not."""
        clock = asyncio.get_running_loop().time
        due_s = clock() + SAMPLE_S
        while True:
            await asyncio.sleep(max(due_s - clock(), 0.0))
            due_s = max(due_s + SAMPLE_S, clock())  # seconds lost by a stall are not made up for
            try:
                self.sample()
            except Exception:  # ours; the page shows that nothing new comes
                log.exception("no sample for the page")

    def sample(self) -> None:
        """A second has passed."""
        self._hits.look(SAMPLE_S)
        self.sampler.sample()

    def told(self, boot: str, since: int, version: int) -> bytes | None:
        """JSON for a page that has what the router `boot` told up to the sample `since`, and the
        names of `version`; 0: it has none. None: it has everything.
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
        """The frame of this sample, unless it is there."""
        taken = self.sampler.history.taken
        if taken == self._made:
            return
        core = self._switchboard.core
        self._switchboard.advance()
        fleet = frame.rows(core, list(self._fleet.members.values()))
        roots = frame.roots(fleet)
        if roots != self._roots or not self.version:
            self._roots, self._named = roots, msgspec.json.encode(frame.names(fleet))
            self.version += 1
        now_s = self._switchboard.clock()
        self._frame = msgspec.json.encode(
            {
                "sample": taken,
                "version": self.version,
                "now_s": now_s,
                "unix_s": round(time.time(), 3),
                "policy": policy_shown(core.guard, now_s),
                "readiness": readiness(self._desk),
                "held": core.held_requests,
                "inflight": core.inflight_requests,
                "workers": frame.columns(core, fleet, self._hits, now_s),
                "troubles": frame.troubles(fleet),
                "trunks": frame.trunks(core, fleet),
                "decisions": self._latest(),
                "replicas": self.replicas(),
            }
        )
        self._made = taken

    def _latest(self) -> dict[str, Any]:
        """The newest first; the first of them is number `added`. `outcomes`: of more of them, for
        answers come late: seconds to the first token, cached tokens as reported; null: not known.
        """
        latest = self._decisions.latest(_OUTCOMES)
        return {
            "added": self._decisions.added,
            "rows": [decision_shown(one) for one in latest[:_DECISIONS]],
            "outcomes": [(one.first_token_s, one.cached_tokens) for one in latest],
        }
