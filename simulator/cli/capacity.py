"""The commands `rate-match` and `pareto`: the number of workers of each role, by arithmetic."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from simulator.capacity.pools import (
    ALIKE,
    MAX_GPUS,
    RATE_SHARE,
    SPLIT,
    TPOT_MARGIN,
    TTFT_MARGIN,
    FrontPoint,
    Match,
    PoolTrial,
    Shapes,
    WorkerPool,
    climb,
    drawn,
    gain,
    match,
    speeds,
    trial,
)
from simulator.capacity.pools import pareto as fronts
from simulator.capacity.rates import Link, Measured, MixError, Shape, WaitTargets, measure, step_s
from simulator.cli.flags import Group, NotNegative, Written, command, given_flags
from simulator.cli.setups import (
    GENERATED,
    PROFILE,
    KvTokens,
    OpenLoop,
    TraceAt,
    known,
    workload_of,
)
from simulator.cli.usage import UsageError, check_files, write_json
from simulator.report.console import print_source_notes
from simulator.traces.generators.table import kv_block
from simulator.workloads.open import open_jobs

CACHES = 4  # if no number of GPUs determines the number of prefill workers
KINDS = {"split": SPLIT, "alone": ALIKE, "mixed": "both kinds"}
CACHED_BY = {
    "log": "as the log says",
    "caches": "as the caches of {} workers would have it",
    "none": "as was asked for",
}


MATCH_EXAMPLES = """\
examples:
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --ttft-ms 1000 --gpus 16
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --gpus 64 \\
      --profile qwen3-32b-h100-tp2 --profile qwen3-32b-h100-tp4
  warmroute-sim rate-match 'gen:shared?prefix=4384&suffix=16&output=1200' --cached none \\
      --tpot-ms 20 --prefill-profile deepseek-r1-gb200-ep4 \\
      --decode-profile deepseek-r1-gb200-ep32 --profile deepseek-r1-gb200-ep8

docs/disaggregation.md explains the formulas and when disaggregation pays. To see the effect of
queues, bursts and caches, use --simulate, or `replay` with --prefill-workers and --decode-workers.
"""
FRONT_EXAMPLES = """\
examples:
  warmroute-sim pareto requests.jsonl --ttft-ms 2000 --svg front.svg
  warmroute-sim pareto requests.jsonl --gpus 16 --profile qwen3-32b-h100-tp2 \\
      --profile qwen3-32b-h100-tp4
