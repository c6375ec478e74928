"""The command `plan`: finds the smallest fleet, or the highest rate, that keeps latency targets."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from rich.console import Console

from simulator.cli.flags import Group, Written, command
from simulator.cli.setups import (
    GENERATED,
    SEEDS,
    Runs,
    SetupOptions,
    SeveralDraws,
    known,
    setup_of,
)
from simulator.cli.usage import UsageError, check_files
from simulator.report.console import print_source_notes
from simulator.runs.plan import LIMITS, PlanRequest, Rule, Targets, check_request
from simulator.runs.runs import RunOptions
from simulator.runs.sweep import run_plan
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs

EXAMPLES = """\
examples:
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000 --tpot-mean-ms 50
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000 --max-rate --workers 8
"""


class Search(Struct):
    """The aim of the search, its rule and its bounds."""

    max_rate: Annotated[bool, "search for the largest number of requests per second that "
        "--workers serve, not for a number of workers"] = False  # fmt: skip
    most_workers: Annotated[int, "largest fleet to try"] = 64
    most_runs: Annotated[int, "maximum number of replays, of all policies and seeds together"] = 500
    rule: Annotated[Rule, "seeds that must keep targets; all: every seed; interval: the worse end "
        "of the seeds' 95 % interval; default all"] = "all"  # fmt: skip
    results: Annotated[
        Path | None, "file that keeps results, so that a later run continues the search"
    ] = None


class Plan(Struct, kw_only=True):
    """The options of `plan`."""

    draws: SeveralDraws
    targets: Annotated[Targets, Group("targets (at least one)")]
    search: Annotated[Search, Group("search")]
    setup: SetupOptions
    runs: Annotated[Runs, Group("processes that run the replays")]
    json: Annotated[Written, "file that gets the answer and every size that was tried"] = None


@command(
    "TRACE --ttft-p90-ms MS [other targets] [--policy SPEC]... [option]...", EXAMPLES + known()
)
def plan(options: Plan, console: Console) -> bool:
    """Replays TRACE with fewer and more workers, and finds for each policy the smallest fleet that
    keeps every target; or, with --max-rate, the highest rate that the given fleet serves. Every
    seed must keep every target.
    """
    setup, search = options.setup, options.search
    check_files([setup.trace, setup.around.faults], json=options.json, results=search.results)
    policies = options.draws.policies()
    seeds = tuple(dict.fromkeys(options.draws.seed or SEEDS))
    base = setup_of(setup, policies[0], seeds[0], resample=options.draws.resample)
    if not options.targets.has_limits:
        named = ", ".join(f"--{limit.field.replace('_', '-')}" for limit in LIMITS[:-1])
        raise UsageError(f"no target; give at least one of {named}")
    request = PlanRequest(
        base=base,
        policies=policies,
        targets=options.targets,
        seeds=seeds,
        find="rate" if search.max_rate else "workers",
        most_workers=search.most_workers,
        most_runs=search.most_runs,
        rule=search.rule,
    )
    check_request(request)
    look_over(console, base.workload)
    runs = RunOptions(search.results, options.runs.jobs, options.runs.dask)
    return run_plan(request, runs, console, options.json)


def look_over(console: Console, workload: WorkloadSpec) -> None:
    """Print once, before many replays, what is wrong with their source; raises `TraceError`."""
    stream = open_jobs(workload)
    if workload.source.startswith(GENERATED):
        return
    deque(stream.jobs, maxlen=0)
    print_source_notes(console, stream)
