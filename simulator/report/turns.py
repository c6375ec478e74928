"""New sessions and continuations apart: who holds sessions back helps one at the other's cost.

A request is new when it is the first of its session to arrive, or has none; else it continues.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from simulator.replay.result import I64, NEVER, ReplayResult, RequestTable, Verdict
from simulator.report.spread import NO_SPREAD, NS_PER_MS, Spread, ratio, spread, total

Bools = npt.NDArray[np.bool_]
NS_PER_HOUR = 3_600 * 1_000_000_000


class Waits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the arrival at the router to the first dispatch, or to the refusal of who had none."""

    held: int = 0  # requests that waited at all
    mean_ms: float | None = None  # of the held ones; null: none was
    max_ms: float | None = None


class TurnsRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requests of one kind."""

    requests: int = 0
    completed: int = 0
    ttft_ms: Spread = NO_SPREAD  # of completed ones, from the arrival at the router
    waits: Waits = Waits()


class SessionsRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whole sessions; a request without one is one of its own."""

    begun: int = 0
    completed: int = 0  # every request of theirs was
    per_hour: float | None = None  # completed ones, over `simulated_s`


NO_TURNS = TurnsRow()
NO_SESSIONS = SessionsRow()
NO_WAITS = Waits()


def new_ones(table: RequestTable) -> Bools:
    """Which requests begin a session: bool[requests]."""
    new: Bools = table.session == NEVER
    _, first = np.unique(table.session, return_index=True)
    new[first] = True
    return new


def turns_row(table: RequestTable, chosen: Bools) -> TurnsRow:
    """The figures of the `chosen` requests."""
    done = chosen & (table.verdict == Verdict.COMPLETED)
    return TurnsRow(
        int(np.count_nonzero(chosen)),
        int(np.count_nonzero(done)),
        spread((table.first_token_ns - table.arrival_ns)[done]),
        waits(table.held_ns[chosen]),
    )


def waits(held_ns: I64) -> Waits:
    """Of `held_ns`, each 0 or above."""
    held = held_ns[held_ns > 0]
    if not len(held):
        return NO_WAITS
    longest = int(held.max())
    return Waits(
        len(held),
        ratio(total(held), len(held) * NS_PER_MS, 3),
        round(longest / NS_PER_MS, 3),
    )


def sessions_row(result: ReplayResult) -> SessionsRow:
    """How many sessions began and how many were answered to their end."""
    table = result.table
    failed = table.verdict != Verdict.COMPLETED
    named = table.session != NEVER
    begun = np.unique(table.session[named])
    spoilt = np.unique(table.session[named & failed])
    alone = int(np.count_nonzero(~named))
    completed = len(begun) - len(spoilt) + alone - int(np.count_nonzero(~named & failed))
    per_hour = ratio(completed * NS_PER_HOUR, result.simulated_ns, 3)
    return SessionsRow(len(begun) + alone, completed, per_hour)
