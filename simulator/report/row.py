"""The figures of one replay in one row, and the hash that shows whether two replays are
the same.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from simulator.replay.result import I64, NEVER, ReplayResult, RequestTable, Verdict
from simulator.traces.job import Stage

NS_PER_MS = 1_000_000
DIGITS = 3  # of milliseconds in a report
# The quantiles in the order of `Spread`'s fields, percent.
PERCENTS = (50, 90, 95, 99)


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and quantiles of a time in ms, three decimals; null if nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


NO_SPREAD = Spread(None, None, None, None, None, None)


def spread(times_ns: I64) -> Spread:
    """Return mean and quantiles of `times_ns` (any order), in milliseconds."""
    count = len(times_ns)
    if not count:
        return NO_SPREAD
    ordered = np.sort(times_ns)
    p50, p90, p95, p99 = (_ms(*quantile(ordered, percent)) for percent in PERCENTS)
    mean = _ms(int(ordered.sum(dtype=np.int64)), count)
    return Spread(mean, p50, p90, p95, p99, _ms(int(ordered[-1]), 1))


def quantile(ordered: I64, percent: int) -> tuple[int, int]:
    """Return the `percent` quantile (0..100) of sorted, non-empty integers as an exact fraction.

    It is linear between the two neighbours of position percent / 100 * (n - 1): definition 7 of
    Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), numpy's default.
    """
    place, rest = divmod(percent * (len(ordered) - 1), 100)
    low = int(ordered[place])
    high = int(ordered[min(place + 1, len(ordered) - 1)])
    return low * (100 - rest) + high * rest, 100


def total(column: npt.NDArray[np.signedinteger[Any]]) -> int:
    """Return the exact sum, however wide the column's integers are."""
    return int(column.sum(dtype=np.int64))


def ratio(part: int, whole: int, digits: int) -> float | None:
    """Return `part / whole` rounded to `digits` decimals, or None if `whole` is 0."""
    return round(part / whole, digits) if whole > 0 else None


def _ms(part_ns: int, whole: int) -> float:
    return round(part_ns / (whole * NS_PER_MS), DIGITS)


Bools = npt.NDArray[np.bool_]
NS_PER_HOUR = 3_600 * 1_000_000_000


class Waits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The waiting times of requests in the router, from the arrival to the first dispatch. For a
    request that was never dispatched, the wait ends at its refusal.
    """

    held: int = 0  # requests that waited at all
    mean_ms: float | None = None  # of the requests that waited; null: none did
    max_ms: float | None = None


class TurnsRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one kind of requests, such as those that begin a session."""

    requests: int = 0
    completed: int = 0
    ttft_ms: Spread = NO_SPREAD  # of completed ones, from the arrival at the router
    waits: Waits = Waits()


class SessionsRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of whole sessions; a request without a session counts as a session of its own."""

    begun: int = 0
    completed: int = 0  # with all of their requests
    per_hour: float | None = None  # completed ones, over `simulated_s`


class TasksRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of tasks: a task is a main agent's session with its sub-agents' and side
    requests.

    A task is one group of sessions. A session without a group is a task of its own, and so is a
    request without a session.
    """

    begun: int = 0
    completed: int = 0  # with all of their requests
    time_ms: Spread = NO_SPREAD  # of completed ones, from the first arrival to the last answer
    fairness: float | None = None  # see `jain_index`: of the tasks' mean times to first token, 0..1
    grouped: bool = False  # whether any request has a group


NO_TASKS = TasksRow()
NO_TURNS = TurnsRow()
NO_SESSIONS = SessionsRow()
NO_WAITS = Waits()


def new_ones(table: RequestTable) -> Bools:
    """Return bool[requests]: True for each request that begins a session."""
    new: Bools = table.session == NEVER
    _, first = np.unique(table.session, return_index=True)
    new[first] = True
    return new


def turns_row(table: RequestTable, chosen: Bools) -> TurnsRow:
    """Return the figures of the `chosen` requests."""
    done = chosen & (table.verdict == Verdict.COMPLETED)
    return TurnsRow(
        int(np.count_nonzero(chosen)),
        int(np.count_nonzero(done)),
        spread((table.first_token_ns - table.arrival_ns)[done]),
        waits(table.held_ns[chosen]),
    )


