"""How much the router lets one worker have: beyond that requests wait here, whatever policies say.

A policy's thresholds say whom to leave alone while another has room; these limits hold where nobody
has room, too. Who is at one gets nothing; what takes it beyond, by one prompt, is let in whole.
"""

from __future__ import annotations

import numpy as np

from router.core.columns import WorkerColumns
from router.core.eligible import Rows
from router.core.settings import NO_LIMIT, CoreSettings


class WorkerLimits:
    """Lifetime: process."""

    def __init__(self, settings: CoreSettings, columns: WorkerColumns) -> None:
        self._requests = settings.worker_requests
        self._queued_tokens = settings.worker_queued_tokens
        self._columns = columns
        self._any = min(self._requests, self._queued_tokens) < NO_LIMIT
        self._latest: tuple[Rows, bytes, Rows | None] | None = None  # asked for, full, answered

    def rows(self, rows: Rows) -> Rows | None:
        """Those of `rows` that are below both limits; None: nobody is."""
        if not self._any:
            return rows
        slots, columns = rows.slots, self._columns
        full = columns.requests[slots] >= self._requests
        if self._queued_tokens < NO_LIMIT:
            full |= columns.queued_tokens(slots) >= self._queued_tokens
        if not full.any():
            return rows
        key, latest = np.packbits(full).tobytes(), self._latest
        if latest is None or latest[0] is not rows or latest[1] != key:
            left = [rows.workers[place] for place in np.flatnonzero(~full).tolist()]
            latest = self._latest = rows, key, Rows.of(left) if left else None
        return latest[2]
