"""Abandoned requests: their clients have left, but their workers may still compute them.

The connections of these requests are closed, so the router does not see when a worker finishes
them. Each request stays charged to its worker until the worker reports fewer requests than are
charged there. Without such a report, the charge is released when the request should be over by
estimate: after its prefill and the rest of its answer, at the worker's time per token.
"""

from __future__ import annotations

from policies.facts import LoadReport
from router.core.placement.pending import Pending
from router.core.workers.ledger import Charge, Ledger

_LONGEST_S = 600.0  # longest time that a charge is kept, whatever the estimate


class Leftovers:
    """Keeps abandoned requests charged to their workers until they should be over.

    An abandoned request is one whose client has left. Lifetime: process.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # With the time at which each should be over.
        self._kept: dict[Charge, tuple[float, Pending]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, pending: Pending, charge: Charge, output_tokens: float, now_s: float) -> None:
        """Keep a request charged to its worker, because its client has left.

        `output_tokens` is the expected length of the answer; it is used if the client set no
        maximum.
        """
        most = pending.arrival.max_output_tokens
        left_s = self._ledger.left_s(charge, output_tokens if most is None else most, now_s)
        self._ledger.unwatched(charge)
        self._kept[charge] = now_s + min(left_s, _LONGEST_S), pending

    def lost(self, worker_id: int) -> list[Pending]:
        """Remove and return the abandoned requests of a worker that was removed or has crashed.

        The caller releases their charges.
        """
        if not self._kept:
            return []
        charged = self._ledger.on_worker(worker_id)
        return [self._kept.pop(one)[1] for one in charged if one in self._kept]

    def over(self, now_s: float) -> list[Pending]:
        """Remove and return the abandoned requests that should be over by now, by estimate."""
        due = [charge for charge, (until_s, _) in self._kept.items() if until_s <= now_s]
        return [self._kept.pop(charge)[1] for charge in due]

    def reported_over(self, fact: LoadReport) -> list[Pending]:
        """Remove and return the abandoned requests that are over, as a worker's load report shows.
        Their number is the number of requests charged to the worker, minus the number of requests
        in the report. The oldest abandoned requests are returned first.
        """
        if not self._kept:
            return []
        charged = self._ledger.on_worker(fact.worker_id)
        over = len(charged) - fact.running - fact.waiting
        kept = [one for one in charged if one in self._kept]
        return [self._kept.pop(one)[1] for one in kept[: max(over, 0)]]
