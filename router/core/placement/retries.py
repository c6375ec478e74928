"""Decides if a failed request is sent to another worker, and after how many seconds. The number of
retries is limited to a share of the requests, so that an overloaded pool does not get its work
several times (a budget as in Finagle's `RetryBudget`). Retries after a worker was removed do not
use the budget, nor do retries that move a request from a busy worker to one that is not busy.
"""

from __future__ import annotations

import xxhash

from router.core.contract.actions import Rejection
from router.core.contract.counters import CoreCounters, Window
from router.core.contract.settings import CoreSettings
from router.core.placement.pending import Pending
from router.core.workers.table import Worker

_BUDGET_S = 10.0  # for this long a request counts for the budget, Finagle's default
NO_MODEL = "no_model"  # the cause where a worker says that it has not got the model
OTHER_REVISION = "other_revision"  # the cause where a worker of two changed before a leg was sent
MOVED = "moved"  # the cause where a request is at another worker than was chosen
# Causes after which a first retry need not wait.
_AT_ONCE = ("connect", "early_close", "no_answer")


def draw_of(seed: int, serial: int) -> float:
    """Return a random number in [0, 1) that depends only on `seed` and `serial`.

    It is the same on every machine.
    """
    bits: int = xxhash.xxh3_64_intdigest(serial.to_bytes(8, "little"), seed & (1 << 64) - 1)
    return (bits >> 11) * 2.0**-53


class Retries:
    """Decides if failed requests are tried again, within a budget of retries. The random wait
    before a retry is computed from the request's serial number and its number of attempts, so a
    replay gives the same wait. Lifetime: process.
    """

    def __init__(self, settings: CoreSettings, counters: CoreCounters, seed: int) -> None:
        self._settings = settings
        self._counters = counters
        self._seed = seed
        self._recent = Window(_BUDGET_S)  # (requests, retries)

    def arrived(self, now_s: float) -> None:
        """Count an arriving request, which increases the budget by a fraction of a retry."""
        self._recent.add(now_s, 1, 0)

    def again(
        self,
        pending: Pending,
        worker: Worker | None,
        cause: str,
        now_s: float,
        spared: bool = False,
    ) -> Rejection | None:
        """Allow another attempt of a failed request, or return a rejection of the request. The
        attempt does not start before `pending.not_before_s`. `worker` is the worker that failed the
        request, or None if it was removed. `spared` is True if that worker is busy or lacks the
        model, and another worker may take the request.
        """
        pending.cause = cause
        if cause == NO_MODEL and not spared:
            return Rejection(404, "model_not_found", "no worker that was asked has the model")
        if cause == "out_of_files":  # nor could this router connect to any other worker
            return Rejection(503, cause, "the router can open no more files just now; try again")
        settings = self._settings
        # No worker has had it, or knows its path; or a data plane has sent it elsewhere already.
        silent = worker is not None and worker.silent is not None
        unheard = spared or silent or cause in ("connect", "absent", MOVED, OTHER_REVISION)
        pending.attempts += not unheard
        if pending.attempts >= settings.max_attempts:
            tried = f"{len(pending.tried)} workers failed this request, last: {cause}"
            return Rejection(502, "worker_error", tried)
        wait_s = 0.0 if spared else self._wait_s(pending, cause)
        deadline_s = pending.arrival.deadline_s
        if deadline_s is not None and now_s + wait_s >= deadline_s:
            return Rejection(
                504, "deadline_exceeded", f"no time is left to try again after {cause}"
            )
        moves = unheard or worker is None or not worker.is_in
        if not moves and not self._pay(now_s):
            self._counters.retries_refused += 1
            why = f"a worker failed this request ({cause}), and too many are tried again already"
            return Rejection(503, "retry_budget_exhausted", why)
        self._counters.retries += 1
        pending.not_before_s = now_s + wait_s
        return None

    def _pay(self, now_s: float) -> bool:
        requests, retries = self._recent.sums(now_s)
        settings = self._settings
        may = settings.retry_share * requests + settings.retries_per_s * _BUDGET_S
        if retries + 1 > may:
            return False
        self._recent.add(now_s, 0, 1)
        return True

    def _wait_s(self, pending: Pending, cause: str) -> float:
        """Return the seconds to wait before the next attempt: exponential backoff with full jitter.

        The source is Brooker, "Exponential Backoff And Jitter", AWS, 2015.
        """
        times = len(pending.tried) - 1
        if cause in ("absent", MOVED, OTHER_REVISION):
            return 0.0
        if times <= 0 and cause in _AT_ONCE:
            return 0.0
        most_s = min(self._settings.retry_base_s * 2.0 ** max(times, 0), self._settings.retry_max_s)
        return most_s * draw_of(self._seed ^ len(pending.tried), pending.serial)
