"""Options of the commands that compute many replays, bounds, fits and checks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simulator.capacity.batches import MAX_BATCH
from simulator.capacity.instances import HEADROOM, MAX_INSTANCES, MOST_INSTANCES
from simulator.cli import usage as arguments
from simulator.cli.replay_options import (
    MAX_DRAWS,
    PROFILE,
    SEEDS,
    WORKERS,
    add_policies,
    add_pool,
    add_reports,
    add_source,
    add_workload,
    add_world,
    known,
)
from simulator.cli.usage import add_command, from_module
from simulator.limits.hits import ALL_RULES, RULES
from simulator.runs.advise import DRAWS
from simulator.runs.advise import TARGETS as ADVISE_TARGETS
from simulator.runs.plan import shown
from simulator.runs.runs import MAX_REQUEST_LINES

STUDIES = "simulator.cli.study"
_TARGETS = (
    ("ttft-mean-ms", "mean time to first token"),
    ("ttft-p90-ms", "its 90th percentile"),
    ("ttft-p99-ms", "its 99th percentile"),
    ("tpot-mean-ms", "mean time per later token, which is the mean gap between tokens (ITL)"),
    ("tpot-p90-ms", "its 90th percentile"),
    ("tpot-p99-ms", "its 99th percentile"),
)
PLAN_EXAMPLES = """\
examples:
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000 --tpot-mean-ms 50
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000 --max-rate --workers 8
"""
SWEEP_EXAMPLES = """\
example of a file:
  workload: {source: requests.jsonl}
  fleet: {profile: qwen3-32b-h100-tp2}
  grid:
    policies: [round_robin, warmset, {hybrid: {load_factor: [0.5, 1, 2]}}]
    workers: [6, 8, 12]
    seeds: [1, 2, 3]
"""
ADVISE_EXAMPLES = """\
examples:
  warmroute-sim advise requests.jsonl --profile llama-3.1-8b-h100
  warmroute-sim advise requests.jsonl --profile mine.json --ttft-p90-ms 1000 --json advice.json
  warmroute-sim advise later.jsonl --profile mine.json --state requests.jsonl.advice --check
