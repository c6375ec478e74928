"""`warmroute-sim`: replays on virtual time, load on real programs, and what is learned of both."""

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
# Imported where they are used: the library, and what installs it.
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

# The module of each command, and what it is for.
COMMANDS = {
    "replay": ("replay", "what each policy would have given for a trace, on virtual time"),
    "advise": ("advise", "what to change, by the router's own log"),
    "plan": ("plan", "the smallest fleet and the policy that keep latency targets"),
    "rate-match": ("capacity",
        "how many workers prefill and how many decode, for a log, GPUs and targets"),
    "pareto": ("capacity",
        "throughput per GPU against speed, workers of two roles and workers all alike"),
    "instances": ("instances", "how many instances of a batching model (Triton's) a load needs"),
    "sweep": ("sweeps", "many replays from one file: policies, parameters, fleets, loads, seeds"),
    "compare": ("sweeps", "rules against one of them, seed by seed, from files of sweep results"),
    "study": ("sweeps", "the sweeps behind docs/notes/policy-study.md: run, resumed, compared"),
    "hits": ("bounds", "hit rates of routing rules over caches alone, without service times"),
    "bound": ("bounds", "what no policy can beat on a trace, and where policies lose"),
    "sources": ("replay", "the formats and generators of traces, with what each can be asked"),
    "validate": ("truth", "the same trace live and simulated, figure by figure"),
    "calibrate": ("truth", "fit step times to a live engine, or to its step log"),
    "profiles": ("profiles",
        "the built-in step times, and how far they are from tables of measured kernels"),
    "profile": ("step_times", "step times of a model on a GPU, from its config.json alone"),
    "check-facts": ("facts", "play a router's recording of facts: does this core decide the same?"),
    "demo": ("live",
        "compare policies on virtual time, show a hot spot and its cure live; ends by itself"),
    "load": ("live", "put a workload on a live OpenAI-compatible endpoint"),
    "stack": ("live",
        "start a router and timed workers; stay until Ctrl-C, or put a trace on them"),
}  # fmt: skip
ALIASES = {"run-stack": "stack"}

EPILOG = """\
examples: on virtual time (docs/simulator.md)
  warmroute-sim replay requests.jsonl --workers 8
  warmroute-sim plan requests.jsonl --ttft-p90-ms 1000
  warmroute-sim rate-match requests.jsonl --tpot-ms 25 --ttft-ms 1000 --gpus 16
  warmroute-sim instances measured.json --rate 400 --p99-ms 80
  warmroute-sim profile Qwen3-32B/config.json --gpu h100 --tp 2 --out mine-tp2.json
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
    command, options = read_arguments(given)
    # Where nobody watches, lines are for a log: wide enough to stay lines.
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


def read_arguments(given: Sequence[str]) -> tuple[Command, Any]:
    """The command that is asked for, and its options. Only its module is imported."""
    parser = HintingParser(
        prog="warmroute-sim",
        description="Replays on virtual time, load on real programs, and what is learned of both.",
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
