"""The commands that compute many replays, and bounds."""

from __future__ import annotations

import argparse
import os
import resource
from collections import deque
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import msgspec
from rich.console import Console

from policies.facts import Role
from policies.load import PolicyError
from router.record.facts import Player
from simulator.cli.replay_options import (
    GENERATED,
    POLICIES,
    PROFILE,
    SEEDS,
    setup_of,
    workload_of,
)
from simulator.cli.usage import UsageError, check_files, check_folder, check_policy
from simulator.limits.hits import RULES
from simulator.limits.hits import hits as hit_rows
from simulator.limits.report import bound as bounded
from simulator.limits.show import bound_tables, hits_table
from simulator.replay.fleet import check_setup
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.board import Board
from simulator.report.console import say_trace_errors
from simulator.runs.advice import Advice, keep, read_kept, state_path, told
from simulator.runs.advise import Adviser
from simulator.runs.advise import Asked as AdviceAsked
from simulator.runs.compare import run_compare
from simulator.runs.plan import PlanRequest, Targets, check_request
from simulator.runs.runs import MAX_REQUEST_FILES, MAX_REQUEST_LINES, RunOptions, Runs
from simulator.runs.sheet import read_sheet
from simulator.runs.study import Asked, run_study
from simulator.runs.sweep import run_plan, run_sweep
from simulator.traces.files import opened
from simulator.traces.job import ErrorLog
from simulator.traces.request_log import Recorded, read_recorded
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import help_lines, open_jobs


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
        passes="table" if options.table else "full" if options.full else "first",
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


def advise(options: argparse.Namespace, console: Console) -> bool:
    """Says what to change, and what became of what it said before."""
    _go_easy(options)
    model = "" if options.model is None else f"?model={quote(options.model, safe='')}"
    options.format = f"requests{model}"
    check_files(options, ("json", "state"), [options.trace])
    errors = ErrorLog(options.trace)
    recorded = read_recorded(opened(Path(options.trace)).lines(errors), options.model)
    asked = AdviceAsked(
        base=_base_of(options, recorded),
        recorded=_measured(options, recorded),
        policies=tuple(dict.fromkeys(options.candidate or ())),
        targets=_targets(options) if any(getattr(options, name) for name in TARGETS) else None,
        draws=options.draws,
        seed=options.seed,
        seconds=options.budget,
        kept=tuple(read_kept(options.state or state_path(options.trace))),
        check_only=options.check,
        any_fit=options.any_fit,
    )
    with Runs(RunOptions(jobs=options.jobs), console) as runs:
        advice = Adviser(asked, runs).advise()
    for part in told(advice, console.width):
        console.print(part, highlight=False, markup=False, soft_wrap=True)
    _write_advice(options, console, advice)
    return True


def _go_easy(options: argparse.Namespace) -> None:
    """Lowers this process and those it starts, where it is asked."""
    if options.nice:
        os.nice(options.nice)
    if options.memory_mb is not None:
        most = options.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _base_of(options: argparse.Namespace, recorded: Recorded) -> Setup:
    """What ran: as the options have it, else as the log has it. Raises `UsageError`."""
    options.policy = options.policy or (recorded.policies[-1] if recorded.policies else None)
    if not recorded.requests:
        raise UsageError(f"{options.trace}: holds no requests{_of(options.model)}")
    if options.policy is None:
        raise UsageError(f"{options.trace}: does not say which policy ran; give --policy")
    named = ("workers", "prefill_workers", "decode_workers", "group")
    if not any(getattr(options, name) for name in named):
        if recorded.workers is None:
            raise UsageError(f"{options.trace}: does not say how many workers ran; give --workers")
        options.workers = recorded.workers
    setup = setup_of(options, options.policy, options.seed)
    if recorded.fleet and options.workers == recorded.workers:
        setup = msgspec.structs.replace(setup, groups=_recorded_groups(options, recorded))
    limits = {
        name: value
        for name in ("worker_requests", "worker_queued_tokens")
        if (value := getattr(options, name) or getattr(recorded, name)) is not None
    }
    router = msgspec.structs.replace(setup.router, **limits)
    work = msgspec.structs.replace(setup.workload, resample=True)
    size = setup.block_size or open_jobs(setup.workload).block_tokens
    setup = msgspec.structs.replace(setup, workload=work, block_size=size, router=router)
    check_setup(setup)
    return setup


def _of(model: str | None) -> str:
    return "" if model is None else f" of the model {model}"


def _recorded_groups(options: argparse.Namespace, recorded: Recorded) -> tuple[WorkerGroup, ...]:
    return tuple(
        WorkerGroup(
            part.count,
            options.profile or PROFILE,
            options.kv_tokens or part.kv_tokens,
            prefix_wait_tokens=options.prefix_wait_tokens,
            max_requests=part.max_requests,
            max_queued_tokens=part.max_queued_tokens,
            max_kv_fraction=part.max_kv_fraction,
            role=msgspec.convert(part.role, Role),
        )
        for part in recorded.fleet
    )


def _measured(options: argparse.Namespace, recorded: Recorded) -> Recorded:
    """Of a part of the log what clients saw of the whole says nothing."""
    if options.requests or options.skip or options.seconds:
        return msgspec.structs.replace(recorded, ttft_ms=None, hit_rate=None)
    return recorded


def _write_advice(options: argparse.Namespace, console: Console, advice: Advice) -> None:
    """Keeps the forecast, and the whole as JSON where it is asked; the file is there at once."""
    path = options.state or state_path(options.trace)
    try:
        keep(path, advice)
    except OSError as error:
        told = f"{path}: the forecast is not kept: {error.strerror}; --state FILE"
        console.print(told, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if options.json is not None:
        part = options.json.with_name(f"{options.json.name}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(advice), indent=1) + b"\n")
        part.replace(options.json)


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
