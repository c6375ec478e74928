"""The program `warmroute-sim`: replays on virtual time, load on real programs, and comparisons."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop
from rich.console import Console

from router.config.hints import HintingParser
from router.config.paths import near_path
from router.core.placement.guard import PolicyFaultError
from router.record.facts import RecordingError
from simulator.calibrate.fit import ObservationError
from simulator.cli import usage
from simulator.cli.flags import Command, options_of
from simulator.limits.report import BoundError
from simulator.live.load import WorkloadError
from simulator.live.processes import StartError
from simulator.live.scrape import ScrapeError
from simulator.replay.setup import ReplayError
from simulator.runs.task import SweepError
from simulator.step_times.tables import TableError
from simulator.traces.job import TraceError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

LOG_COLUMNS = 160
AS_WRITTEN = argparse.RawDescriptionHelpFormatter
# Libraries that are imported only where they are used, with the command that installs each.
OF_EXTRAS = {
    "scipy": "pip install 'scipy>=1.17' (or '.[sim]' in the checkout)",
    "aiconfigurator_core": "pip install 'aiconfigurator-core==0.12.0' (or '.[aic]' in the "
    "checkout)",
}
REMOVED = {
    "learn": "was removed, and so was the policy `learned`, which beat LMetric nowhere; `sweep` "
    "compares policies and their parameters",
    "sample": "was removed; a trace may be made up as well: gen:sessions, gen:agentic and others",
}
WRONG_INPUT = (
    TraceError, WorkloadError, ReplayError, SweepError, BoundError, ObservationError,
    RecordingError, TableError, usage.UsageError,
)  # fmt: skip

# The module of each command, and its line in the help.
COMMANDS = {
    "replay": ("replay", "replay a trace with several policies on virtual time"),
    "advise": ("advise", "recommend a change of the pool from the router's request log"),
    "plan": ("plan", "find the smallest fleet and the policy that keep latency targets"),
    "rate-match": ("capacity",
        "compute how many prefill and decode workers a log and targets need"),
    "pareto": ("capacity",
        "compute throughput per GPU against speed per user, with and without roles"),
    "instances": ("instances", "compute how many instances of a Triton model a load needs"),
    "sweep": ("sweeps", "run many replays from one file: policies, fleets, loads, seeds"),
    "compare": ("sweeps", "compare policies with one of them, seed by seed, from sweep results"),
    "study": ("sweeps", "run, resume and compare the sweeps behind docs/notes/policy-study.md"),
    "hits": ("bounds", "compute hit rates of routing rules from caches alone, without latency"),
    "bound": ("bounds", "compute limits that no policy can beat, and where policies lose"),
    "sources": ("replay", "list the formats and generators of traces, with their options"),
    "validate": ("truth", "compare the same trace live and simulated, figure by figure"),
    "calibrate": ("truth", "fit step times to a live engine, or to its step log"),
    "profiles": ("profiles",
        "list the built-in step times, and compare them with measured kernels"),
    "profile": ("step_times", "derive step times of a model on a GPU from its config.json alone"),
    "check-facts": ("facts", "play a router's recording, and print decisions that differ"),
    "demo": ("live",
        "compare policies on virtual time, then show a hot spot and its cure live"),
    "load": ("live", "send a workload to a live OpenAI-compatible endpoint"),
    "stack": ("live",
        "start a router and timed workers; run until Ctrl-C, or send them a trace"),
}  # fmt: skip
ALIASES = {"run-stack": "stack"}

EPILOG = """\
examples:
  # replays on virtual time (docs/simulator.md)
  warmroute-sim replay requests.jsonl --workers 8
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --ttft-ms 1000 --gpus 16
  warmroute-sim instances measured.json --rate 400 --p99-ms 80
  warmroute-sim profile Qwen3-32B/config.json --gpu h100 --tp 2 --out mine-tp2.json
  warmroute-sim sweep sweep.yaml --html sweep.html
  # load on real programs
  warmroute-sim demo
  warmroute-sim load http://127.0.0.1:8080 --trace conversation.jsonl.gz --speed 4
  warmroute-sim load http://127.0.0.1:8080 --shared-prefix 6000+700 --requests 500 --rate 60
  warmroute-sim stack --policy hybrid
  # comparisons of the simulator with real programs
  warmroute-sim validate conversation.jsonl.gz --seconds 100 --spread 3
  warmroute-sim calibrate http://127.0.0.1:8000 --out mine.json

exit status: 0: success; 1: a failure, or a negative answer; 2: wrong usage or input;
130: interrupted. Each command has a --help of its own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 means that it did what it should, 1 that it failed, 2 that usage or input was wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in REMOVED:
        print(f"warmroute-sim: {given[0]}: {REMOVED[given[0]]}", file=sys.stderr)
        return EXIT_USAGE
    command, options = read_arguments(given)
    # Output to a file or pipe is wide, so that lines are not wrapped.
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    try:
        sound = _run(command, options, console)
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
        if error.__cause__ is not None:  # the policy's author needs the traceback
            traceback.print_exception(error.__cause__)
        print(f"warmroute-sim: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("warmroute-sim: stopped; everything it started has ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the program that read our output has ended
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:  # a full disk, a folder that is gone
        print(f"warmroute-sim: {error.strerror or error}{_named(error)}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK if sound else EXIT_FAILED


def _named(error: OSError) -> str:
    if not error.filename:
        return ""
    near = near_path(Path(error.filename)) if isinstance(error, FileNotFoundError) else ""
    return f": {error.filename}{near}"


def _run(command: Command, options: Any, console: Console) -> bool:
    with _interrupted_by_signals():
        found = command.run(options, console)
        if isinstance(found, bool):
            return found
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_terminated(found))


async def _until_terminated(work: Coroutine[Any, Any, bool]) -> bool:
    """Run `work`, and cancel it on Ctrl-C, SIGTERM or SIGHUP, so that it cleans up."""
    task = asyncio.ensure_future(work)
    for number in _endings():
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that files are left
    whole.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _endings()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _endings() -> list[signal.Signals]:
    """Return the signals that end this program.

    A shell without job control makes background programs ignore SIGINT, and Python keeps that; this
    program ends by SIGINT all the same. Only a SIGHUP that is ignored (by nohup) stays ignored.
    """
    endings = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        endings.append(signal.SIGHUP)
    return endings


def read_arguments(given: Sequence[str]) -> tuple[Command, Any]:
    """Return the command that is asked for, and its options. Only its module is imported."""
    parser = HintingParser(
        prog="warmroute-sim",
        description="Replays traces on virtual time, sends load to programs, and compares both.",
        epilog=EPILOG,
        formatter_class=AS_WRITTEN,
    )
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        aliases = [alias for alias, of in ALIASES.items() if of == name]
        one = parsers.add_parser(name, help=about, aliases=aliases, formatter_class=AS_WRITTEN)
        if not {name, *aliases}.isdisjoint(given):
            commands = import_module(f"simulator.cli.{module}")
            command: Command = getattr(commands, name.replace("-", "_"))
            command.fill(one)
            one.set_defaults(command=command)
    read = vars(parser.parse_args(given))
    command = read["command"]
    return command, options_of(command.options, read)
