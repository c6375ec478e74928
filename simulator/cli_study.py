"""The command lines of what is learned by many replays, or by replay and real programs together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simulator import arguments, study_commands, truth_commands
from simulator.cli_replay import add_pool, add_seeds, add_source, add_workload, add_world
from simulator.limits.hits import ALL_RULES, RULES
from simulator.setup_options import POLICIES, PROFILE, WORKERS

_TARGETS = (
    ("ttft-mean-ms", "mean time to first token"),
    ("ttft-p90-ms", "its 90th percentile"),
    ("ttft-p99-ms", "its 99th percentile"),
    ("tpot-mean-ms", "mean time per further token, which is the mean gap between tokens"),
    ("tpot-p90-ms", "its 90th percentile"),
    ("tpot-p99-ms", "its 99th percentile"),
)


def add_plan(parsers: Any) -> None:
    """`warmroute-sim plan`."""
    parser = parsers.add_parser(
        "plan",
        help="the smallest fleet and the policy that keep latency targets",
        description="Replays TRACE with fewer and more workers until the smallest fleet that "
        "keeps every target is found, per policy; or, with --max-rate, the highest rate that the "
        "given fleet takes. Every seed must keep every target.",
        epilog="example:\n  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000 --tpot-mean-ms 50",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_replayed(parser)
    targets = parser.add_argument_group("targets (at least one)")
    for name, what in _TARGETS:
        targets.add_argument(
            f"--{name}", type=arguments.positive, metavar="MS", help=f"{what}, at most"
        )
    targets.add_argument(
        "--goodput-share", type=arguments.share, metavar="SHARE",
        help="of all requests, that are good answers, at least",
    )  # fmt: skip
    targets.add_argument(
        "--max-lost-share", type=arguments.share, default=0.0, metavar="SHARE",
        help="of all requests, that may be turned away or lost; default 0",
    )  # fmt: skip
    search = parser.add_argument_group("search")
    search.add_argument(
        "--max-rate", action="store_true", help="search for the rate that --workers can take"
    )
    search.add_argument(
        "--most-workers", type=arguments.count, default=64, metavar="N", help="default 64"
    )
    search.add_argument(
        "--most-runs", type=arguments.count, default=500, metavar="N", help="default 500"
    )
    search.add_argument(
        "--rule", choices=("all", "interval"), default="all",
        help="every seed must keep the targets, or the bad end of the seeds' 95 %% interval",
    )  # fmt: skip
    search.add_argument(
        "--results", type=Path, metavar="FILE", help="keep results here, go on from them"
    )
    _add_runs(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the answer and its reasons")
    parser.set_defaults(command=study_commands.plan)


def add_sweep(parsers: Any) -> None:
    """`warmroute-sim sweep`."""
    parser = parsers.add_parser(
        "sweep",
        help="many replays from one file: policies, parameters, fleets, loads, seeds",
        description="Runs a grid or a random search (docs/simulator.md, section Sweep) in "
        "parallel; what was run before is taken from the file of results.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="default: FILE.results.jsonl, beside it"
    )
    _add_runs(parser)
    for name, what in (
        ("csv", "a line per run"),
        ("json", "all figures"),
        ("html", "a page with Pareto plots"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    parser.set_defaults(command=study_commands.sweep)


def add_hits(parsers: Any) -> None:
    """`warmroute-sim hits`."""
    parser = parsers.add_parser(
        "hits",
        help="hit rates of routing rules over caches alone, without service times",
        description="Takes requests in order; a prompt's blocks are cached as it arrives. Bounds "
        "what routing can do for the caches of a pool; says nothing about latency.",
    )
    add_source(parser)
    parser.add_argument(
        "--workers", type=arguments.count, default=WORKERS, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--kv-tokens", type=arguments.capacity, required=True, metavar="T",
        help="that each cache holds: 300k, 1M, inf",
    )  # fmt: skip
    parser.add_argument(
        "--rule", action="append", choices=ALL_RULES, metavar="RULE",
        help=f"of {', '.join(ALL_RULES)}; repeat for several; default: the first {len(RULES)}",
    )  # fmt: skip
    add_workload(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows")
    parser.set_defaults(command=study_commands.hits)


def add_bound(parsers: Any) -> None:
    """`warmroute-sim bound`."""
    parser = parsers.add_parser(
        "bound",
        help="what no policy can beat on a trace, what can be reached, where policies lose",
        description="Lower bounds of latency and upper bounds of hits for TRACE on a pool, the "
        "best assignment found, and for each policy its gap, regret and losses.",
    )
    _add_replayed(parser)
    parser.add_argument(
        "--no-waterfall", action="store_true", help="leave out the losses: a third of the time"
    )
    parser.add_argument(
        "--hindsight", action="store_true",
        help="search for better assignments knowing the future: slow, for some hundred requests",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="bounds and losses as a picture")
    parser.set_defaults(command=study_commands.bound)


def add_validate(parsers: Any) -> None:
    """`warmroute-sim validate`."""
    parser = parsers.add_parser(
        "validate",
        help="the same trace live and simulated, figure by figure",
        description="Starts timed workers and a router for each policy, puts TRACE on them in real "
        "time, replays it, and prints what differs and why. Ends with 0 when hit rates are within "
        "2 points, mean TTFT within 15 %% and the policies in the same order in both worlds.",
    )
    add_source(parser)
    parser.add_argument("--policy", action="append", metavar="SPEC", help="round_robin and hybrid")
    parser.add_argument("--workers", type=arguments.count, default=WORKERS, metavar="N")
    parser.add_argument("--profile", default=PROFILE, metavar="P", help="default %(default)s")
    parser.add_argument("--kv-tokens", type=arguments.count, metavar="T")
    parser.add_argument("--block-size", type=arguments.count, default=64, metavar="B")
    parser.add_argument(
        "--live-speed", type=arguments.positive, default=1.0, metavar="X",
        help="run the live side X times as fast; below 1 on a slow machine",
    )  # fmt: skip
    add_workload(parser)
    parser.add_argument("--out", type=Path, default=Path("build/validate"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.set_defaults(command=truth_commands.validate)


def add_calibrate(parsers: Any) -> None:
    """`warmroute-sim calibrate`."""
    parser = parsers.add_parser(
        "calibrate",
        help="fit step times to a live engine, or to its step log",
        description="Measures an OpenAI-compatible engine that nobody else uses meanwhile (about "
        "a minute), or reads a step log (`warmroute-engine --step-log`), fits the constants of "
        "the step-time model, prints the errors, and writes a profile for --profile and --timed.",
    )
    parser.add_argument("source", metavar="URL|FILE", help="http://HOST:PORT, or a step log (CSV)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the profile")
    parser.add_argument("--name", metavar="NAME", help="of the profile; default: the file's")
    parser.add_argument(
        "--kv-tokens", type=arguments.count, metavar="T",
        help="KV tokens the engine holds; default: what its /metrics say",
    )  # fmt: skip
    parser.add_argument("--model", help="default: the first that the endpoint lists")
    parser.add_argument(
        "--max-num-tokens", type=arguments.count, default=8192, metavar="N",
        help="prefill tokens of a step at most; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--max-prompt-tokens", type=arguments.count, default=16_384, metavar="N",
        help="longest prompt to measure; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--vocabulary", type=arguments.count, default=10_000, metavar="N")
    parser.add_argument("--seed", type=arguments.whole, default=0, metavar="N")
    parser.set_defaults(command=truth_commands.calibrate)


def add_check_facts(parsers: Any) -> None:
    """`warmroute-sim check-facts`."""
    parser = parsers.add_parser(
        "check-facts",
        help="play a router's recording of facts: does this core decide the same?",
        description="Plays what `warmroute serve --record-facts` wrote to a fresh decision core "
        "and prints every action that differs. Ends with 0 when all are the same.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(command=study_commands.check_facts)


def _add_replayed(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument(
        "--policy", action="append", metavar="SPEC",
        help=f"repeat to compare; default: {', '.join(POLICIES)}",
    )  # fmt: skip
    add_pool(parser)
    add_workload(parser)
    add_seeds(parser)
    add_world(parser)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=arguments.count, metavar="N", help="processes; default: one a core"
    )
    parser.add_argument(
        "--dask", metavar="tcp://HOST:PORT", help="run on this Dask cluster instead"
    )
