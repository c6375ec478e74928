"""The commands that compute many replays, and bounds."""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import replace

import msgspec
from rich.console import Console

from policies.load import PolicyError
from router.record.facts import Player
from simulator.cli.replay_options import GENERATED, POLICIES, SEEDS, setup_of, workload_of
from simulator.cli.usage import UsageError, check_files, check_folder, check_policy
from simulator.limits.hits import RULES
from simulator.limits.hits import hits as hit_rows
from simulator.limits.report import bound as bounded
from simulator.limits.show import bound_tables, hits_table
from simulator.replay.setup import WorkloadSpec
from simulator.report.board import Board
from simulator.report.console import say_trace_errors
from simulator.runs.compare import run_compare
from simulator.runs.plan import PlanRequest, Targets, check_request
from simulator.runs.runs import MAX_REQUEST_FILES, MAX_REQUEST_LINES, RunOptions
from simulator.runs.sheet import read_sheet
from simulator.runs.study import Asked, run_study
from simulator.runs.sweep import run_plan, run_sweep
from simulator.traces.open import help_lines, open_jobs


def study(options: argparse.Namespace, console: Console) -> bool:
    """Runs and compares."""
    policies = tuple(dict.fromkeys(options.policy or ()))
    for policy in policies:
        check_policy(policy)
    if options.alone and not policies:
        raise UsageError("--alone leaves only the rules of --policy, and there are none")
    if options.resamples == 1:
        raise UsageError("--resamples: 2 or more, for one draw has no interval")
    if options.resamples and options.quick:
        raise UsageError("--quick is of one seed; leave out --resamples")
    check_folder("--out", options.out)
    asked = Asked(
        traces=options.traces,
        passes="full" if options.full else "first",
        only=tuple(dict.fromkeys(options.only or ())),
        policies=policies,
        alone=options.alone,
        quick=options.quick,
        resamples=options.resamples,
    )
    return run_study(asked, options.out, options.base, console, options.jobs)


DIFFERENCES_SHOWN = 20
TARGETS = tuple(name for name in Targets.__struct_fields__ if name != "max_lost_share")


def plan(options: argparse.Namespace, console: Console) -> bool:
    """Searches for the smallest fleet, or the highest rate."""
    check_files(options, ("json", "results"), _read(options))
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
    check_request(request)
    _look_over(console, request.base.workload)
    return run_plan(request, runs, console, options.json)


def sweep(options: argparse.Namespace, console: Console) -> bool:
    """Runs the sweep in a file."""
    check_files(options, ("csv", "json", "html", "results"), [str(options.file)])
    setups = read_sheet(options.file)
    for workload in dict.fromkeys(_source(setup.workload) for setup in setups):
        _look_over(console, workload)
    runs = RunOptions(options.results, options.jobs, options.dask)
    if options.requests_csv is not None:
        _check_requests(options, len(setups))
        lines = MAX_REQUEST_LINES // len(setups)
        runs = replace(runs, requests=options.requests_csv, request_lines=lines)
    files = {name: getattr(options, name) for name in ("csv", "json", "html")}
    return run_sweep(options.file, runs, console, **files)


def _check_requests(options: argparse.Namespace, runs: int) -> None:
    if options.dask is not None:
        raise UsageError("--requests-csv is written where runs are; leave it or --dask out")
    if runs > MAX_REQUEST_FILES:
        raise UsageError(
            f"--requests-csv: {runs:,} runs would write as many files, and {MAX_REQUEST_FILES:,} "
            "is the most; vary less"
        )
    check_folder("--requests-csv", options.requests_csv)


def compare(options: argparse.Namespace, console: Console) -> bool:
    """Rules side by side."""
    read = list(map(str, options.results))
    check_files(options, ("json", "html", "markdown"), read)
    files = {name: getattr(options, name) for name in ("json", "html", "markdown")}
    results = tuple(dict.fromkeys(options.results))
    return run_compare(results, options.base, console, tuple(options.policy or ()), **files)


def hits(options: argparse.Namespace, console: Console) -> bool:
    """Hit rates of rules over caches alone."""
    check_files(options, ("json",), _read(options))
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
    console.print(hits_table(rows))
    say_trace_errors(console, stream.errors.total, stream.errors)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return bool(rows)


def bound(options: argparse.Namespace, console: Console) -> bool:
    """Bounds, gaps and losses."""
    check_files(options, ("json",), _read(options))
    policies = tuple(dict.fromkeys(options.policy or POLICIES))
    for policy in policies:
        check_policy(policy)
    seeds = options.seed or [0]
    if len(seeds) > 1:
        raise UsageError("--seed: bounds are for one seed; run it once for each")
    setup = setup_of(options, policies[0], seeds[0])
    _look_over(console, setup.workload)
    with Board(console) as board:
        report = bounded(
            setup, policies, waterfall=not options.no_waterfall, on_progress=board.count
        )
    console.print(bound_tables(report))
    if options.json is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        options.json.write_bytes(text + b"\n")
    return True


def check_facts(options: argparse.Namespace, console: Console) -> bool:
    """Plays a recording of facts; whether every action was the same."""
    try:
        player = Player(options.file)
    except OSError as error:
        raise UsageError(f"{options.file}: cannot be read: {error.strerror}") from error
    except PolicyError as error:
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


def sources(options: argparse.Namespace, console: Console) -> bool:
    """Lists formats and generators."""
    for line in help_lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return True


def _read(options: argparse.Namespace) -> list[str]:
    """What a command with a trace may read."""
    return [options.trace, *filter(None, (getattr(options, "faults", None),))]


def _source(workload: WorkloadSpec) -> WorkloadSpec:
    """The part of it that decides which lines are read, and how."""
    return WorkloadSpec(
        workload.source,
        format=workload.format,
        block_tokens=workload.block_tokens,
        requests=workload.requests,
        seconds=workload.seconds,
        strict=workload.strict,
    )


def _look_over(console: Console, workload: WorkloadSpec) -> None:
    """Says once, before many replays, what is wrong with their source; raises `TraceError`."""
    stream = open_jobs(workload)
    if workload.source.startswith(GENERATED):
        return
    deque(stream.jobs, maxlen=0)
    say_trace_errors(console, stream.errors.total, stream.errors)


def _targets(options: argparse.Namespace) -> Targets:
    given = {name: getattr(options, name) for name in TARGETS}
    if not any(value is not None for value in given.values()):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in TARGETS)
        raise UsageError(f"no target; give at least one of {named}")
    return Targets(**given, max_lost_share=options.max_lost_share)
