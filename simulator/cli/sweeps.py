"""The commands `sweep`, `compare` and `study`: run many replays, keep results and compare them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from rich.console import Console

from simulator.cli.flags import Either, Group, Place, Written, at_most, command
from simulator.cli.plan import look_over
from simulator.cli.setups import MAX_DRAWS, Runs
from simulator.cli.usage import UsageError, check_files, check_folder, check_policy
from simulator.runs.compare import run_compare
from simulator.runs.runs import MAX_REQUEST_FILES, MAX_REQUEST_LINES, RunOptions
from simulator.runs.sheet import read_sheet
from simulator.runs.study import StudyPart, run_study
from simulator.runs.sweep import run_sweep
from simulator.traces.spec import WorkloadSpec

SWEEP_EXAMPLES = """\
example of a file:
  workload: {source: requests.jsonl}
  fleet: {profile: qwen3-32b-h100-tp2}
  grid:
    policies: [round_robin, warmset, {hybrid: {load_factor: [0.5, 1, 2]}}]
    workers: [6, 8, 12]
    seeds: [1, 2, 3]
"""
COMPARE_EXAMPLES = """\
examples:
  warmroute-sim compare sweep.yaml.results.jsonl --base hybrid
  warmroute-sim compare build/study/*.results.jsonl --base lmetric --html study.html
"""
BASE = "rule that the other rules are compared with"


class Sweep(Struct, kw_only=True):
    """The options of `sweep`."""

    file: Annotated[Path, Place(), "YAML file of the sweep (docs/simulator.md, Sweep)"]
    results: Annotated[Path | None, "file that keeps results; default: FILE.results.jsonl"] = None
    runs: Annotated[Runs, Group("processes that run the replays")]
    csv: Annotated[Written, "file that gets a line for each run"] = None
    json: Annotated[Written, "file that gets all figures"] = None
    html: Annotated[Written, "page that shows Pareto pictures"] = None
    requests_csv: Annotated[Path | None, "FOLDER", "folder that gets a file for each run with "
        f"its requests, as of `replay --csv`; {MAX_REQUEST_LINES:,} lines in all, equally many a "
        "run"
    ] = None  # fmt: skip


@command("FILE [option]...", SWEEP_EXAMPLES)
def sweep(options: Sweep, console: Console) -> bool:
    """Runs the grid or the random search that a YAML file describes, in parallel. Results of
    earlier runs are taken from the file of results, so an interrupted sweep resumes.
    """
    csv, json, html = options.csv, options.json, options.html
    check_files([options.file], csv=csv, json=json, html=html, results=options.results)
    setups = read_sheet(options.file)
    for workload in dict.fromkeys(_source(setup.workload) for setup in setups):
        look_over(console, workload)
    runs = RunOptions(options.results, options.runs.jobs, options.runs.dask)
    if options.requests_csv is not None:
        _check_requests(options, options.requests_csv, len(setups))
        lines = MAX_REQUEST_LINES // len(setups)
        runs = replace(runs, requests=options.requests_csv, request_lines=lines)
    return run_sweep(options.file, runs, console, csv=csv, json=json, html=html)


def _source(workload: WorkloadSpec) -> WorkloadSpec:
    """Return only the part of the workload that decides which lines are read, and how."""
    return WorkloadSpec(
        workload.source,
        format=workload.format,
        block_tokens=workload.block_tokens,
        requests=workload.requests,
        seconds=workload.seconds,
        strict=workload.strict,
    )


def _check_requests(options: Sweep, folder: Path, runs: int) -> None:
    if options.runs.dask is not None:
        raise UsageError("--requests-csv is written where runs are; leave it or --dask out")
    if runs > MAX_REQUEST_FILES:
        raise UsageError(
            f"--requests-csv: {runs:,} runs would write as many files, and {MAX_REQUEST_FILES:,} "
            "is the most; vary less"
        )
    check_folder("--requests-csv", folder)


class Compare(Struct, kw_only=True):
    """The options of `compare`."""

    results: Annotated[
        tuple[Path, ...], Place("+"), "RESULTS", "files of results that `sweep` has written"
    ]
    base: Annotated[str, "RULE", BASE]
    policy: Annotated[
        tuple[str, ...], "RULE", "rule to show beside the base; repeat; default: all"
    ] = ()
    json: Annotated[Written, "file that gets all figures"] = None
    html: Annotated[Written, "page with the comparison; its pictures need matplotlib"] = None
    markdown: Annotated[Written, "file that gets the tables as Markdown"] = None


@command("RESULTS... --base RULE [option]...", COMPARE_EXAMPLES)
def compare(options: Compare, console: Console) -> bool:
    """Reads the results of sweeps and prints for each workload, fleet and load: times, hits, good
    requests, collapsed seeds, and by which factor each policy is better or worse than the base on
    the same seeds. If the results have several loads, the command also prints the load at
    which each policy saturates.
    """
    files = {"json": options.json, "html": options.html, "markdown": options.markdown}
    check_files(options.results, **files)
    results = tuple(dict.fromkeys(options.results))
    return run_compare(results, options.base, console, options.policy, **files)


class Study(Struct):
    """The options of `study`."""

    full: Annotated[bool, Either("pass"), "run more seeds, loads, memory sizes and traces; "
        "default: the whole catalogue of rules on three seeds"] = False  # fmt: skip
    table: Annotated[bool, Either("pass"), "run every workload at 60 to 105 % of saturation with "
        "the leading published rules, each seed another draw of the traces; results go to the "
        "folder table of --out; for --base warmset"] = False  # fmt: skip
    only: Annotated[tuple[str, ...], "SWEEP", "run this sweep only; repeat for several"] = ()
    policy: Annotated[tuple[str, ...], "SPEC", "policy to run besides the listed ones; repeat"] = ()
    alone: Annotated[bool, "run the policies of --policy only"] = False
    quick: Annotated[bool, "run 150 requests with two rules, as a trial"] = False
    resamples: Annotated[int | None, at_most(MAX_DRAWS), "run N seeds of every sweep, not the "
        "listed seeds; each draws a trace's sessions anew; results go to the folder draws of --out"
    ] = None  # fmt: skip
    traces: Annotated[Path | None, "FOLDER", "folder of the trace files"] = None
    out: Annotated[Path, "FOLDER", "folder for results and tables"] = Path("build/study")
    base: Annotated[str, "RULE", BASE] = "lmetric"
    jobs: Annotated[int | None, "number of processes; default: one a core"] = None


@command(
    "[--full|--table] [--only SWEEP]... [--policy SPEC]... [option]...",
    "example:\n  warmroute-sim study --only w4b --policy 'hybrid|bounded_load'\n",
)
def study(options: Study, console: Console) -> bool:
    """Runs the sweeps of simulator/data/study with the policies and seeds of study.yaml, keeps
    every result, and writes the comparison. After an interruption, the same command resumes.
    """
    policies = tuple(dict.fromkeys(options.policy))
    for policy in policies:
        check_policy(policy)
    if options.alone and not policies:
        raise UsageError("--alone leaves only the rules of --policy, and there are none")
    if options.resamples == 1:
        raise UsageError("--resamples: 2 or more, for one draw has no interval")
    if options.resamples and options.quick:
        raise UsageError("--quick is of one seed; leave out --resamples")
    check_folder("--out", options.out)
    asked = StudyPart(
        traces=options.traces or Path(),
        passes="table" if options.table else "full" if options.full else "first",
        only=tuple(dict.fromkeys(options.only)),
        policies=policies,
        alone=options.alone,
        quick=options.quick,
        resamples=options.resamples,
    )
    return run_study(asked, options.out, options.base, console, options.jobs)
