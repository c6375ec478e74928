"""Decides how many workers prefill and how many decode, by the mix of requests. The prefill and the
decode workers of a pool serve the same requests. So the numbers of both should have the same ratio
as the work of both, counted in workers, whichever of them is the bottleneck: n_P : n_D = E[S] : E[o
- 1] t(B) / B (rate matching, as in DistServe, Zhong et al., OSDI 2024, section 4). A role is
changed if the better split can carry so much more work that this outweighs the cost of the change;
changing back costs more each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from policies.facts import Role
from router.core.workers.columns import WorkerColumns
from router.core.workers.table import Worker

_KV_SHARE = 0.95  # share of its KV memory at which a decode worker counts as full
_FULL_REQUESTS = 64  # requests at which a worker of unknown KV capacity counts as full
_CAUTION_MAX = 16.0


# Share of busy workers of a role below which no role is changed.
_LEAST_BUSY = 0.6


class RoleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that let workers of a split pool change between the roles prefill and decode.

    Lifetime: process.
    """

    follow: Annotated[
        bool,
        Meta(
            description=(
                "whether workers switch between prefill and decode as the mix of requests changes"
            )
        ),
    ] = False
    gain: Annotated[
        float,
        Meta(
            ge=0.01,
            le=10.0,
            description=("least gain in a pool's capacity for which a worker switches, as a share"),
        ),
    ] = 0.05
    settle_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=86_400.0,
            description="how long a switch must promise at least `gain` before the worker "
            "switches, seconds",
        ),
    ] = 30.0
    window_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=86_400.0,
            description="time over which the work of each role is averaged, seconds",
        ),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Proposes that one more worker of a group take `role`, with the numbers that justify this."""

    role: Role
    prefill_work: float  # of the group's requests, in workers
    decode_work: float
    prefill_workers: int  # the number of prefill workers to reach in the end
    gain: float

    def __str__(self) -> str:
        """Return the reasons for the change as a sentence for the operator."""
        return (
            f"work of {self.prefill_work:.2f} workers to prefill and {self.decode_work:.2f} to "
            f"decode: with {self.prefill_workers} that prefill {self.gain:.0%} more can be carried"
        )


class RoleController:
    """Decides how many workers of one group should prefill and how many should decode.

    Callers pass the present time to each method.
    Lifetime: as long as the group exists.
    """

    def __init__(self, settings: RoleSettings) -> None:
        self.prefill_work = self.decode_work = 0.0  # in workers, averaged over the window
        self._settings = settings
        self._seen_s: float | None = None
        self._began_s = 0.0
        self._wish: tuple[Role, float] | None = None  # which role pays, and since when
        self._last: Role | None = None  # of the latest change
        self._underway = False  # True if the latest change was only a part of what pays
        self._caution = 1.0  # times `settle_s` that a way back must wait
        self._calm_s = 0.0  # since when nothing has increased the caution

    def observe(self, now_s: float, prefill_work: float, decode_work: float) -> None:
        """Add a sample of the group's work to the moving averages. `prefill_work` and `decode_work`
        are the numbers of fully used workers that would be enough for each kind of work.
        """
        if self._seen_s is None:
            self._seen_s = self._began_s = self._calm_s = now_s
            return
        part = -math.expm1((self._seen_s - now_s) / self._settings.window_s)
        self._seen_s = now_s
        self.prefill_work += part * (prefill_work - self.prefill_work)
        self.decode_work += part * (decode_work - self.decode_work)

    def decide(self, now_s: float, prefill: int, decode: int) -> RoleChange | None:
        """Return the role that one more worker should take, or None if the roles should stay.
        `prefill` and `decode` are the numbers of workers that have each role now.
        """
        change = self._better(prefill, decode)
        role = None if change is None else change.role
        if self._wish is not None and self._wish[0] != role:  # it did not last
            self._wish, self._calm_s = None, now_s
        if change is None or now_s - self._began_s < self._settings.window_s:
            self._underway &= change is not None
            return None
        if self._wish is None:
            self._wish = change.role, now_s
        settle_s = self._settings.settle_s
        if now_s - self._calm_s > 2 * _CAUTION_MAX * settle_s:
            self._caution, self._calm_s = max(self._caution / 2, 1.0), now_s
        back = self._last is not None and self._last != change.role
        if not back and self._underway:  # the rest of a change that has begun
            settle_s = 0.0
        if now_s - self._wish[1] < settle_s * (self._caution if back else 1.0):
            return None
        if back:
            self._caution, self._calm_s = min(self._caution * 2, _CAUTION_MAX), now_s
        self._last, self._wish, self._underway = change.role, None, True
        return change

    def refused(self, now_s: float) -> None:
        """Record that a proposed change was not carried out, and propose no change for a while."""
        self._wish, self._underway = None, False
        self._began_s = now_s + _CAUTION_MAX * self._settings.settle_s

    def _better(self, prefill: int, decode: int) -> RoleChange | None:
        """Return the change of roles that lets the group carry clearly more work, or None."""
        p, d, count = self.prefill_work, self.decode_work, prefill + decode
        if min(prefill, decode) < 1 or count < 3 or p <= 0.0 or d <= 0.0:
            return None
        if max(p / prefill, d / decode) < _LEAST_BUSY:
            return None
        carried = min(prefill / p, decode / d)
        best = max(range(1, count), key=lambda n: (min(n / p, (count - n) / d), -abs(n - prefill)))
        gain = min(best / p, (count - best) / d) / carried - 1
        role: Role = "prefill" if best > prefill else "decode"
        goes_on = self._underway and role == self._last
        if best == prefill or gain < self._settings.gain * (0.5 if goes_on else 1.0):
            return None
        return RoleChange(role, p, d, best, gain)


class WorkMeter:
    """Measures how much work a group's prefill workers and decode workers have.

    Lifetime: as long as the group exists.
    """

    def __init__(self) -> None:
        self._seen_s: float | None = None
        self._drained: dict[int, float] = {}  # work done so far, by worker

    def read(
        self, now_s: float, columns: WorkerColumns, prefill: Sequence[Worker], decode: list[Worker]
    ) -> tuple[float, float]:
        """Return the prefill work and the decode work of a group, each as a number of busy workers.
        The prefill work is an average since the last call: the seconds of prefill computed per
        second. The decode work is the KV memory that is used for decode now, in units of a full
        worker.
        """
        elapsed_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        done = {w.worker_id: float(columns.drained_work[w.slot]) for w in prefill}
        work_s = 0.0
        for worker in prefill:
            before = self._drained.get(worker.worker_id)
            if before is not None:
                tokens = max(done[worker.worker_id] - before, 0.0)
                work_s += tokens / float(columns.prefill_tokens_per_s[worker.slot])
        self._seen_s, self._drained = now_s, done
        slots = np.array([w.slot for w in decode], dtype=np.int64)
        capacity = columns.kv_capacity_tokens[slots] * _KV_SHARE
        held = columns.context_tokens[slots]
        full = np.where(
            np.isfinite(capacity), held / capacity, columns.requests[slots] / _FULL_REQUESTS
        )
        return (work_s / elapsed_s if elapsed_s > 0 else 0.0), float(full.sum())
