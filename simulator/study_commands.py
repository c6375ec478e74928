"""What `plan`, `sweep`, `hits`, `bound` and `check-facts` do: each returns whether it went well."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress

import msgspec
from rich.console import Console
from rich.progress import Progress

from policies.parameters import PolicyError
from router.record.player import Player
from simulator.limits.hindsight import Hindsight
from simulator.limits.hits import RULES
from simulator.limits.hits import hits as hit_rows
from simulator.limits.plot import loss_plot
from simulator.limits.report import bound as bounded
from simulator.limits.show import print_bounds, print_hits
from simulator.report.errors_line import say_trace_errors
from simulator.setup_options import POLICIES, SEEDS, setup_of, workload_of
from simulator.sweep.command import SweepCommand, run_plan, run_sweep
from simulator.sweep.question import PlanRequest
from simulator.sweep.runs import RunOptions
from simulator.sweep.targets import Targets
from simulator.traces.open import open_jobs
from simulator.usage import UsageError, check_file, check_policy

DIFFERENCES_SHOWN = 20


def plan(options: argparse.Namespace, console: Console) -> bool:
    """Searches for the smallest fleet, or the highest rate."""
    policies = tuple(dict.fromkeys(options.policy or POLICIES))
    seeds = tuple(dict.fromkeys(options.seed or SEEDS))
    request = PlanRequest(
        base=setup_of(options, policies[0], seeds[0]),
        policies=policies,
        targets=_targets(options),
        seeds=seeds,
        find="rate" if options.max_rate else "workers",
        most_workers=options.most_workers,
        most_runs=options.most_runs,
        rule=options.rule,
    )
    runs = RunOptions(options.results, options.jobs, options.dask)
    return run_plan(request, runs, console, options.json)


def sweep(options: argparse.Namespace, console: Console) -> bool:
    """Runs the sweep in a file."""
    command = SweepCommand(
        file=options.file,
        results=options.results,
        jobs=options.jobs,
        dask=options.dask,
        csv=options.csv,
        json=options.json,
        html=options.html,
    )
    return run_sweep(command, console)


def hits(options: argparse.Namespace, console: Console) -> bool:
    """Hit rates of rules over caches alone."""
    if options.json is not None:
        check_file("--json", options.json)
    stream = open_jobs(workload_of(options))
    try:
        rows = hit_rows(
            stream.jobs,
            block_tokens=stream.block_tokens,
            workers=options.workers,
            kv_tokens=options.kv_tokens,
            rules=options.rule or RULES,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    print_hits(console, rows)
    say_trace_errors(console, stream.errors.total, stream.errors)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return bool(rows)


def bound(options: argparse.Namespace, console: Console) -> bool:
    """Bounds, gaps and losses."""
    for name in ("json", "svg"):
        if getattr(options, name) is not None:
            check_file(f"--{name}", getattr(options, name))
    policies = tuple(dict.fromkeys(options.policy or POLICIES))
    for policy in policies:
        check_policy(policy)
    seeds = options.seed or [0]
    if len(seeds) > 1:
        raise UsageError("--seed: bounds are for one seed; run it once for each")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        report = bounded(
            setup_of(options, policies[0], seeds[0]),
            policies,
            waterfall=not options.no_waterfall,
            hindsight=Hindsight() if options.hindsight else None,
            on_progress=_shown(progress),
        )
    print_bounds(console, report)
    if options.json is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        options.json.write_bytes(text + b"\n")
    if options.svg is not None:
        options.svg.write_text(loss_plot(report))
    return True


def check_facts(options: argparse.Namespace, console: Console) -> bool:
    """Plays a recording of facts; whether every action was the same."""
    try:
        player = Player(options.file)
    except (OSError, PolicyError) as error:
        raise UsageError(f"{options.file}: {error}") from error
    different = 0
    for difference in player.differences():
        different += 1
        if different <= DIFFERENCES_SHOWN:
            console.print(f"[red]{different}[/] {difference}", highlight=False)
    console.print(
        f"{player.facts:,} facts played, {player.actions:,} answers compared, {different:,} differ "
        f"(the recording ends: {player.ended})",
        highlight=False,
    )
    return not different


def _targets(options: argparse.Namespace) -> Targets:
    return Targets(
        ttft_mean_ms=options.ttft_mean_ms,
        ttft_p90_ms=options.ttft_p90_ms,
        ttft_p99_ms=options.ttft_p99_ms,
        tpot_mean_ms=options.tpot_mean_ms,
        tpot_p90_ms=options.tpot_p90_ms,
        tpot_p99_ms=options.tpot_p99_ms,
        goodput_share=options.goodput_share,
        max_lost_share=options.max_lost_share,
    )


def _shown(progress: Progress) -> Callable[[str, int, int], None]:
    tasks = {}

    def note(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total)
        with suppress(KeyError):
            progress.update(tasks[what], completed=done, total=total)

    return note
