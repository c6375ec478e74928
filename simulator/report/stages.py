"""A ladder of loads, stage by stage: what each rate gave, as published tables of ladders have it.

A request belongs to the stage in which it arrived, whenever it was answered. Stages that warm the
caches up, and those that the chosen part of the workload does not reach, are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from simulator.replay.result import NEVER, ReplayResult, RequestTable, Verdict
from simulator.report.spread import Spread, ratio, spread, total
from simulator.traces.stream import Stage

NS_PER_S = 1_000_000_000


class StageRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of one replay. Null: nothing was measured."""

    rate_per_s: float  # as planned
    requests: int  # that arrived in it
    completed: int
    ttft_ms: Spread  # of those completed
    output_tokens_per_s: float | None  # of those completed, from its start to its last answer
    hit_rate_tokens: float | None  # cached / prompt tokens, over those admitted


@dataclass(frozen=True, slots=True)
class StageFigure:
    """What a ladder is shown by. Lifetime: process."""

    name: str
    of: Callable[[StageRow], float | None]
    show: Callable[[float | None], str]


Groups = Mapping[str, Sequence[tuple[StageRow, ...]]]  # label -> the stages of each of its seeds
# Every replay of one workload has the same stages, so a ladder is a list of values beside `rates`.
Ladders = dict[str, list[float | None]]


def summarize_stages(result: ReplayResult) -> tuple[StageRow, ...]:
    """One row for each stage with requests; () for a workload that has no stages."""
    table = result.table
    starts = np.array([stage.start_ns for stage in result.stages], dtype=np.int64)
    # What a closed loop sets free between two stages still belongs to the one before.
    numbers = np.searchsorted(starts, table.arrival_ns, side="right") - 1
    rows = (
        _row(stage, table, numbers == number)
        for number, stage in enumerate(result.stages)
        if not stage.warm_up
    )
    return tuple(row for row in rows if row.requests)


def rates(groups: Groups) -> list[float]:
    """The planned rates of the longest ladder."""
    known = [stages for seeds in groups.values() for stages in seeds]
    return [stage.rate_per_s for stage in max(known, key=len, default=())]


def ladders(groups: Groups, of: Callable[[StageRow], float | None]) -> Ladders:
    """Label -> a figure at each of `rates`, the mean over its seeds; None where none has it."""
    steps = range(len(rates(groups)))

    def at(number: int, seeds: Sequence[tuple[StageRow, ...]]) -> float | None:
        given = [of(stages[number]) for stages in seeds if number < len(stages)]
        found = [value for value in given if value is not None]
        return statistics.fmean(found) if found else None

    return {label: [at(number, seeds) for number in steps] for label, seeds in groups.items()}


def _row(stage: Stage, table: RequestTable, own: npt.NDArray[np.bool_]) -> StageRow:
    done = own & (table.verdict == Verdict.COMPLETED)
    admitted = own & (table.verdict != Verdict.REJECTED) & (table.hit_tokens != NEVER)
    last_ns = int(table.finish_ns[done].max(initial=stage.start_ns))
    tokens = total(table.output_tokens[done])
    return StageRow(
        rate_per_s=round(stage.rate_per_s, 6),
        requests=int(np.count_nonzero(own)),
        completed=int(np.count_nonzero(done)),
        ttft_ms=spread((table.first_token_ns - table.arrival_ns)[done]),
        output_tokens_per_s=ratio(tokens * NS_PER_S, last_ns - stage.start_ns, 3),
        hit_rate_tokens=ratio(
            total(table.hit_tokens[admitted]), total(table.prompt_tokens[admitted]), 5
        ),
    )
