"""A plan: for each policy the smallest fleet, or the highest rate, that keeps the targets."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import msgspec

from simulator.replay.setup import Setup
from simulator.report.aggregate import Interval
from simulator.report.row import ReplayRow
from simulator.sweep.gpus import fleet_gpus
from simulator.sweep.points import points_of
from simulator.sweep.question import Ladder, PlanRequest, check_request, ladder_of
from simulator.sweep.runs import Runs
from simulator.sweep.search import Found, search
from simulator.sweep.targets import kept
from simulator.sweep.task import Outcome

# Shorter runs may end before a queue that grows has become one.
MIN_SIMULATED_S = 60.0


class Trial(msgspec.Struct, frozen=True):
    """One number that was tried, with all seeds."""

    value: float  # workers, or requests per second
    met: bool
    reasons: tuple[str, ...]  # of a miss: which limits, by how much; else the tightest limit
    used: float  # of the tightest limit: 1 is all of it


class PlanRow(msgspec.Struct, frozen=True):
    """What one policy needs or takes."""

    policy: str
    answer: float | None  # workers, or requests per second; null: nothing that was tried will do
    gpus: int | None  # of the fleet at the answer
    used: float | None  # of the tightest limit at the answer
    figures: dict[str, Interval | None]  # at the answer, over seeds
    trials: tuple[Trial, ...]  # hardest first
    notes: tuple[str, ...]  # why not less, what to know

    @property
    def next_best(self) -> str | None:
        """Why the next harder number will not do."""
        return self.notes[0] if self.notes else None


class Plan(msgspec.Struct, frozen=True):
    """The answer to a request; `best` is the policy with the fewest GPUs, or the highest rate."""

    request: PlanRequest
    rows: tuple[PlanRow, ...]
    best: str | None
    runs: int


def plan(request: PlanRequest, runs: Runs) -> Plan:
    """Searches all policies side by side, so that their runs fill the processes.

    Raises `SweepError` for a request that makes no sense, before anything runs.
    """
    check_request(request)
    ladder = ladder_of(request)
    searches = [_PolicySearch(policy, request, ladder) for policy in request.policies]
    count = 0
    while live := [each for each in searches if each.rung is not None]:
        wave = [setup for each in live for setup in each.wanted()]
        if count + len(wave) > request.most_runs:
            for each in live:
                each.give_up(f"stopped after {count} runs, the limit; raise it to know")
            break
        count += len(wave)
        outcomes = iter(runs.outcomes(wave))
        for each in live:
            each.tell([next(outcomes) for _ in request.seeds])
    rows = tuple(each.row() for each in searches)
    return Plan(request, rows, _best(request, rows), count)


class _PolicySearch:
    """The search of one policy. Lifetime: one plan."""

    def __init__(self, policy: str, request: PlanRequest, ladder: Ladder) -> None:
        self.policy, self._request, self._ladder = policy, request, ladder
        self._trials: dict[int, Trial] = {}
        self._outcomes: dict[int, Sequence[Outcome]] = {}
        self._notes: list[str] = []
        self._found = Found()
        self._search: Generator[int, bool, Found] = search(ladder.start, ladder.low, ladder.high)
        self.rung: int | None = next(self._search)

    def wanted(self) -> list[Setup]:
        """The set-ups to run next, one for each seed."""
        assert self.rung is not None
        placed = self._ladder.place(self._request.base, self.rung)
        return [
            msgspec.structs.replace(placed, policy=self.policy, seed=seed)
            for seed in self._request.seeds
        ]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of them."""
        assert self.rung is not None
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            self.give_up(f"{self._ladder.named(self.rung)}: {errors[0]}")
            return
        pairs = [(o.task.setup, o.row) for o in outcomes if o.row is not None]
        trial = self._judge(self.rung, pairs)
        self._trials[self.rung], self._outcomes[self.rung] = trial, outcomes
        try:
            self.rung = self._search.send(trial.met)
        except StopIteration as stop:
            self.rung, self._found = None, stop.value

    def give_up(self, why: str) -> None:
        """Ends the search without an answer."""
        self._notes.append(why)
        self.rung = None

    def row(self) -> PlanRow:
        """What was found."""
        at, ladder = self._found.at, self._ladder
        trials = tuple(self._trials[rung] for rung in sorted(self._trials))
        if at is None:
            return PlanRow(self.policy, None, None, None, {}, trials, tuple(self._no_answer()))
        point = points_of(self._outcomes[at])[0]
        return PlanRow(
            self.policy,
            ladder.value(at),
            fleet_gpus(ladder.place(self._request.base, at)),
            self._trials[at].used,
            dict(point.figures),
            trials,
            tuple(self._why(at, point.rows)),
        )

    def _judge(self, rung: int, pairs: Sequence[tuple[Setup, ReplayRow]]) -> Trial:
        limits = kept(self._request.targets, pairs, self._request.rule)
        misses = tuple(limit.reason for limit in limits if not limit.met)
        tightest = max(limits, key=lambda limit: limit.used)
        return Trial(
            self._ladder.value(rung),
            not misses,
            misses or (tightest.reason,),
            round(min(tightest.used, 1e9), 4),
        )

    def _why(self, at: int, rows: Sequence[ReplayRow]) -> list[str]:
        ladder = self._ladder
        if at - 1 in self._trials:
            notes = [f"{_missing(ladder.named(at - 1))} {'; '.join(self._trials[at - 1].reasons)}"]
        else:
            notes = [f"{ladder.named(at)} is the end of what was searched"]
        notes += self._luck()
        shortest_s = min(row.simulated_s for row in rows)
        if shortest_s < MIN_SIMULATED_S:
            notes.append(
                f"runs of {shortest_s:.0f} s only: a queue may grow for longer; give a longer "
                "workload"
            )
        return notes

    def _luck(self) -> list[str]:
        named = self._ladder.named
        return [
            f"{named(good)} kept the targets, but {named(bad)} missed "
            f"{'; '.join(self._trials[bad].reasons)}: taken for luck, more seeds would tell"
            for good, bad in self._found.lucky
        ]

    def _no_answer(self) -> list[str]:
        easiest = max(self._trials, default=None)
        if self._notes or easiest is None:
            return self._notes
        reasons = "; ".join(self._trials[easiest].reasons)
        return [f"even {_missing(self._ladder.named(easiest))} {reasons}", *self._luck()]


def _best(request: PlanRequest, rows: Sequence[PlanRow]) -> str | None:
    """Fewest GPUs, or the highest rate; of equals the one that has more room."""
    sign = 1 if request.find == "workers" else -1
    able = [
        (sign * row.answer, row.used, row.policy)
        for row in rows
        if row.answer is not None and row.used is not None
    ]
    return min(able)[2] if able else None


def _missing(named: str) -> str:
    """The start of a reason: `7 workers miss`, `1 worker misses`."""
    return f"{named} {'misses' if named == '1 worker' else 'miss'}"
