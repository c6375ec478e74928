"""The sessions, followed while the policy in use asks about them: nobody else pays for them."""

from __future__ import annotations

from policies.contract import Ints
from policies.load import LoadedPolicy
from router.core.columns import WorkerColumns
from router.core.eligible import Rows
from router.core.hold_queue import Pending
from router.core.session_view import SessionView
from router.core.settings import CoreSettings
from router.core.workers import Worker
from router.estimators.sessions import Sessions


class Following:
    """Lifetime: process. `sessions` is None while no policy asks for them."""

    def __init__(self, columns: WorkerColumns, settings: CoreSettings) -> None:
        self._columns, self._settings = columns, settings
        self.sessions: Sessions | None = None

    def follow(self, policy: LoadedPolicy) -> None:
        """Begin, go on, or stop, as this policy needs."""
        if not policy.needs_sessions:
            self.sessions = None
        elif self.sessions is None:
            settings = self._settings
            self.sessions = Sessions(
                self._columns, settings.max_workers, settings.sessions, settings.session_blocks
            )

    def arrived(self, pending: Pending) -> None:
        """A request came in: whose is it?"""
        if self.sessions is not None:
            arrival = pending.arrival
            size = min(arrival.chains)
            chain, now_s = arrival.chains[size], arrival.now_s
            pending.visit = self.sessions.arrived(arrival, chain, size, now_s)

    def view(self, pending: Pending, rows: Rows, hits: Ints) -> SessionView | None:
        """What a decision is told; None: nothing."""
        if self.sessions is None or pending.visit is None:
            return None
        chain = pending.arrival.chains[rows.block_sizes[0]]
        told = SessionView(self.sessions, pending.visit, rows, hits, self._columns, chain)
        if not pending.held:  # its place in the queue stays
            pending.standing = told.standing
        return told

    def dispatched(self, pending: Pending, slot: int) -> None:
        """It was sent to the worker in `slot`."""
        if self.sessions is not None and pending.visit is not None:
            self.sessions.dispatched(pending.visit, slot)

    def held(self, pending: Pending) -> None:
        """It must wait at the router."""
        if self.sessions is not None and pending.visit is not None:
            self.sessions.held(pending.visit)

    def ended(self, pending: Pending, now_s: float, output_tokens: int | None = None) -> None:
        """Its answer is complete (with `output_tokens`), or it came to nothing (None)."""
        visit, pending.visit = pending.visit, None
        if self.sessions is not None and visit is not None:
            self.sessions.ended(visit, output_tokens, now_s)

    def lost(self, worker: Worker | None) -> None:
        """A worker's cache is gone."""
        if self.sessions is not None and worker is not None:
            self.sessions.worker_lost(worker.slot)

    def tick(self, now_s: float) -> None:
        """Time passed."""
        if self.sessions is not None:
            self.sessions.refresh(now_s)