def waits(held_ns: I64) -> Waits:
    """Return how many of the waits `held_ns` (each 0 or above) are above 0, with their mean and
    maximum.
    """
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
    """Return how many sessions began and in how many every request was completed."""
    table = result.table
    failed = table.verdict != Verdict.COMPLETED
    named = table.session != NEVER
    begun = np.unique(table.session[named])
    spoilt = np.unique(table.session[named & failed])
    alone = int(np.count_nonzero(~named))
    completed = len(begun) - len(spoilt) + alone - int(np.count_nonzero(~named & failed))
    per_hour = ratio(completed * NS_PER_HOUR, result.simulated_ns, 3)
    return SessionsRow(len(begun) + alone, completed, per_hour)


def tasks_row(table: RequestTable) -> TasksRow:
    """Return the times of tasks, and the fairness index of the tasks' mean times to first token."""
    if not len(table):
        return NO_TASKS
    numbers = _task_numbers(table)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    done = (table.verdict == Verdict.COMPLETED)[order]
    whole: Bools = np.logical_and.reduceat(done, starts)
    times: I64 = np.maximum.reduceat(table.finish_ns[order], starts) - np.minimum.reduceat(
        table.arrival_ns[order], starts
    )
    ttft_ns = np.where(done, (table.first_token_ns - table.arrival_ns)[order], 0)
    sums = np.add.reduceat(ttft_ns, starts).tolist()
    counts = np.add.reduceat(done.astype(np.int64), starts).tolist()
    means = [waited / count for waited, count in zip(sums, counts, strict=True) if count]
    return TasksRow(
        len(starts),
        int(np.count_nonzero(whole)),
        spread(times[whole]),
        jain_index(means),
        bool((table.group != NEVER).any()),
    )


def _task_numbers(table: RequestTable) -> I64:
    """Return int64[requests]: the number of each request's task, 0 or above."""
    numbers = np.arange(len(table), dtype=np.int64)
    sessions, groups = table.session.astype(np.int64), table.group.astype(np.int64)
    numbers = np.where(sessions != NEVER, len(table) + sessions, numbers)
    after = len(table) + int(sessions.max()) + 1  # above all numbers so far
    return np.where(groups != NEVER, after + groups, numbers)


def jain_index(shares: Sequence[float]) -> float | None:
    """Return Jain's fairness index, (sum of x)^2 / (n * sum of x^2), or None if all shares are 0.

    The index has five decimals. 1 means that all have the same; 1 / n means that one of n has all
    (Jain, Chiu and Hawe, "A Quantitative Measure of Fairness and Discrimination for Resource
    Allocation in Shared Computer Systems", DEC-TR-301, 1984, which allows any metric of what a user
    gets, including response times).
    """
    squares = math.fsum(share * share for share in shares)
    return round(math.fsum(shares) ** 2 / (len(shares) * squares), 5) if squares else None


NS_PER_S = 1_000_000_000


class StageRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one stage of one replay; null means that nothing was measured."""

    rate_per_s: float  # as planned
    requests: int  # that arrived in it
    completed: int
    ttft_ms: Spread  # of those completed
    output_tokens_per_s: float | None  # of those completed, from its start to its last answer
    hit_rate_tokens: float | None  # cached / prompt tokens, over those admitted


@dataclass(frozen=True, slots=True)
class StageFigure:
    """A figure that tables and plots of a load ladder (stages of rising load) show. Lifetime:
    process.
    """

    name: str
    of: Callable[[StageRow], float | None]
    show: Callable[[float | None], str]


Groups = Mapping[str, Sequence[tuple[StageRow, ...]]]  # label -> the stages of each of its seeds
# Every replay of one workload has the same stages, so a ladder is a list of values beside `rates`.
Ladders = dict[str, list[float | None]]


def summarize_stages(result: ReplayResult) -> tuple[StageRow, ...]:
    """Return one row for each stage with requests; () for a workload that has no stages."""
    table = result.table
    starts = np.array([stage.start_ns for stage in result.stages], dtype=np.int64)
    # A request that a closed loop releases between two stages belongs to the earlier one.
    numbers = np.searchsorted(starts, table.arrival_ns, side="right") - 1
    rows = (
        _row(stage, table, numbers == number)
        for number, stage in enumerate(result.stages)
        if not stage.warm_up
    )
    return tuple(row for row in rows if row.requests)


def rates(groups: Groups) -> list[float]:
    """Return the planned rates, in requests per second, of the workload with the most stages."""
    known = [stages for seeds in groups.values() for stages in seeds]
    return [stage.rate_per_s for stage in max(known, key=len, default=())]


def ladders(groups: Groups, of: Callable[[StageRow], float | None]) -> Ladders:
    """Return, by label, the mean over seeds of a figure at each of the ladder's `rates`; None if no
    seed has it.
    """
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


HASH_DIGITS = 16
# Fields measured on this machine, which are not part of the hash.
MEASURED = ("wall_s", "requests_per_wall_s", "report_hash")


class GoodputShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two goodput limits, and the share (0..1) of all requests that were completed
    within both.
    """

    ttft_ms: float
    tpot_ms: float
    share: float | None  # null: there were no requests


class ReplayRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one policy with one seed, as the JSON report has them.

    Null means that nothing was measured. Times are of completed requests, on virtual time as the
    client saw them. Lists per worker are in the order of `workers`. Counters are integers, ratios
    have a fixed number of decimals.
    """

    policy: str
    params: dict[str, bool | int | float | str]
    seed: int
    requests: int
    completed: int
    rejected: int
    failed: int  # lost after their first token
    input_tokens: int  # prompt tokens of all requests
    output_tokens: int  # of completed answers
    hit_rate_tokens: float | None  # cached / prompt tokens, over admitted requests
    hit_rate_blocks: float | None  # the same in full blocks of prompts
    hit_rate_mean: float | None  # mean over admitted requests of cached / prompt tokens
    ttft_ms: Spread  # from the arrival at the router to the client's first token
    tpot_ms: Spread  # (finish - first token) / (output tokens - 1), answers of two tokens or more
    e2e_ms: Spread  # from the arrival at the router to the client's last token
    output_tokens_per_s: float | None  # of completed answers, over `simulated_s`
    goodput: GoodputShare
    load_skew_requests: float | None  # max / mean over workers of requests sent to them
    load_skew_busy: float | None  # max / mean over workers of time spent in steps
    busy_share: tuple[float, ...]  # per worker: time in steps / simulated time, 0..1
    evicted_blocks: int
    recomputed_tokens: int  # computed a second time after a preemption
    retries: int
    holds: int
    rejections: dict[str, int]  # by the answer's code, sorted
    trace_errors: int  # wrong lines of the source that were left out
    simulated_s: float  # virtual time from the first arrival to the last end
    wall_s: float  # of this machine; not in the hash
    requests_per_wall_s: float | None  # not in the hash
    report_hash: str  # 16 hex digits over everything else and the table of requests
    workers: tuple[str, ...]
    requests_per_worker: tuple[int, ...]  # sent to it, retries included
    preemptions: int
    hit_error_tokens: float | None  # mean of |expected hit - real hit| over admitted requests
    stages: tuple[StageRow, ...] = ()  # of a ladder of loads; warming up is left out
    new_sessions: TurnsRow = NO_TURNS  # requests that began a session, or had none
    continuations: TurnsRow = NO_TURNS  # the others
    waits: Waits = NO_WAITS  # at the router, of all requests
    sessions: SessionsRow = NO_SESSIONS
    host_hit_rate_tokens: float | None = None  # loaded from host memory; null: nothing was
    tasks: TasksRow = NO_TASKS


def summarize(result: ReplayResult) -> ReplayRow:
    """Return the row of figures of one replay."""
    table, workers = result.table, result.workers
    verdicts = [int(np.count_nonzero(table.verdict == verdict)) for verdict in Verdict]
    done = table.verdict == Verdict.COMPLETED
    simulated_s = result.simulated_ns / NS_PER_S
    output_tokens = total(table.output_tokens[done])
    new = new_ones(table)
    tokens, blocks, mean, error = _hit_rates(table, result.block_size)
    row = ReplayRow(
        policy=result.policy,
        params=result.params,
        seed=result.setup.seed,
        requests=len(table),
        completed=verdicts[Verdict.COMPLETED],
        rejected=verdicts[Verdict.REJECTED],
        failed=verdicts[Verdict.FAILED],
        input_tokens=total(table.prompt_tokens),
        output_tokens=output_tokens,
        hit_rate_tokens=tokens,
        hit_rate_blocks=blocks,
        hit_rate_mean=mean,
        ttft_ms=spread((table.first_token_ns - table.arrival_ns)[done]),
        tpot_ms=spread(tpots_ns(table)),
        e2e_ms=spread((table.finish_ns - table.arrival_ns)[done]),
        output_tokens_per_s=ratio(output_tokens * NS_PER_S, result.simulated_ns, 3),
        goodput=_goodput(result),
        load_skew_requests=_skew([one.requests for one in workers]),
        load_skew_busy=_skew([one.busy_ns for one in workers]),
        busy_share=tuple(ratio(one.busy_ns, result.simulated_ns, 5) or 0.0 for one in workers),
        evicted_blocks=sum(one.evicted_blocks for one in workers),
        recomputed_tokens=sum(one.recomputed_tokens for one in workers),
        retries=result.retries,
        holds=result.holds,
        rejections=dict(sorted(result.rejections.items())),
        trace_errors=result.trace_errors,
        simulated_s=round(simulated_s, 6),
        wall_s=round(result.wall_s, 3),
        requests_per_wall_s=_rounded(len(table) / result.wall_s if result.wall_s > 0 else None, 1),
        report_hash="",
        workers=tuple(one.name for one in workers),
        requests_per_worker=tuple(one.requests for one in workers),
        preemptions=sum(one.preemptions for one in workers),
        hit_error_tokens=error,
        stages=summarize_stages(result),
        new_sessions=turns_row(table, new),
        continuations=turns_row(table, ~new),
        waits=waits(table.held_ns),
        sessions=sessions_row(result),
        host_hit_rate_tokens=_host_hit_rate(result),
        tasks=tasks_row(table),
    )
    return msgspec.structs.replace(row, report_hash=_hash(row, table))


def tpots_ns(table: RequestTable) -> I64:
    """Return the time per output token after the first, for completed answers of two tokens or
    more.

    Times are in ns, rounded down to the nanosecond.
    """
    told = (table.verdict == Verdict.COMPLETED) & (table.output_tokens >= 2)
    spent: I64 = (table.finish_ns - table.first_token_ns)[told]
    tpots: I64 = spent // (table.output_tokens[told].astype(np.int64) - 1)
    return tpots


def _hit_rates(table: RequestTable, block_size: int) -> tuple[float | None, ...]:
    """Return three hit rates and the mean error of the router's expected hit tokens.

    The hit rates are by tokens, by blocks, and the mean of the requests' own rates.
    """
    # A request that was turned away may have been admitted by a worker that then died: what it
    # found there served nobody.
    admitted = (table.verdict != Verdict.REJECTED) & (table.hit_tokens != NEVER)
    hits, prompts = table.hit_tokens[admitted], table.prompt_tokens[admitted]
    blocks = table.prompt_blocks[admitted]
    errors = np.abs(table.expected_hit_tokens[admitted].astype(np.int64) - hits)
    # The exact sum of the quotients: adding them up in any other way depends on the order.
    quotients = math.fsum((hits / np.maximum(prompts, 1)).tolist())
    return (
        ratio(total(hits), total(prompts), 5),
        ratio(total(np.minimum(hits // block_size, blocks)), total(blocks), 5),
        _rounded(quotients / len(hits) if len(hits) else None, 5),
        ratio(total(errors), len(hits), 3),
    )


def _host_hit_rate(result: ReplayResult) -> float | None:
    """Return the share of admitted prompt tokens that workers loaded from host memory.

    It is part of `hit_rate_tokens`, except for workers that died.
    """
    loaded = sum(one.host_hit_tokens for one in result.workers)
    asked = sum(one.query_tokens for one in result.workers)
    return ratio(loaded, asked, 5) if loaded else None


def _goodput(result: ReplayResult) -> GoodputShare:
    table, limits = result.table, result.setup.goodput
    later = table.output_tokens.astype(np.int64) - 1
    tpots = (table.finish_ns - table.first_token_ns) // np.maximum(later, 1)
    good = (
        (table.verdict == Verdict.COMPLETED)
        & (table.first_token_ns - table.arrival_ns <= limits.ttft_ms * NS_PER_MS)
        # An answer of one token has no time per token, so it cannot miss that limit.
        & ((tpots <= limits.tpot_ms * NS_PER_MS) | (later < 1))
    )
    share = ratio(int(np.count_nonzero(good)), len(table), 5)
    return GoodputShare(limits.ttft_ms, limits.tpot_ms, share)


def _skew(loads: Sequence[int]) -> float | None:
    return ratio(max(loads, default=0) * len(loads), sum(loads), 4)


def _hash(row: ReplayRow, table: RequestTable) -> str:
    """Return hex digits of a hash over the row and the table's columns as int64.

    Figures in `MEASURED`, such as wall time, are left out of the row.
    """
    figures = msgspec.to_builtins(row)
    for name in MEASURED:
        del figures[name]
    if not row.stages:  # rows without stages keep the hash of older versions
        del figures["stages"]
    if row.host_hit_rate_tokens is None:  # likewise rows without a host tier
        del figures["host_hit_rate_tokens"]
    if not row.tasks.grouped:  # likewise rows without groups
        del figures["tasks"]
    digest = hashlib.sha256(msgspec.json.encode(figures, order="sorted"))
    for column in fields(table):
        if column.name == "group" and not row.tasks.grouped:
            continue
        digest.update(getattr(table, column.name).astype("<i8").tobytes())
    return digest.hexdigest()[:HASH_DIGITS]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
