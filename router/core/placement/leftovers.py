"""Requests whose clients have left, and which their workers may go on computing.

Their connections are closed: nobody hears of their ends. So each stays charged to its worker until
the worker reports fewer requests than are charged there, or until it should be over by the model:
its prefill, and the tokens that it may still give at the worker's time per token.
"""

from __future__ import annotations

from policies.facts import LoadReport
from router.core.placement.hold_queue import Pending
from router.core.workers.ledger import Ledger

_LONGEST_S = 600.0  # whatever the model says


class Leftovers:
    """Lifetime: process."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: dict[int, tuple[float, Pending]] = {}  # by request: when it should be over

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, pending: Pending, output_tokens: float, now_s: float) -> bool:
        """Its client has left; False where it was at no worker.

        `output_tokens`: of its whole answer where its client did not bound it.
        """
        arrival = pending.arrival
        most = arrival.max_output_tokens
        left_s = self._ledger.left_s(
            arrival.request_id, output_tokens if most is None else most, now_s
        )
        if left_s is None:
            return False
        self._ledger.unwatched(arrival.request_id)
        self._kept[arrival.request_id] = now_s + min(left_s, _LONGEST_S), pending
        return True

    def lost(self, worker_id: int) -> list[Pending]:
        """Those of a worker that is gone, or down, perhaps with all that it computed; the charges
        of these, and of others that are over, are the caller's to release.
        """
        if not self._kept:
            return []
        charged = self._ledger.on_worker(worker_id)
        kept = [one.request_id for one in charged if one.request_id in self._kept]
        return [self._kept.pop(number)[1] for number in kept]

    def over(self, now_s: float) -> list[Pending]:
        """Those that should be over by now."""
        due = [number for number, (until_s, _) in self._kept.items() if until_s <= now_s]
        return [self._kept.pop(number)[1] for number in due]

    def reported_over(self, fact: LoadReport) -> list[Pending]:
        """Those, first come first, for which a report has no room beside what else is charged."""
        if not self._kept:
            return []
        charged = self._ledger.on_worker(fact.worker_id)
        over = len(charged) - fact.running - fact.waiting
        kept = [one.request_id for one in charged if one.request_id in self._kept]
        return [self._kept.pop(number)[1] for number in kept[: max(over, 0)]]
