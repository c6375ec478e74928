"""One replay as one row of figures, and the hash by which two replays are told to be the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import fields

import msgspec
import numpy as np

from simulator.replay.result import I64, NEVER, ReplayResult, RequestTable, Verdict
from simulator.report.spread import NS_PER_MS, Spread, ratio, spread, total
from simulator.report.stages import NS_PER_S, StageRow, summarize_stages
from simulator.report.turns import (
    NO_SESSIONS,
    NO_TURNS,
    NO_WAITS,
    SessionsRow,
    TurnsRow,
    Waits,
    new_ones,
    sessions_row,
    turns_row,
    waits,
)

HASH_DIGITS = 16
# What the machine took, not what was simulated: no part of the hash.
MEASURED = ("wall_s", "requests_per_wall_s", "report_hash")


class GoodputShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits, and the share of all requests that were completed within both, 0..1."""

    ttft_ms: float
    tpot_ms: float
    share: float | None  # null: there were no requests


class ReplayRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy with one seed, as it stands in the JSON report. Null: nothing was measured.

    Times are of completed requests, on virtual time as the client saw them. Lists per worker are
    in the order of `workers`. Counters are integers, ratios have a fixed number of decimals.
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


def summarize(result: ReplayResult) -> ReplayRow:
    """The row of one replay."""
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
    )
    return msgspec.structs.replace(row, report_hash=_hash(row, table))


def tpots_ns(table: RequestTable) -> I64:
    """Time per output token after the first of each completed answer of two tokens or more, ns.

    Rounded down to the nanosecond.
    """
    told = (table.verdict == Verdict.COMPLETED) & (table.output_tokens >= 2)
    spent: I64 = (table.finish_ns - table.first_token_ns)[told]
    tpots: I64 = spent // (table.output_tokens[told].astype(np.int64) - 1)
    return tpots


def _hit_rates(table: RequestTable, block_size: int) -> tuple[float | None, ...]:
    """Hit rate by tokens, by blocks, the mean of the requests' own; mean error of the router's."""
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


def _goodput(result: ReplayResult) -> GoodputShare:
    table, limits = result.table, result.setup.goodput
    later = table.output_tokens.astype(np.int64) - 1
    tpots = (table.finish_ns - table.first_token_ns) // np.maximum(later, 1)
    good = (
        (table.verdict == Verdict.COMPLETED)
        & (table.first_token_ns - table.arrival_ns <= limits.ttft_ms * NS_PER_MS)
        # An answer of one token has no time per token that could be missed.
        & ((tpots <= limits.tpot_ms * NS_PER_MS) | (later < 1))
    )
    share = ratio(int(np.count_nonzero(good)), len(table), 5)
    return GoodputShare(limits.ttft_ms, limits.tpot_ms, share)


def _skew(loads: Sequence[int]) -> float | None:
    return ratio(max(loads, default=0) * len(loads), sum(loads), 4)


def _hash(row: ReplayRow, table: RequestTable) -> str:
    """Hex digits over the row without what was measured, and the table's columns as int64."""
    figures = msgspec.to_builtins(row)
    for name in MEASURED:
        del figures[name]
    if not row.stages:  # what has no stages keeps the hash it had before there were any
        del figures["stages"]
    digest = hashlib.sha256(msgspec.json.encode(figures, order="sorted"))
    for column in fields(table):
        digest.update(getattr(table, column.name).astype("<i8").tobytes())
    return digest.hexdigest()[:HASH_DIGITS]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
