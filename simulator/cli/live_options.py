"""The options of the commands that run real programs: `demo`, `load`, `stack`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simulator.cli import usage
from simulator.cli.usage import add_command, count, from_module, port, positive, whole

COMMANDS = "simulator.cli.live"


def add_demo(parsers: Any) -> None:
    """`warmroute-sim demo`."""
    demo = add_command(
        parsers,
        "demo",
        "[option]...",
        "compare policies on virtual time, show a hot spot and its cure live; ends by itself",
        "Replays three workloads for several policies, then starts timed workers and a router as "
        "processes on loopback and puts the first workload on them. Prints a table, writes "
        "report.html and report.json. Takes about a minute and a half, never more than four; on a "
        "busy machine it does less and says so. Ends with 0 when no request was lost and every "
        "load counter came back to zero.",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("build/demo"), metavar="DIR",
        help="reports and logs; default %(default)s",
    )  # fmt: skip
    demo.add_argument("--quick", action="store_true", help="live, as little as a busy machine does")
    demo.add_argument("--trace", type=Path, metavar="FILE", help="conversation trace to use")
    demo.set_defaults(command=from_module(COMMANDS, "demo"))


def add_load(parsers: Any) -> None:
    """`warmroute-sim load`."""
    load = add_command(
        parsers,
        "load",
        "URL (--trace FILE | --shared-prefix SYSTEM+QUESTION) [option]...",
        "put a workload on a live OpenAI-compatible endpoint",
        "Sends streamed completions of token-id prompts to URL/v1/completions, open "
        "loop at the workload's times (or closed loop with --concurrency), and prints what came "
        "back. Ends with 0 when no request was lost.",
    )
    add = load.add_argument
    add("url", help="base address, as http://127.0.0.1:8080; /v1 is added")
    source = load.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace, plain or packed")
    source.add_argument(
        "--shared-prefix", metavar="SYSTEM+QUESTION", help="tokens shared and own, as 6000+700"
    )
    add("--model", metavar="M", help="default: the first that the endpoint lists")
    add("--speed", type=positive, metavar="X", help="arrivals X times as fast")
    add("--concurrency", type=count, metavar="N", help="closed loop with N requests under way")
    _add_trace_options(load)
    _add_shared_prefix_options(load)
    add(
        "--vocabulary", type=count, default=10_000, metavar="N",
        help="token ids to make prompts of are below it; default %(default)s",
    )  # fmt: skip
    add("--timeout", type=positive, default=600.0, metavar="S", help="per request; default 600")
    add("--json", type=Path, metavar="FILE", help="write results and rows")
    add("--html", type=Path, metavar="FILE", help="write the page")
    load.set_defaults(command=from_module(COMMANDS, "load"))


def _add_shared_prefix_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--groups", type=count, metavar="N", help=f"shared prompts; default {usage.GROUPS}")
    add("--rate", type=positive, metavar="R", help=f"per second; default {usage.RATE_PER_S:g}")
    add("--output-tokens", type=count, metavar="N", help=f"default {usage.OUTPUT_TOKENS}")
    add("--seed", type=whole, help=f"default {usage.SEED}")


def add_stack(parsers: Any) -> None:
    """`warmroute-sim stack`."""
    stack = add_command(
        parsers,
        "stack",
        "[--trace FILE] [option]...",
        "start a router and timed workers; stay until Ctrl-C, or put a trace on them",
        "Starts timed workers and a router in front of them on loopback. Without "
        "--trace it prints a curl line that works and stays until Ctrl-C; with --trace it puts "
        "the trace on them, writes report.html and report.json to --out, and ends. The router "
        "reads its environment: WARMROUTE_REQUEST_LOG=FILE has it log requests, for `replay`.",
        aliases=["run-stack"],
    )
    stack.add_argument("--workers", type=count, default=4, metavar="N", help="default %(default)s")
    stack.add_argument("--policy", default="warmset", metavar="SPEC", help="default %(default)s")
    stack.add_argument(
        "--profile", default="llama-3.1-8b-h100", metavar="P", help="default %(default)s"
    )
    stack.add_argument(
        "--model", type=Path, metavar="DIR",
        help="serve the model in DIR with the real engine, in place of --profile",
    )  # fmt: skip
    stack.add_argument(
        "--port",
        type=port,
        default=8080,
        metavar="PORT",
        help="of the router; default %(default)s, 0: any free",
    )
    stack.add_argument(
        "--admin-port", type=port, default=8081, metavar="PORT",
        help="of the router's admin pages; default %(default)s, 0: any free",
    )  # fmt: skip
    stack.add_argument(
        "--speed", type=positive, default=1.0, metavar="X",
        help="run workers, and the trace's arrivals, X times as fast; default 1",
    )  # fmt: skip
    stack.add_argument(
        "--out", type=Path, default=Path("build/stack"), metavar="DIR",
        help="logs and report; default %(default)s",
    )  # fmt: skip
    stack.add_argument("--trace", type=Path, metavar="FILE", help="a trace, plain or packed")
    _add_trace_options(stack)
    stack.set_defaults(command=from_module(COMMANDS, "stack"))


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=count, metavar="N", help="at most so many")
    parser.add_argument("--seconds", type=positive, metavar="S", help="of the trace's start only")
    parser.add_argument(
        "--spread", type=positive, metavar="S",
        help="spread requests of one timestamp over S seconds (Mooncake: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--block-tokens", type=count, metavar="N",
        help="prompt tokens that an id stands for; default: as the format says, Mooncake's "
        f"{usage.BLOCK_TOKENS}",
    )  # fmt: skip
