"""`warmroute-sim`: replays on virtual time, load on real programs, and what is learned of both."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvloop
from rich.console import Console

from router.core.placement.guard import PolicyFaultError
from router.record.facts import RecordingError
from simulator.calibrate.fit import ObservationError
from simulator.cli import live_options as cli_live
from simulator.cli import replay_options as cli_replay
from simulator.cli import study_options as cli_study
from simulator.cli import usage
from simulator.cli.usage import Command
from simulator.limits.report import BoundError
from simulator.live.load import WorkloadError
from simulator.live.processes import StartError
from simulator.live.scrape import ScrapeError
from simulator.replay.setup import ReplayError
from simulator.runs.task import SweepError
from simulator.traces.job import TraceError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

LOG_COLUMNS = 160
# Imported where they are used: the library, and what installs it.
OF_EXTRAS = {"scipy": "pip install 'scipy>=1.17' (or '.[sim]' in the checkout)"}
REMOVED = {
    "learn": "was removed, and so was the policy `learned`, which beat LMetric nowhere; `sweep` "
    "compares policies and their parameters",
    "sample": "was removed; a trace may be made up as well: gen:sessions, gen:agentic and others",
}
WRONG_INPUT = (
    TraceError, WorkloadError, ReplayError, SweepError, BoundError, ObservationError,
    RecordingError, usage.UsageError,
)  # fmt: skip

EPILOG = """\
examples: on virtual time (docs/simulator.md)
  warmroute-sim replay requests.jsonl --workers 8
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --ttft-ms 1000 --gpus 16
  warmroute-sim instances measured.json --rate 400 --p99-ms 80
  warmroute-sim sweep sweep.yaml --html sweep.html
examples: on real programs
  warmroute-sim demo
  warmroute-sim load http://127.0.0.1:8080 --trace conversation.jsonl.gz --speed 4
  warmroute-sim load http://127.0.0.1:8080 --shared-prefix 6000+700 --requests 500 --rate 60
  warmroute-sim stack --policy hybrid
examples: both side by side
  warmroute-sim validate conversation.jsonl.gz --seconds 100 --spread 3
  warmroute-sim calibrate http://127.0.0.1:8000 --out mine.json

exit status: 0 it did what it should; 1 it failed, or the answer is no; 2 wrong usage or input;
130 interrupted. Each command has a --help of its own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 = it did what it should, 1 = it failed, 2 = wrong usage or input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in REMOVED:
        print(f"warmroute-sim: {given[0]}: {REMOVED[given[0]]}", file=sys.stderr)
        return EXIT_USAGE
    options = build_parser().parse_args(given)
    # Where nobody watches, lines are for a log: wide enough to stay lines.
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    try:
        sound = _run(options.command(), options, console)
    except WRONG_INPUT as error:
        print(f"warmroute-sim: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in OF_EXTRAS:
            raise
        print(f"warmroute-sim: {library} is not installed: {OF_EXTRAS[library]}", file=sys.stderr)
        return EXIT_FAILED
    except (StartError, ScrapeError) as error:
        print(f"warmroute-sim: {error}", file=sys.stderr)
        return EXIT_FAILED
    except PolicyFaultError as error:
        if error.__cause__ is not None:  # its author wants to see where
            traceback.print_exception(error.__cause__)
        print(f"warmroute-sim: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("warmroute-sim: stopped; everything it started has ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:  # a full disk, a folder that is gone
        print(f"warmroute-sim: {error.strerror or error}{_named(error)}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK if sound else EXIT_FAILED


def _named(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""


def _run(command: Command, options: argparse.Namespace, console: Console) -> bool:
    with _interrupted_by_signals():
        found = command(options, console)
        if isinstance(found, bool):
            return found
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_terminated(found))


async def _until_terminated(work: Coroutine[Any, Any, bool]) -> bool:
    """Runs `work`, cancelled by Ctrl-C, SIGTERM and SIGHUP, so that it cleans up."""
    task = asyncio.ensure_future(work)
    for number in _endings():
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that files are left whole."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _endings()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _endings() -> list[signal.Signals]:
    """Signals that end us.

    A shell without job control has what it starts in the background ignore SIGINT, and Python
    leaves that so: whatever was inherited, ours end it. Only nohup's wish, no SIGHUP, is kept.
    """
    endings = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        endings.append(signal.SIGHUP)
    return endings


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="warmroute-sim",
        description="Replays on virtual time, load on real programs, and what is learned of both.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands_of = parser.add_subparsers(required=True, metavar="COMMAND")
    cli_replay.add_replay(commands_of)
    cli_study.add_advise(commands_of)
    cli_study.add_plan(commands_of)
    cli_study.add_rate_match(commands_of)
    cli_study.add_pareto(commands_of)
    cli_study.add_instances(commands_of)
    cli_study.add_sweep(commands_of)
    cli_study.add_compare(commands_of)
    cli_study.add_study(commands_of)
    cli_study.add_hits(commands_of)
    cli_study.add_bound(commands_of)
    cli_replay.add_sources(commands_of)
    cli_study.add_validate(commands_of)
    cli_study.add_calibrate(commands_of)
    cli_study.add_check_facts(commands_of)
    cli_live.add_demo(commands_of)
    cli_live.add_load(commands_of)
    cli_live.add_stack(commands_of)
    return parser
