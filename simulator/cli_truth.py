"""The command lines that hold model to reality: `validate`, `calibrate`, `check-facts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator import arguments
from simulator.cli_command import add_command, from_module
from simulator.cli_replay import add_reports, add_source, add_workload
from simulator.setup_options import PROFILE, WORKERS

TRUTHS = "simulator.truth_commands"
VALIDATED = ("round_robin", "hybrid")


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
    parser.set_defaults(command=from_module("simulator.study_commands", "check_facts"))
