"""The commands `rate-match` and `pareto`: how many workers of which role, by arithmetic."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
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
    Pool,
    Shapes,
    Trial,
    climb,
    drawn,
    gain,
    match,
    pareto,
    speeds,
    trial,
)
from simulator.capacity.rates import Link, Measured, MixError, Shape, Targets, measure, step_s
from simulator.cli.replay_options import GENERATED, GENERATED_BLOCK, PROFILE, workload_of
from simulator.cli.usage import UsageError, check_files
from simulator.report.console import say_trace_errors
from simulator.workloads.open import open_jobs

CACHES = 4  # where no number of GPUs says how many workers prefill
KINDS = {"split": SPLIT, "alone": ALIKE, "mixed": "both kinds"}
_REPEATED = (
    *("ttft_ms", "gpus", "kv_tokens", "caches", "cached", "link_gbps", "link_setup_ms"),
    *("format", "block_tokens", "speed", "rate", "requests", "skip", "seconds", "spread"),
)  # options of a point's command
CACHED_BY = {
    "log": "as the log says",
    "caches": "as the caches of {} workers would have it",
    "none": "as was asked for",
}


def rate_match(options: argparse.Namespace, console: Console) -> bool:
    """Prints what the best pools take; False where no pool keeps the targets."""
    check_files(options, ("json",), [options.trace])
    shapes, targets, link = _shapes(options), _targets(options, options.tpot_ms), _link(options)
    if options.simulate and options.gpus is None:
        raise UsageError("--simulate replays whole workers; say on how many --gpus")
    if options.gpus is not None and options.gpus > MAX_GPUS:
        raise UsageError(f"--gpus {options.gpus}: {MAX_GPUS} at most")
    measured, caches = _measured(options, console, shapes)
    found = match(measured.mix, shapes, targets, link, options.gpus)
    console.print(_told(measured, caches), highlight=False)
    console.print(_targets_told(targets, link), highlight=False)
    console.print(_match_table(found, options.gpus))
    trials: list[Trial] = []
    if options.simulate and found.split is not None:
        rate_per_s, trials = _trials(options, found, targets, link)
        console.print(_trials_table(trials, rate_per_s), highlight=False)
        console.print(
            f"good: within {TTFT_MARGIN:g} times the TTFT and {TPOT_MARGIN:g} times the time per "
            "token; *: most of them",
            style="dim", highlight=False,
        )  # fmt: skip
    for line in _advice(found, measured, targets, shapes, options.gpus):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json is not None:
        rows = {"mix": _mix_row(measured), "targets": targets, "pools": _pools(found)}
        _write(options, rows | ({"trials": trials} if options.simulate else {}))
    return found.best is not None


def front(options: argparse.Namespace, console: Console) -> bool:
    """Prints and draws the fronts; False where no pool keeps the targets at any speed."""
    check_files(options, ("json", "svg"), [options.trace])
    shapes, link = _shapes(options), _link(options)
    measured, caches = _measured(options, console, shapes)
    tpots_s = speeds(shapes, options.points)
    split, alike = pareto(
        measured.mix, shapes, tpots_s, _targets(options, None), link, options.gpus
    )
    console.print(_told(measured, caches), highlight=False)
    if not split and not alike:
        console.print("no pool keeps the targets at any speed: raise --ttft-ms, or give more GPUs")
        return False
    points = [*split, *alike]
    commands = [_command(options, point) for point in points]
    console.print(_front_table(points))
    for line in gain(split, alike):
        console.print(line, highlight=False)
    console.print("\nEach point again, with its workers (numbers as above):")
    for number, command in enumerate(commands, start=1):
        console.print(f"  {number:2}  {command}", highlight=False, markup=False, soft_wrap=True)
    if options.svg is not None:
        options.svg.write_text(drawn(split, alike))
    if options.json is not None:
        rows = [
            {"kind": one.kind, "tokens_per_s_user": one.per_user, "tokens_per_s_gpu": one.per_gpu,
             "targets": one.targets, "pool": one.pool, "command": command}
            for one, command in zip(points, commands, strict=True)
        ]  # fmt: skip
        _write(options, {"mix": _mix_row(measured), "points": rows})
    return True


# --- what was asked for -------------------------------------------------------------------------


def _shapes(options: argparse.Namespace) -> Shapes:
    usual = options.profile or [PROFILE]

    def of(option: str, names: Sequence[str] | None) -> tuple[Shape, ...]:
        try:
            return tuple(
                Shape.of(name, options.kv_tokens) for name in dict.fromkeys(names or usual)
            )
        except ValueError as error:
            raise UsageError(f"--{option}: {error}") from error

    shapes = Shapes(
        of("prefill-profile", options.prefill_profile),
        of("decode-profile", options.decode_profile),
        of("profile", options.profile),
    )
    for p in shapes.prefill:
        for d in shapes.decode:
            if p.kv_bytes_per_token != d.kv_bytes_per_token:
                raise UsageError(
                    f"{p.name} has {p.kv_bytes_per_token:,} bytes of KV a token and {d.name} "
                    f"{d.kv_bytes_per_token:,}: not one model, so neither takes the other's KV"
                )
    return shapes


def _targets(options: argparse.Namespace, tpot_ms: float | None) -> Targets:
    ttft_s = math.inf if options.ttft_ms is None else options.ttft_ms / 1e3
    return Targets((tpot_ms or 1e3) / 1e3, ttft_s, options.every_step)


def _link(options: argparse.Namespace) -> Link:
    return Link(options.link_gbps, options.link_setup_ms / 1e3)


def _measured(
    options: argparse.Namespace, console: Console, shapes: Shapes
) -> tuple[Measured, int]:
    """The mix, and the number of caches that was assumed."""
    caches = options.caches or CACHES
    if options.caches is None and options.gpus is not None:
        caches = max(1, options.gpus // (2 * shapes.prefill[0].gpus))
    stream = open_jobs(workload_of(options))
    kv_tokens = shapes.prefill[0].kv_tokens
    try:
        found = measure(stream.jobs, stream.block_tokens, caches, kv_tokens, options.cached)
    except MixError as error:
        raise UsageError(f"{options.trace}: {error}") from error
    say_trace_errors(console, stream.errors.total, stream.errors)
    return found, caches


def _trials(
    options: argparse.Namespace, found: Match, targets: Targets, link: Link
) -> tuple[float, list[Trial]]:
    """Replays around the best split, and of the best workers that do both, at one rate."""
    assert found.split is not None
    p, d = (part.shape for part in found.split.parts)
    spec = workload_of(options)
    if spec.rate_per_s is None:
        rate_per_s = RATE_SHARE * found.split.requests_per_s
        spec = msgspec.structs.replace(spec, rate_per_s=rate_per_s, speed=1.0)
    # Where any TTFT will do, what the arithmetic expects is what a good one is.
    limits = replace(targets, ttft_s=min(targets.ttft_s, found.split.ttft_s))
    block_size = GENERATED_BLOCK if options.trace.startswith(GENERATED) else None
    tried = partial(
        trial, spec, targets=limits, link=link, block_size=block_size, kv_tokens=options.kv_tokens
    )

    def of(prefill_workers: int) -> Trial:
        rest = (options.gpus - prefill_workers * p.gpus) // d.gpus
        return tried((("prefill", p.name, prefill_workers), ("decode", d.name, rest)))

    trials = climb(int(found.split.workers("prefill")), (options.gpus - d.gpus) // p.gpus, of)
    if found.alone is not None:
        both = found.alone.parts[0]
        trials.append(tried((("both", both.shape.name, int(both.workers)),)))
    return spec.rate_per_s or 0.0, trials


# --- what is told -------------------------------------------------------------------------------


def _told(measured: Measured, caches: int) -> str:
    mix = measured.mix
    by = CACHED_BY[measured.cached_by].format(caches)
    return (
        f"{measured.requests:,} requests, {measured.rate_per_s:.3g} per second; means: prompt "
        f"{np.mean(mix.prompt_tokens):,.0f} tokens, of which {measured.cached_share:.1%} cached "
        f"({by}) and {mix.uncached:,.0f} to compute; answer {mix.output:,.0f}"
    )


def _targets_told(targets: Targets, link: Link) -> str:
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


def _trials_table(trials: Sequence[Trial], rate_per_s: float) -> Table:
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
    found: Match, measured: Measured, targets: Targets, shapes: Shapes, gpus: int | None
) -> Iterator[str]:
    """What to make of the table."""
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


def _better(found: Match) -> Pool | None:
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


def _command(options: argparse.Namespace, point: FrontPoint) -> str:
    """`rate-match` with the point's time per token, and everything else as it was asked for."""
    words = [
        "warmroute-sim",
        "rate-match",
        options.trace,
        f"--tpot-ms={point.targets.tpot_s * 1e3:g}",
    ]
    for name in _REPEATED:
        value = getattr(options, name)
        if value not in (None, options.defaults.get(name)):
            words.append(f"--{name.replace('_', '-')}={value}")
    words += ["--every-step"] if options.every_step else []
    for name in ("profile", "prefill_profile", "decode_profile"):
        words += [f"--{name.replace('_', '-')}={one}" for one in getattr(options, name) or ()]
    return shlex.join(words)


def _pools(found: Match) -> dict[str, Pool | None]:
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


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}"