"""
COMPARE_EXAMPLES = """\
examples:
  warmroute-sim compare sweep.yaml.results.jsonl --base hybrid
  warmroute-sim compare build/study/*.results.jsonl --base lmetric --html study.html
"""


def add_plan(parsers: Any) -> None:
    """`warmroute-sim plan`."""
    parser = add_command(
        parsers,
        "plan",
        "TRACE --ttft-p90-ms MS [other targets] [--policy SPEC]... [option]...",
        "the smallest fleet and the policy that keep latency targets",
        "Replays TRACE with fewer and more workers until the smallest fleet that keeps every "
        "target is found, per policy; or, with --max-rate, the highest rate that the given fleet "
        "takes. Every seed must keep every target.",
        PLAN_EXAMPLES + known(),
    )
    add_source(parser)
    add_policies(parser, seeds=" ".join(map(str, SEEDS)))
    _add_targets(parser)
    _add_search(parser)
    add_pool(parser)
    add_workload(parser)
    add_world(parser)
    _add_runs(parser)
    add_reports(parser, json="the answer, every size that was tried, and why")
    parser.set_defaults(command=from_module(STUDIES, "plan"))


def add_advise(parsers: Any) -> None:
    """`warmroute-sim advise`."""
    parser = add_command(
        parsers,
        "advise",
        "LOG [--profile P] [targets] [--candidate SPEC]... [option]...",
        "what to change, by the router's own log",
        "Replays draws of LOG, the router's request log, as it ran and with one thing changed: "
        "policy, thresholds, block size, roles, number of workers. Says what is clearly better, by "
        "how much, and how to change it; or that nothing is. Half of the draws choose the best of "
        "each kind, the other half judge it. Forecasts are kept beside the log, and held against "
        "the log that is made after the change.",
        ADVISE_EXAMPLES + known(),
    )
    parser.add_argument("trace", metavar="LOG", help="the router's request log: file, folder or "
                        "pattern of parts")  # fmt: skip
    add = parser.add_argument
    add("--model", metavar="NAME", help="requests of this model; needed where there are several")
    add("--policy", metavar="SPEC", help="that ran; default: the log's")
    add(
        "--candidate", action="append", metavar="SPEC",
        help="a policy to try besides those it knows; repeat",
    )  # fmt: skip
    add("--draws", type=arguments.count, default=DRAWS, metavar="N",
        help="half of them choose, half judge; default %(default)s")  # fmt: skip
    add("--seed", type=arguments.whole, default=0, metavar="N", help="of the first draw")
    add("--budget", type=arguments.positive, metavar="S",
        help="seconds to spend at most: fewer draws where they do not suffice")  # fmt: skip
    add("--jobs", type=arguments.count, metavar="N", help="processes; default: one for each core")
    add("--check", action="store_true", help="only hold earlier forecasts against this log")
    add("--state", type=Path, metavar="FILE",
        help="where forecasts are kept; default: LOG.advice")  # fmt: skip
    add("--any-fit", action="store_true",
        help="advise although a replay as it ran is unlike what the log measured")  # fmt: skip
    add("--nice", type=arguments.whole, default=0, metavar="N", help="lower its priority by N")
    add("--memory-mb", type=arguments.count, metavar="N", help="of each process at most")
    _add_targets(parser, f"targets; default: {', '.join(shown(ADVISE_TARGETS))}", loss=0.01)
    add_pool(parser, workers="the log's")
    for name in ("worker_requests", "worker_queued_tokens"):
        add(f"--{name.replace('_', '-')}", type=arguments.count, metavar="N",
            help=f"limits.{name} that ran; default: the log's")  # fmt: skip
    _add_part(parser)
    add_world(parser)
    add_reports(parser, json="everything, as the admin page reads it")
    parser.set_defaults(
        command=from_module(STUDIES, "advise"), block_tokens=None, speed=None, rate=None,
        spread=None, resample=False,
    )  # fmt: skip


def _add_part(parser: argparse.ArgumentParser) -> None:
    """Which requests of a log: never faster or slower, for their times were measured."""
    group = parser.add_argument_group("requests").add_argument
    group("--requests", type=arguments.count, metavar="N", help="the first N only")
    group("--skip", type=arguments.not_negative, default=0.0, metavar="S",
          help="leave out the first S seconds")  # fmt: skip
    group("--seconds", type=arguments.positive, metavar="S", help="the first S seconds only")
    group("--closed-loop", action="store_true",
          help="a session's next turn waits for the answer before it")  # fmt: skip
    group("--strict", action="store_true", help="stop at the first wrong line")


def _add_targets(
    parser: argparse.ArgumentParser, title: str = "targets (at least one)", loss: float = 0.0
) -> None:
    targets = parser.add_argument_group(title)
    for name, what in _TARGETS:
        targets.add_argument(
            f"--{name}", type=arguments.positive, metavar="MS", help=f"{what}, at most"
        )
    targets.add_argument(
        "--goodput-share", type=arguments.share, metavar="SHARE",
        help="good answers (below) of all requests, at least, as 0.99",
    )  # fmt: skip
    targets.add_argument(
        "--max-lost-share", type=arguments.share, default=loss, metavar="SHARE",
        help="requests turned away or lost, of all, at most; default %(default)g",
    )  # fmt: skip


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--max-rate", action="store_true",
        help="search for the requests per second that --workers can take, not for workers",
    )  # fmt: skip
    search.add_argument(
        "--most-workers", type=arguments.count, default=64, metavar="N",
        help="largest fleet to try; default %(default)s",
    )  # fmt: skip
    search.add_argument(
        "--most-runs", type=arguments.count, default=500, metavar="N",
        help="replays to spend, of all policies and seeds; default %(default)s",
    )  # fmt: skip
    search.add_argument(
        "--rule", choices=("all", "interval"), default="all",
        help="all: every seed must keep the targets; interval: the bad end of the seeds' 95 %% "
        "interval; default all",
    )  # fmt: skip
    search.add_argument(
        "--results", type=Path, metavar="FILE", help="keep results here, go on from them"
    )


def add_sweep(parsers: Any) -> None:
    """`warmroute-sim sweep`."""
    parser = add_command(
        parsers,
        "sweep",
        "FILE [option]...",
        "many replays from one file: policies, parameters, fleets, loads, seeds",
        "Runs the grid or the random search that a YAML file describes, in parallel; what was "
        "run before is taken from the file of results, so an interrupted sweep goes on.",
        SWEEP_EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML (docs/simulator.md, Sweep)")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="default: FILE.results.jsonl, beside it"
    )
    _add_runs(parser)
    add_reports(
        parser, csv="a line per run", json="all figures", html="a page with Pareto pictures"
    )
    parser.add_argument(
        "--requests-csv", type=Path, metavar="FOLDER",
        help="write every request of each run to a file there, as `replay --csv` does; "
        f"{MAX_REQUEST_LINES:,} lines in all, as many for each run",
    )  # fmt: skip
    parser.set_defaults(command=from_module(STUDIES, "sweep"))


def add_compare(parsers: Any) -> None:
    """`warmroute-sim compare`."""
    parser = add_command(
        parsers,
        "compare",
        "RESULTS... --base RULE [option]...",
        "rules against one of them, seed by seed, from files of sweep results",
        "Reads what sweeps have kept and says of each workload, fleet and load: times, hits, good "
        "requests, collapsed seeds, and by which factor each rule is better or worse than the "
        "base on the same seeds; where several loads were run, which one each rule takes.",
        COMPARE_EXAMPLES,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="of `sweep`")
    parser.add_argument("--base", required=True, metavar="RULE", help="what others are divided by")
    parser.add_argument(
        "--policy", action="append", metavar="RULE", help="show these and the base; default: all"
    )
    add_reports(
        parser, json="all figures", html="a page with pictures", markdown="tables for a document"
    )
    parser.set_defaults(command=from_module(STUDIES, "compare"))


def add_study(parsers: Any) -> None:
    """`warmroute-sim study`."""
    parser = add_command(
        parsers,
        "study",
        "[--full|--table] [--only SWEEP]... [--policy SPEC]... [option]...",
        "the sweeps behind docs/notes/policy-study.md: run, resumed, compared",
        "Runs the sweeps of simulator/data/study with the rules and seeds of study.yaml, keeps "
        "every result, and writes the comparison. Interrupted, the same command goes on.",
        "example:\n  warmroute-sim study --only w4b --policy 'hybrid|bounded_load'\n",
    )
    add, which = parser.add_argument, parser.add_mutually_exclusive_group()
    which.add_argument(
        "--full", action="store_true", help="more seeds, loads, memories, traces; default: "
        "the first pass, the whole catalogue on three seeds",
    )  # fmt: skip
    which.add_argument(
        "--table", action="store_true", help="instead: every workload at 60 to 105 %% of "
        "saturation beside the leading published rules, each seed another draw of the traces; "
        "kept in the folder table of --out; for --base warmset",
    )  # fmt: skip
    add("--only", action="append", metavar="SWEEP", help="this one; repeat")
    add("--policy", action="append", metavar="SPEC", help="besides those of the list; repeat")
    add("--alone", action="store_true", help="those of --policy only")
    add("--quick", action="store_true", help="150 requests of two rules: that it works")
    add(
        "--resamples", type=arguments.at_most(MAX_DRAWS), metavar="N",
        help="N seeds of every sweep instead of those listed; of a trace each is another draw of "
        "its sessions; kept in the folder draws of --out",
    )  # fmt: skip
    add("--traces", type=Path, default=Path(), metavar="FOLDER", help="where trace files lie")
    add(
        "--out", type=Path, default=Path("build/study"), metavar="FOLDER",
        help="results and tables; default %(default)s",
    )  # fmt: skip
    add(
        "--base", default="lmetric", metavar="RULE",
        help="what others are divided by; default %(default)s",
    )  # fmt: skip
    add("--jobs", type=arguments.count, metavar="N", help="default: one a core")
    parser.set_defaults(command=from_module("simulator.cli.study", "study"))


def add_hits(parsers: Any) -> None:
    """`warmroute-sim hits`."""
    parser = add_command(
        parsers,
        "hits",
        "TRACE --kv-tokens T [--workers N] [option]...",
        "hit rates of routing rules over caches alone, without service times",
        "Takes requests in order; a prompt's blocks are cached as it arrives. Says what routing "
        "can do for the caches of a pool, in seconds; says nothing about latency.",
        "example:\n  warmroute-sim hits requests.jsonl --workers 8 --kv-tokens 300k\n",
    )
    add_source(parser)
    parser.add_argument(
        "--workers", type=arguments.count, default=WORKERS, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--kv-tokens", type=arguments.capacity, required=True, metavar="T",
        help="tokens that each worker's cache holds: 300k, 1M, inf",
    )  # fmt: skip
    parser.add_argument(
        "--rule", action="append", choices=ALL_RULES, metavar="RULE",
        help=f"of {', '.join(ALL_RULES)}; repeat for several; default: the first {len(RULES)}",
    )  # fmt: skip
    add_workload(parser, closed_loop=False)
    add_reports(parser, json="the rows")
    parser.set_defaults(command=from_module(STUDIES, "hits"))


def add_bound(parsers: Any) -> None:
    """`warmroute-sim bound`."""
    parser = add_command(
        parsers,
        "bound",
        "TRACE [--policy SPEC]... [--workers N] [--profile P] [option]...",
        "what no policy can beat on a trace, and where policies lose",
        "Lower bounds of latency and upper bounds of hits for TRACE on a pool, and "
        " for each policy its gap, regret and losses.",
        "example:\n  warmroute-sim bound requests.jsonl --policy hybrid\n" + known(),
    )
    add_source(parser)
    add_policies(parser, seeds="0; only one")
    parser.add_argument(
        "--no-waterfall", action="store_true", help="leave out the losses: a third of the time"
    )
    add_pool(parser)
    add_workload(parser, closed_loop=False)
    add_world(parser)
    add_reports(parser, json="all figures")
    parser.set_defaults(command=from_module(STUDIES, "bound"))


CAPACITY = "simulator.cli.capacity"
LINK_GBPS, LINK_SETUP_MS = 200.0, 1.0
MATCH_EXAMPLES = """\
examples:
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --ttft-ms 1000 --gpus 16
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --gpus 64 \\
      --profile qwen3-32b-h100-tp2 --profile qwen3-32b-h100-tp4
  warmroute-sim rate-match 'gen:shared?prefix=4384&suffix=16&output=1200' --cached none \\
      --tpot-ms 20 --prefill-profile deepseek-r1-gb200-ep4 \\
      --decode-profile deepseek-r1-gb200-ep32 --profile deepseek-r1-gb200-ep8

How it is computed, and when it pays: docs/disaggregation.md. What queues, bursts and caches make of
it: --simulate, or `replay` with --prefill-workers and --decode-workers.
"""
FRONT_EXAMPLES = """\
examples:
  warmroute-sim pareto requests.jsonl --ttft-ms 2000 --svg front.svg
  warmroute-sim pareto requests.jsonl --gpus 16 --profile qwen3-32b-h100-tp2 \\
      --profile qwen3-32b-h100-tp4
"""


def add_rate_match(parsers: Any) -> None:
    """`warmroute-sim rate-match`."""
    parser = add_command(
        parsers,
        "rate-match",
        "TRACE --tpot-ms MS [--ttft-ms MS] [--gpus N] [--profile P]... [option]...",
        "how many workers prefill and how many decode, for a log, GPUs and targets",
        "Computes from step times how many requests like those of TRACE a worker takes that "
        "prefills, one that decodes and one that does both, and which numbers of them take most "
        "on so many GPUs while both targets are kept; without --gpus, in which ratio they match. "
        "What of a prompt is cached counts: only the rest is computed.",
        MATCH_EXAMPLES + known(),
    )
    add_source(parser)
    targets = parser.add_argument_group("targets").add_argument
    targets(
        "--tpot-ms", type=arguments.positive, required=True, metavar="MS",
        help="mean time per token after the first, at most",
    )  # fmt: skip
    _add_capacity(parser, targets)
    parser.add_argument(
        "--simulate", action="store_true",
        help="replay TRACE on the best split and its neighbours, and on workers that do both, at "
        "95 %% of the rate that the arithmetic gives, or at --rate",
    )  # fmt: skip
    add_reports(parser, json="the mix, the targets, the pools with all their figures")
    parser.set_defaults(command=from_module(CAPACITY, "rate_match"))


def add_pareto(parsers: Any) -> None:
    """`warmroute-sim pareto`."""
    parser = add_command(
        parsers,
        "pareto",
        "TRACE [--ttft-ms MS] [--gpus N] [--profile P]... [--svg FILE] [option]...",
        "throughput per GPU against speed, workers of two roles and workers all alike",
        "Computes for many times per token which pool gives most tokens per GPU, once of workers "
        "that prefill or decode and once of workers that do both, keeps what nothing else beats in "
        "both, and prints for each point the command that shows it again.",
        FRONT_EXAMPLES + known(),
    )
    add_source(parser)
    targets = parser.add_argument_group("targets").add_argument
    _add_capacity(parser, targets)
    targets(
        "--points", type=arguments.count, default=24, metavar="N",
        help="times per token to try, from the shortest step on; default %(default)s",
    )  # fmt: skip
    add_reports(parser, svg="the picture", json="all points")
    parser.set_defaults(command=from_module(CAPACITY, "front"))


INSTANCES_EXAMPLES = """\
how to get FILE, and what to do with it:
  warmroute doctor http://gpu1:8000 --probe --measure resnet.json
  warmroute-sim instances resnet.json --rate 400 --p99-ms 80
  warmroute-sim instances resnet.json --log requests.jsonl --p99-ms 80 --device-gib 16 \\
      --instance-gib 4 --request-mib 100
without a measurement, for a model that takes 10 ms and 2 ms more for each request of a batch:
  warmroute-sim instances --base-s 0.010 --per-request-s 0.002 --max-batch 8 --rate 400 --p99-ms 80

what an answer means:
  An execution of b requests takes a + c x b. One instance, however well it batches, takes at most
  1/c requests a second; more instances take more only while the device is idle between
  executions. Busy instances batch by themselves: what arrives during an execution is the next
  batch. So first let batches grow to the knee, then add instances, and measure again beside them
  (several FILEs, each measured beside another number): instances on one device slow each other.
  "busy" near 100 % is no alarm where batches are not full: see "load" for that.

exit status: 1 where no number of instances that is allowed keeps the target
"""


def add_instances(parsers: Any) -> None:
    """`warmroute-sim instances`."""
    parser = add_command(
        parsers,
        "instances",
        "[FILE]... (--rate R | --log LOG) [--p99-ms MS] [--device-gib G --instance-gib G]...",
        "how many instances of a batching model (Triton's) a load needs",
        "Simulates a model's instances behind one queue, with times of batches as measured, for "
        "more and more instances until the target is kept with a reserve: mean batch, utilisation, "
        "queue and latency of each number, the least that is enough, with and without one that "
        "fails, the knee, the queue delay worth setting.",
        INSTANCES_EXAMPLES,
    )
    parser.add_argument(
        "measured", nargs="*", type=Path, metavar="FILE",
        help="times of batches by size, of `warmroute doctor URL --probe --measure FILE`; several "
        "of one model, where it was measured beside different numbers of instances",
    )  # fmt: skip
    times = parser.add_argument_group("times, instead of FILE").add_argument
    times("--base-s", type=arguments.not_negative, metavar="A", help="seconds of any execution")
    times(
        "--per-request-s", type=arguments.not_negative, metavar="C",
        help="seconds more for each request of its batch",
    )  # fmt: skip
    times(
        "--max-batch", type=arguments.at_most(MAX_BATCH), metavar="B",
        help="largest batch; default: as FILE says, else 8. Never beyond twice the largest one "
        "measured",
    )  # fmt: skip
    load = parser.add_argument_group("load").add_argument
    load("--rate", type=arguments.positive, metavar="R", help="requests per second, at the peak")
    load(
        "--log", metavar="LOG",
        help="a request log of the router (--request-log), or another trace: the 99th percentile "
        "of its minutes is the peak",
    )  # fmt: skip
    load(
        "--variability", type=arguments.not_negative, metavar="V",
        help="variance / mean^2 of the time between arrivals: 0 even, 1 Poisson, more for bursts; "
        "default: as the log's, else 1",
    )  # fmt: skip
    _add_instances_target(parser)
    add_reports(parser, json="the plan with all figures", html="a page with pictures")
    parser.set_defaults(command=from_module("simulator.cli.instances", "instances"))


def _add_instances_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("target").add_argument
    for name, what in (("mean", "mean"), ("p50", "median"), ("p99", "99th percentile of the")):
        target(
            f"--{name}-ms", type=arguments.positive, metavar="MS",
            help=f"{what} time from arrival to answer, at most",
        )  # fmt: skip
    target(
        "--headroom", type=arguments.share, default=HEADROOM, metavar="SHARE",
        help="of time (the target holds at the rate / (1 - SHARE)) and memory that stays free; "
        "default %(default)g",
    )  # fmt: skip
    target(
        "--most-instances", type=arguments.at_most(MAX_INSTANCES), default=MOST_INSTANCES,
        metavar="N", help="to try; default %(default)s",
    )  # fmt: skip
    memory = parser.add_argument_group("memory: how many instances may there be").add_argument
    memory("--device-gib", type=arguments.positive, metavar="G", help="memory of a device")
    memory(
        "--instance-gib", type=arguments.positive, metavar="G",
        help="what an instance takes before its first request: its weights and its runtime",
    )  # fmt: skip
    memory(
        "--request-mib", type=arguments.not_negative, default=0.0, metavar="M",
        help="what each request of a full batch takes more; default 0",
    )  # fmt: skip
    memory("--devices", type=arguments.count, default=1, metavar="N", help="default 1")


def _add_capacity(parser: argparse.ArgumentParser, targets: Any) -> None:
    targets(
        "--ttft-ms", type=arguments.positive, metavar="MS",
        help="mean time to first token, at most; default: any",
    )  # fmt: skip
    targets(
        "--every-step",
        action="store_true",
        help="the time per token is that of every step, not of the mean: tails count",
    )
    workers = parser.add_argument_group("workers").add_argument
    workers("--gpus", type=arguments.count, metavar="N", help="of all workers; default: any ratio")
    for name, what in (
        ("profile", f"may do any of it; default {PROFILE}"),
        ("prefill-profile", "may prefill, instead of --profile's"),
        ("decode-profile", "may decode, instead of --profile's"),
    ):
        workers(
            f"--{name}", action="append", metavar="P",
            help=f"workers that {what}; repeat, and the best is taken",
        )  # fmt: skip
    workers(
        "--kv-tokens", type=arguments.count, metavar="T",
        help="KV tokens a worker holds, as 300000 or 300k; default: the profile's",
    )  # fmt: skip
    workers(
        "--link-gbps", type=arguments.positive, default=LINK_GBPS, metavar="G",
        help="Gbit/s by which each GPU of a worker sends and receives KV; default %(default)g",
    )  # fmt: skip
    workers(
        "--link-setup-ms", type=arguments.not_negative, default=LINK_SETUP_MS, metavar="MS",
        help="of each transfer; default %(default)g",
    )  # fmt: skip
    cached = parser.add_argument_group("what of a prompt is cached").add_argument
    cached(
        "--cached", choices=("log", "caches", "none"),
        help="log: as the workers reported; caches: as --caches workers would find it; none: "
        "nothing. Default: log where TRACE is a request log that knows, else caches",
    )  # fmt: skip
    cached(
        "--caches", type=arguments.count, metavar="N",
        help="workers that prefill, each with its cache; default: as half of --gpus has, or 4",
    )  # fmt: skip
    add_workload(parser, closed_loop=False)
    usual = {"link_gbps": LINK_GBPS, "link_setup_ms": LINK_SETUP_MS, "format": "auto", "skip": 0.0}
    parser.set_defaults(defaults=usual)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    runs = parser.add_argument_group("where it runs")
    runs.add_argument(
        "--jobs", type=arguments.count, metavar="N", help="processes; default: one for each core"
    )
    runs.add_argument("--dask", metavar="tcp://HOST:PORT", help="run on this Dask cluster instead")


TRUTHS = "simulator.cli.truth"
VALIDATED = ("round_robin", "hybrid", "warmset")


def add_validate(parsers: Any) -> None:
    """`warmroute-sim validate`."""
    parser = add_command(
        parsers,
        "validate",
        "TRACE [--policy SPEC]... [--workers N] [--seconds S] [option]...",
        "the same trace live and simulated, figure by figure",
        "Starts timed workers and a router for each policy, puts TRACE on them in real time, "
        "replays it, and prints what differs and why. Ends with 0 when hit rates are within 2 "
        "points, mean TTFT within 15 % and the policies in the same order in both worlds.",
        "example:\n  warmroute-sim validate requests.jsonl --seconds 100\n",
    )
    add_source(parser)
    parser.add_argument(
        "--policy", action="append", metavar="SPEC",
        help=f"repeat to compare; default: {', '.join(VALIDATED)}",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=arguments.count, default=WORKERS, metavar="N", help="default %(default)s"
    )
    parser.add_argument("--profile", default=PROFILE, metavar="P", help="default %(default)s")
    parser.add_argument(
        "--kv-tokens", type=arguments.count, metavar="T",
        help="KV tokens a worker holds; default: the profile's",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=arguments.count, default=64, metavar="B",
        help="tokens of a KV block; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--live-speed", type=arguments.positive, default=1.0, metavar="X",
        help="run the live side X times as fast, below 1 on a slow machine; default 1",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("build/validate"), metavar="DIR",
        help="for logs of the programs; default %(default)s",
    )  # fmt: skip
    add_workload(parser, closed_loop=False)
    add_reports(parser, json="all figures")
    parser.set_defaults(command=from_module(TRUTHS, "validate"))


def add_calibrate(parsers: Any) -> None:
    """`warmroute-sim calibrate`."""
    parser = add_command(
        parsers,
        "calibrate",
        "URL|FILE [--out FILE.json] [option]...",
        "fit step times to a live engine, or to its step log",
        "Measures an OpenAI-compatible engine that nobody else uses meanwhile (about a minute), "
        "or reads a step log (`warmroute-engine --step-log`), fits the constants of the step-time "
        "model, prints the errors, and writes a profile for --profile and --timed.",
        "examples:\n  warmroute-sim calibrate http://127.0.0.1:8000 --out mine.json\n"
        "  warmroute-sim calibrate steps.csv --kv-tokens 269k --out mine.json\n",
    )
    parser.add_argument("source", metavar="URL|FILE", help="http://HOST:PORT, or a step log (CSV)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the profile")
    parser.add_argument("--name", metavar="NAME", help="of the profile; default: the file's")
    parser.add_argument(
        "--kv-tokens", type=arguments.count, metavar="T",
        help="KV tokens the engine holds; default: what its /metrics say",
    )  # fmt: skip
    live = parser.add_argument_group("of a live engine")
    live.add_argument("--model", metavar="M", help="default: the first that the endpoint lists")
    live.add_argument(
        "--max-num-tokens", type=arguments.count, default=8192, metavar="N",
        help="prefill tokens of a step at most, as the engine was started with; "
        "default %(default)s",
    )  # fmt: skip
    live.add_argument(
        "--max-prompt-tokens", type=arguments.count, default=16_384, metavar="N",
        help="longest prompt to measure; default %(default)s",
    )  # fmt: skip
    live.add_argument(
        "--vocabulary", type=arguments.count, default=10_000, metavar="N",
        help="token ids to make prompts of are below it; default %(default)s",
    )  # fmt: skip
    live.add_argument(
        "--seed", type=arguments.whole, default=0, metavar="N", help="default %(default)s"
    )
    parser.set_defaults(command=from_module(TRUTHS, "calibrate"))


def add_check_facts(parsers: Any) -> None:
    """`warmroute-sim check-facts`."""
    parser = add_command(
        parsers,
        "check-facts",
        "FILE",
        "play a router's recording of facts: does this core decide the same?",
        "Plays what a router with `record_facts` wrote to a fresh decision core and prints every "
        "action that differs. Ends with 0 when all are the same.",
        "example:\n  warmroute serve --record-facts facts.bin ...\n"
        "  warmroute-sim check-facts facts.bin\n",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording")
    parser.set_defaults(command=from_module("simulator.cli.study", "check_facts"))