"""
_TARGETS = Group("targets")


class Latency(Struct):
    """The latency targets, except for the time per token."""

    ttft_ms: Annotated[float | None, "longest mean time to first token; default: no limit"] = None
    every_step: Annotated[bool, "apply the target to the time per token of every step, not to the "
        "mean"] = False  # fmt: skip


class Workers(Struct):
    """The workers that a pool may have."""

    gpus: Annotated[int | None, "number of GPUs of all workers; default: any number"] = None
    profile: Annotated[tuple[str, ...], "P", f"profile of workers for both roles; default "
        f"{PROFILE}; "
        "repeat to choose the best"] = ()  # fmt: skip
    prefill_profile: Annotated[tuple[str, ...], "P", "profile of prefill workers, instead of "
        "--profile; repeat to choose the best"] = ()  # fmt: skip
    decode_profile: Annotated[tuple[str, ...], "P", "profile of decode workers, instead of "
        "--profile; repeat to choose the best"] = ()  # fmt: skip
    kv_tokens: KvTokens = None
    link_gbps: Annotated[float, "Gbit/s at which each GPU of a worker sends and receives KV"
    ] = 200.0  # fmt: skip
    link_setup_ms: Annotated[NotNegative, "time to set up each KV transfer"] = 1.0


class Cached(Struct):
    """The part of a prompt that is cached."""

    cached: Annotated[Literal["log", "caches", "none"] | None, "cached part of prompts. log: as "
        "the "
        "workers reported; caches: as --caches workers would have it; none: nothing. Default: log "
        "if TRACE is a request log with these reports, else caches"] = None  # fmt: skip
    caches: Annotated[int | None, "number of prefill workers with a cache each; default: as many "
        "as fit half of --gpus, or 4"] = None  # fmt: skip


class Capacity(Struct, kw_only=True):
    """The options that `rate-match` and `pareto` share."""

    trace: TraceAt
    latency: Annotated[Latency, _TARGETS]
    workers: Annotated[Workers, Group("workers")]
    cached: Annotated[Cached, Group("cached part of prompts")]
    requests: Annotated[OpenLoop, Group("requests")]


class RateMatch(Struct, kw_only=True):
    """The options of `rate-match`."""

    tpot_ms: Annotated[float, _TARGETS, "longest mean time per token after the first"]
    asked: Capacity
    simulate: Annotated[bool, "replay TRACE on the best split, on its neighbours and on workers "
        "with both roles, at 95 % of the computed rate or at --rate"
    ] = False  # fmt: skip
    json: Annotated[Written, "file that gets the request mix, the targets and the pools"] = None


@command(
    "TRACE --tpot-ms MS [--ttft-ms MS] [--gpus N] [--profile P]... [option]...",
    MATCH_EXAMPLES + known(),
)
def rate_match(options: RateMatch, console: Console) -> bool:
    """Computes from step times how many requests like those of TRACE one worker serves if it only
    prefills, only decodes, or does both. Then finds the numbers of workers that serve most requests
    on a number of GPUs while both targets are kept; without --gpus, the ratio of prefill to decode
    workers. Cached tokens of a prompt are not computed again.
    """
    asked, gpus = options.asked, options.asked.workers.gpus
    check_files([asked.trace], json=options.json)
    shapes, targets, link = _shapes(asked.workers), _targets(asked, options.tpot_ms), _link(asked)
    if options.simulate and gpus is None:
        raise UsageError("--simulate replays whole workers; say on how many --gpus")
    if gpus is not None and gpus > MAX_GPUS:
        raise UsageError(f"--gpus {gpus}: {MAX_GPUS} at most")
    measured, caches = _measured(asked, console, shapes)
    found = match(measured.mix, shapes, targets, link, gpus)
    console.print(_measured_line(measured, caches), highlight=False)
    console.print(_targets_line(targets, link), highlight=False)
    console.print(_match_table(found, gpus))
    trials: list[PoolTrial] = []
    if options.simulate and gpus is not None and found.split is not None:
        rate_per_s, trials = _trials(asked, gpus, found, targets, link)
        console.print(_trials_table(trials, rate_per_s), highlight=False)
        console.print(
            f"good: within {TTFT_MARGIN:g} times the TTFT and {TPOT_MARGIN:g} times the time per "
            "token; *: most of them",
            style="dim", highlight=False,
        )  # fmt: skip
    for line in _advice(found, measured, targets, shapes, gpus):
        console.print(line, highlight=False, soft_wrap=True)
    rows = {"mix": _mix_row(measured), "targets": targets, "pools": _pools(found)}
    write_json(options.json, rows | ({"trials": trials} if options.simulate else {}))
    return found.best is not None


class Pareto(Struct, kw_only=True):
    """The options of `pareto`."""

    asked: Capacity
    points: Annotated[
        int, _TARGETS, "number of times per token that the command tries, from the shortest step up"
    ] = 24
    svg: Annotated[Written, "file that gets the picture"] = None
    json: Annotated[Written, "file that gets all points"] = None


@command(
    "TRACE [--ttft-ms MS] [--gpus N] [--profile P]... [--svg FILE] [option]...",
    FRONT_EXAMPLES + known(),
)
def pareto(options: Pareto, console: Console) -> bool:
    """Computes, for many times per token, the pool that gives most tokens per GPU: once of workers
    that prefill or decode, and once of workers that do both. Keeps the points that no other point
    beats in both speed and throughput, and prints for each the command that shows it again.
    """
    asked, gpus = options.asked, options.asked.workers.gpus
    check_files([asked.trace], svg=options.svg, json=options.json)
    shapes, link = _shapes(asked.workers), _link(asked)
    measured, caches = _measured(asked, console, shapes)
    tpots_s = speeds(shapes, options.points)
    split, alike = fronts(measured.mix, shapes, tpots_s, _targets(asked, None), link, gpus)
    console.print(_measured_line(measured, caches), highlight=False)
    if not split and not alike:
        console.print("no pool keeps the targets at any speed: raise --ttft-ms, or give more GPUs")
        return False
    points = [*split, *alike]
    again = [_command(asked, point) for point in points]
    console.print(_front_table(points))
    for line in gain(split, alike):
        console.print(line, highlight=False)
    console.print("\nEach point again, with its workers (numbers as above):")
    for number, words in enumerate(again, start=1):
        console.print(f"  {number:2}  {words}", highlight=False, markup=False, soft_wrap=True)
    if options.svg is not None:
        options.svg.write_text(drawn(split, alike))
    if options.json is not None:
        rows = [
            {"kind": one.kind, "tokens_per_s_user": one.per_user, "tokens_per_s_gpu": one.per_gpu,
             "targets": one.targets, "pool": one.pool, "command": words}
            for one, words in zip(points, again, strict=True)
        ]  # fmt: skip
        write_json(options.json, {"mix": _mix_row(measured), "points": rows})
    return True


# --- what was asked for -------------------------------------------------------------------------


def _shapes(workers: Workers) -> Shapes:
    usual = workers.profile or (PROFILE,)

    def of(option: str, names: Sequence[str]) -> tuple[Shape, ...]:
        try:
            return tuple(
                Shape.of(name, workers.kv_tokens) for name in dict.fromkeys(names or usual)
            )
        except ValueError as error:
            raise UsageError(f"--{option}: {error}") from error

    shapes = Shapes(
        of("prefill-profile", workers.prefill_profile),
        of("decode-profile", workers.decode_profile),
        of("profile", workers.profile),
    )
    for p in shapes.prefill:
        for d in shapes.decode:
            if p.kv_bytes_per_token != d.kv_bytes_per_token:
                raise UsageError(
                    f"{p.name} has {p.kv_bytes_per_token:,} bytes of KV a token and {d.name} "
                    f"{d.kv_bytes_per_token:,}: not one model, so neither takes the other's KV"
                )
    return shapes


def _targets(asked: Capacity, tpot_ms: float | None) -> WaitTargets:
    ttft_ms = asked.latency.ttft_ms
    ttft_s = math.inf if ttft_ms is None else ttft_ms / 1e3
    return WaitTargets((tpot_ms or 1e3) / 1e3, ttft_s, asked.latency.every_step)


def _link(asked: Capacity) -> Link:
    return Link(asked.workers.link_gbps, asked.workers.link_setup_ms / 1e3)


def _measured(asked: Capacity, console: Console, shapes: Shapes) -> tuple[Measured, int]:
    """Return the traffic mix of the requests, and the number of caches that was assumed to compute
    its cached part.
    """
    gpus, caches = asked.workers.gpus, asked.cached.caches
    if caches is None:
        caches = CACHES if gpus is None else max(1, gpus // (2 * shapes.prefill[0].gpus))
    stream = open_jobs(workload_of(asked.trace, asked.requests))
    kv_tokens = shapes.prefill[0].kv_tokens
    try:
        found = measure(stream.jobs, stream.block_tokens, caches, kv_tokens, asked.cached.cached)
    except MixError as error:
        raise UsageError(f"{asked.trace}: {error}") from error
    print_source_notes(console, stream)
    return found, caches


def _trials(
    asked: Capacity, gpus: int, found: Match, targets: WaitTargets, link: Link
) -> tuple[float, list[PoolTrial]]:
    """Replay the best split of workers into roles, its neighbours, and the best pool of workers
    with both roles, all at one rate. Return the rate and the trials.
    """
    assert found.split is not None
    p, d = (part.shape for part in found.split.parts)
    spec = workload_of(asked.trace, asked.requests)
    if spec.rate_per_s is None:
        rate_per_s = RATE_SHARE * found.split.requests_per_s
        spec = msgspec.structs.replace(spec, rate_per_s=rate_per_s, speed=1.0)
    # Without a TTFT target, the computed TTFT is the limit of a good answer.
    limits = replace(targets, ttft_s=min(targets.ttft_s, found.split.ttft_s))
    kv_tokens = asked.workers.kv_tokens
    block_size = kv_block(asked.trace) if asked.trace.startswith(GENERATED) else None
    tried = partial(
        trial, spec, targets=limits, link=link, block_size=block_size, kv_tokens=kv_tokens
    )

    def of(prefill_workers: int) -> PoolTrial:
        rest = (gpus - prefill_workers * p.gpus) // d.gpus
        return tried((("prefill", p.name, prefill_workers), ("decode", d.name, rest)))

    trials = climb(int(found.split.workers("prefill")), (gpus - d.gpus) // p.gpus, of)
    if found.alone is not None:
        both = found.alone.parts[0]
        trials.append(tried((("both", both.shape.name, int(both.workers)),)))
    return spec.rate_per_s or 0.0, trials


# --- what is told -------------------------------------------------------------------------------


def _measured_line(measured: Measured, caches: int) -> str:
    mix = measured.mix
    by = CACHED_BY[measured.cached_by].format(caches)
    return (
        f"{measured.requests:,} requests, {measured.rate_per_s:.3g} per second; means: prompt "
        f"{np.mean(mix.prompt_tokens):,.0f} tokens, of which {measured.cached_share:.1%} cached "
        f"({by}) and {mix.uncached:,.0f} to compute; answer {mix.output:,.0f}"
    )


def _targets_line(targets: WaitTargets, link: Link) -> str:
    ttft = "any TTFT" if math.isinf(targets.ttft_s) else f"mean TTFT {_ms(targets.ttft_s)} ms"
    which = "every step" if targets.every_step else "mean time per token"
    return (
        f"targets: {which} {_ms(targets.tpot_s)} ms, {ttft}; link {link.gbps:g} Gbit/s a GPU and "
        f"{_ms(link.setup_s)} ms a transfer"
    )


def _match_table(found: Match, gpus: int | None) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("pool", "workers"):
        table.add_column(name)
    for name in ("GPUs", "requests/s", "per GPU", "TTFT, ms", "TPOT, ms", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limited by")
    for kind, pool in _pools(found).items():
        if pool is None:
            if kind != "mixed":
                table.add_row(KINDS[kind], "cannot keep the targets")
            continue
        table.add_row(
            KINDS[kind],
            "\n".join(
                f"{part.workers:.3g} x {part.shape.name}, {part.role}" for part in pool.parts
            ),
            f"{pool.gpus:.3g}",
            "" if gpus is None else f"{pool.requests_per_s:.3g}",
            f"{pool.requests_per_s / (gpus or pool.gpus):.3g}",
            _ms(pool.ttft_s),
            _ms(pool.tpot_s),
            f"{max(part.each.batch for part in pool.parts):.1f}",
            pool.limited_by,
        )
    return table


def _trials_table(trials: Sequence[PoolTrial], rate_per_s: float) -> Table:
    best = max((one.good_share for one in trials), default=0.0)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"replayed at {rate_per_s:.3g} requests/s", no_wrap=True)
    for name in ("TTFT, ms", "TPOT, ms", "good", "cached", "split"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in trials:
        if one.prefill_workers:
            workers = f"{one.prefill_workers} prefill, {one.other_workers} decode"
        else:
            workers = f"{one.other_workers} do both"
        mark = "*" if one.good_share == best else ""
        table.add_row(
            workers, _ms(one.ttft_s), _ms(one.tpot_s), f"{one.good_share:.1%}{mark}",
            f"{one.cached_share:.1%}", f"{one.split_share:.0%}",
        )  # fmt: skip
    return table


def _advice(
    found: Match, measured: Measured, targets: WaitTargets, shapes: Shapes, gpus: int | None
) -> Iterator[str]:
    """Yield the conclusions that follow from the table."""
    best = found.best if gpus is not None else _better(found)
    if best is None:
        slowest = min(float(step_s(d.step_time, 1.0, 1.0, 0.0, measured.mix.context)) for d in
                      (*shapes.decode, *shapes.both))  # fmt: skip
        yield (
            f"No pool keeps the targets: a step takes {_ms(slowest)} ms at least, and a prefill "
            "the TTFT that it takes alone; raise --tpot-ms or --ttft-ms, or try another --profile."
        )
        return
    of = ", ".join(f"{part.workers:.3g} that {_does(part.role)}" for part in best.parts)
    yield f"Take {of}."
    if found.split is not None and found.alone is not None:
        ratio = (found.split.requests_per_s / (gpus or found.split.gpus)) / (
            found.alone.requests_per_s / (gpus or found.alone.gpus)
        )
        yield f"Prefill + decode takes {ratio:.2f} times what workers that are all alike take."
    if gpus is not None and math.isfinite(measured.rate_per_s):
        share = measured.rate_per_s / best.requests_per_s
        yield f"The log's own {measured.rate_per_s:.3g} requests per second are {share:.0%} of it."


def _better(found: Match) -> WorkerPool | None:
    pools = [pool for pool in (found.split, found.alone) if pool is not None]
    return max(pools, key=lambda pool: pool.per_gpu, default=None)


def _does(role: str) -> str:
    return {"prefill": "prefill", "decode": "decode", "both": "do both"}[role]


def _front_table(points: Sequence[FrontPoint]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("pool")
    for name in ("tokens/s user", "tokens/s GPU", "TTFT, ms", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("workers")
    table.add_column("limited by")
    for number, one in enumerate(points, start=1):
        kind = KINDS["split" if one.kind == "split" else "alone"]
        workers = ", ".join(f"{part.workers:.3g} x {part.shape.name}" for part in one.pool.parts)
        batch = max(part.each.batch for part in one.pool.parts)
        table.add_row(
            str(number), kind, f"{one.per_user:.1f}", f"{one.per_gpu:,.1f}",
            _ms(one.pool.ttft_s), f"{batch:.1f}", workers, one.pool.limited_by,
        )  # fmt: skip
    return table


def _command(asked: Capacity, point: FrontPoint) -> str:
    """Return the `rate-match` command for a point: its time per token, and all other options as
    given.
    """
    tpot = f"--tpot-ms={point.targets.tpot_s * 1e3:g}"
    return shlex.join(["warmroute-sim", "rate-match", asked.trace, tpot, *given_flags(asked)])


def _pools(found: Match) -> dict[str, WorkerPool | None]:
    return {"split": found.split, "alone": found.alone, "mixed": found.mixed}


def _mix_row(measured: Measured) -> dict[str, Any]:
    mix = measured.mix
    return {
        "requests": measured.requests,
        "rate_per_s": measured.rate_per_s,
        "prompt_tokens": float(np.mean(mix.prompt_tokens)),
        "uncached_tokens": mix.uncached,
        "output_tokens": mix.output,
        "cached_by": measured.cached_by,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}"
