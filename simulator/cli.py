"""`warmroute-sim`: the demo, load on a live endpoint, a stack to try things on, the sample."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from simulator import commands, usage
from simulator.processes import StartError
from simulator.scrape import ScrapeError
from simulator.traces.errors import TraceError
from simulator.workload import WorkloadError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

LOG_COLUMNS = 160

Command = Callable[[argparse.Namespace, Console], Coroutine[Any, Any, bool]]

EPILOG = """\
examples:
  warmroute-sim demo
  warmroute-sim load http://127.0.0.1:8080 --trace conversation.jsonl.gz --speed 4
  warmroute-sim load http://127.0.0.1:8080 --shared-prefix 6000+700 --requests 500 --rate 60
  warmroute-sim load http://127.0.0.1:8080 --shared-prefix 2048+128 --groups 64 --concurrency 32
  warmroute-sim stack --policy hybrid
  warmroute-sim stack --policy round_robin --trace conversation.jsonl.gz --speed 4
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 = it did what it should, 1 = it failed, 2 = wrong usage or input."""
    options = build_parser().parse_args(arguments)
    # Where nobody watches, lines are for a log: wide enough to stay lines.
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    command: Command = options.command
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sound = runner.run(_until_terminated(command(options, console)))
    except (TraceError, WorkloadError, usage.UsageError) as error:
        print(f"warmroute-sim: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (StartError, ScrapeError) as error:
        print(f"warmroute-sim: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("warmroute-sim: stopped; everything it started has ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK if sound else EXIT_FAILED


async def _until_terminated(work: Coroutine[Any, Any, bool]) -> bool:
    """Runs `work`, cancelled by Ctrl-C, SIGTERM and SIGHUP, so that it cleans up.

    A shell without job control has what it starts in the background ignore SIGINT, and Python
    leaves that so: whatever was inherited, ours end it. Only nohup's wish, no SIGHUP, is kept.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    endings = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        endings.append(signal.SIGHUP)
    for number in endings:
        loop.add_signal_handler(number, task.cancel)
    return await task


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="warmroute-sim",
        description="Workloads, load generation and reports for warmroute.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands_of = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands_of)
    _add_load(commands_of)
    _add_stack(commands_of)
    _add_sample(commands_of)
    return parser


def _add_demo(parsers: Any) -> None:
    demo = parsers.add_parser(
        "demo",
        help="show the hot spot and its cure on timed workers; ends by itself",
        description="Starts timed workers and a router as processes on loopback, runs two "
        "workloads for several policies, prints a table, writes report.html and report.json. "
        "Ends with 0 when no request was lost and every load counter came back to zero.",
    )
    demo.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR")
    demo.add_argument("--workers", type=_count, default=8, metavar="N", help="default %(default)s")
    demo.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X",
        help="run workers and arrivals X times as fast; below 1 on a slow machine",
    )  # fmt: skip
    demo.add_argument(
        "--quick", action="store_true", help="a fifth of the requests: that it works, not how well"
    )
    demo.add_argument("--trace", type=Path, metavar="FILE", help="conversation trace to use")
    demo.set_defaults(command=commands.demo)


def _add_load(parsers: Any) -> None:
    load = parsers.add_parser(
        "load",
        help="put a workload on a live OpenAI-compatible endpoint",
        description="Sends streamed completions of token-id prompts to URL/v1/completions, open "
        "loop at the workload's times (or closed loop with --concurrency), and prints what came "
        "back. Ends with 0 when no request was lost.",
    )
    load.add_argument("url", help="base address, as http://127.0.0.1:8080; /v1 is added")
    source = load.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace, plain or packed")
    source.add_argument(
        "--shared-prefix", metavar="SYSTEM+QUESTION", help="tokens shared and own, as 6000+700"
    )
    load.add_argument("--model", help="default: the first that the endpoint lists")
    load.add_argument("--speed", type=_positive, metavar="X", help="arrivals X times as fast")
    load.add_argument(
        "--concurrency", type=_count, metavar="N", help="closed loop with N requests under way"
    )
    _add_trace_options(load)
    _add_shared_prefix_options(load)
    load.add_argument("--vocabulary", type=_count, default=10_000, metavar="N")
    load.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="per request")
    load.add_argument("--json", type=Path, metavar="FILE", help="write results and rows")
    load.add_argument("--html", type=Path, metavar="FILE", help="write the page")
    load.set_defaults(command=commands.load)


def _add_shared_prefix_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--groups", type=_count, metavar="N", help=f"shared prompts; default {usage.GROUPS}"
    )
    parser.add_argument(
        "--rate", type=_positive, metavar="R", help=f"per second; default {usage.RATE_PER_S:g}"
    )
    parser.add_argument(
        "--output-tokens", type=_count, metavar="N", help=f"default {usage.OUTPUT_TOKENS}"
    )
    parser.add_argument("--seed", type=int, help=f"default {usage.SEED}")


def _add_stack(parsers: Any) -> None:
    stack = parsers.add_parser(
        "stack",
        aliases=["run-stack"],
        help="start a router and timed workers; stay until Ctrl-C, or put a trace on them",
        description="Starts timed workers and a router in front of them on loopback. Without "
        "--trace it prints a curl line that works and stays until Ctrl-C; with --trace it puts "
        "the trace on them, writes report.html and report.json to --out, and ends.",
    )
    stack.add_argument("--workers", type=_count, default=4, metavar="N", help="default %(default)s")
    stack.add_argument("--policy", default="hybrid", help="default %(default)s")
    stack.add_argument("--profile", default="llama-3.1-8b-h100", help="default %(default)s")
    stack.add_argument(
        "--port", type=_port, default=8080, help="of the router; default %(default)s, 0: any free"
    )
    stack.add_argument(
        "--admin-port", type=_port, default=8081, metavar="PORT",
        help="of the router's admin pages; default %(default)s, 0: any free",
    )  # fmt: skip
    stack.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X",
        help="run workers, and the trace's arrivals, X times as fast",
    )  # fmt: skip
    stack.add_argument(
        "--out", type=Path, default=Path("build/stack"), metavar="DIR", help="logs and report"
    )
    stack.add_argument("--trace", type=Path, metavar="FILE", help="a trace, plain or packed")
    _add_trace_options(stack)
    stack.set_defaults(command=commands.stack)


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=_count, metavar="N", help="at most so many")
    parser.add_argument("--seconds", type=_positive, metavar="S", help="of the trace's start only")
    parser.add_argument(
        "--spread", type=_positive, metavar="S",
        help="spread requests of one timestamp over S seconds (Mooncake: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--block-tokens", type=_count, metavar="N",
        help="prompt tokens that an id stands for; default: as the format says, Mooncake's "
        f"{usage.BLOCK_TOKENS}",
    )  # fmt: skip


def _add_sample(parsers: Any) -> None:
    sample = parsers.add_parser(
        "sample",
        help="write the small conversation sample that ships with the project",
        description="Generates chat sessions with growing prompts in the trace schema. Without "
        "options it writes, byte for byte, simulator/data/conversation_sample.jsonl.gz.",
    )
    sample.add_argument("--out", type=Path, metavar="FILE")
    sample.add_argument("--seconds", type=_positive, default=300.0, metavar="S")
    sample.add_argument("--seed", type=int, default=1)
    sample.set_defaults(command=commands.sample)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to 65535")
    return value
