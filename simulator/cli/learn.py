"""The command `learn` and its options."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from simulator.cli import usage as arguments
from simulator.cli.usage import add_command, from_module

EXAMPLES = """\
example of FILE: what is learned from, and what the result is shown on
  train:
    - name: chats
      workload: {source: requests.jsonl, seconds: 1800, requests: 1000}
      fleet: {profile: qwen3-32b-h100-tp2, count: 8}
      seeds: [1, 2]
  held_out:
    - name: chats
      workload: {source: requests.jsonl, skip_s: 1800, requests: 1000}
      fleet: {profile: qwen3-32b-h100-tp2, count: 8}
      seeds: [11]

examples:
  warmroute-sim learn mine.yaml --generations 40 --out mine.json
  warmroute-sim replay requests.jsonl --skip 1800 --policy lmetric \\
      --policy "$(jq -r .policy mine.json)"

An interrupted run goes on where it was when it is started again with the same options; with more
--generations it goes further.
"""


def add_learn(parsers: Any) -> None:
    """`warmroute-sim learn`."""
    parser = add_command(
        parsers,
        "learn",
        "[FILE] --out FILE [option]...",
        "coefficients of the policy `learned`, searched for in replays",
        "Searches by CMA-ES for the 23 coefficients with which the policy `learned` has the lowest "
        "latency in the replays of FILE, beginning as LMetric; then replays what was held out. "
        "The score is the mean over lessons of ln(TTFT / LMetric's) + ln(end-to-end / LMetric's), "
        "a request that was turned away or lost counting as 600 s of both.",
        EXAMPLES,
    )
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE",
        help="YAML; default: first halves of public traces, and synthetic sessions",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what was found")
    parser.add_argument(
        "--traces", type=Path, default=Path(), metavar="FOLDER",
        help="where the files are that FILE names; default: this folder",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=Path, metavar="FILE",
        help="what has been done, to go on from; default: the one of --out, .state.jsonl",
    )  # fmt: skip
    group = parser.add_argument_group("search").add_argument
    group(
        "--generations", type=arguments.count, default=20, metavar="N", help="default %(default)s"
    )
    group(
        "--population", type=arguments.count, metavar="N",
        help="coefficients tried in a generation; default 13",
    )  # fmt: skip
    group(
        "--sigma", type=arguments.positive, default=0.1, metavar="S",
        help="how far the first generation looks; default %(default)g",
    )  # fmt: skip
    group("--seed", type=arguments.whole, default=1, metavar="N", help="default %(default)s")
    group("--jobs", type=arguments.count, metavar="N", help="processes; default: one per core")
    parser.set_defaults(command=from_module("simulator.cli.learn", "learn"))


def learn(options: argparse.Namespace, console: Console) -> bool:
    """Searches."""
    # What the search itself needs is imported only where it runs.
    from simulator.runs.learn import HALVES, LearnCommand, run_learn

    return run_learn(
        LearnCommand(
            line=shlex.join(["warmroute-sim", *sys.argv[1:]]),
            out=options.out,
            lessons=options.file or HALVES,
            traces=options.traces,
            state=options.state,
            generations=options.generations,
            population=options.population,
            sigma=options.sigma,
            seed=options.seed,
            jobs=options.jobs,
        ),
        console,
    )
