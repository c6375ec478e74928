"""The command `warmroute doctor`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.cli.doctor_routing import ROUTING_ABOUT, routing_command
from router.doctor.judge import CAUSES
from router.doctor.report import NOTHING, UNREADABLE, DoctorError, DoctorReport

if TYPE_CHECKING:  # its HTTP client is loaded where it is needed: other commands start sooner
    from router.doctor.examine import Options
    from router.doctor.probe import ProbeLimits

ABOUT = (
    """\
Watch servers under load, and say why a server does not batch and which setting to change.

  warmroute doctor http://gpu1:8000                      a Triton, its metrics at 8002
  warmroute doctor http://gpu1:8000,metrics=http://gpu1:9102/metrics
  warmroute doctor http://gpu1:8000 http://gpu2:8000 --router http://127.0.0.1:8081
  warmroute doctor http://127.0.0.1:8000 --probe --measure times.json

The doctor recognizes Triton (TensorRT-LLM, vLLM, Python backends), vLLM, SGLang and
warmroute-engine. The doctor only reads pages of servers, unless --probe allows a bounded load, and
compares readings: run the command while the problem lasts. An idle pool shows no cause.

Flags give the facts that servers cannot report: --router (counts of our router), --log (error texts
of clients), --requests (a request a line, in the form of `infer`) and the size of requests
(--max-tokens ...). The report lists what the doctor did not examine. docs/triton.md lists causes.

Exit status: 0 nothing to change, 1 something found, 2 a server could not be read.

"""
    + ROUTING_ABOUT
)
_MAX_BODY = 16 << 20


def add_doctor_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute doctor`."""
    add = parser.add_argument
    add("servers", nargs="*", metavar="URL", help="an engine to examine: URL[,metrics=URL]")
    add(
        "--routing", action="append", default=[], metavar="URL",
        help="admin port of a router; the doctor finds out why the router's cache hits are zero "
            "or low",
    )  # fmt: skip
    add("--admin-key-file", metavar="FILE", help="file whose first line is a key of the admin port")
    add("--causes", action="store_true", help="list all causes that the doctor knows, and end")
    add(
        "--seconds", type=float, default=10.0, metavar="S",
        help="how long the doctor watches servers, seconds (default: %(default)g)",
    )  # fmt: skip
    add(
        "--timeout", type=float, default=5.0, metavar="S",
        help="longest wait for a server's page, seconds (default: %(default)g)",
    )  # fmt: skip
    add("--json", action="store_true", help="print the report as JSON")
    add("--quiet", action="store_true", help="print no progress on stderr")
    _add_facts(parser)
    _add_probe(parser)


def _add_facts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for facts that the operator knows but the servers cannot report."""
    add = parser.add_argument_group("facts that the servers cannot report").add_argument
    add("--router", metavar="URL", help="admin port of the router in front of the servers")
    add(
        "--log", type=Path, metavar="FILE",
        help="file with error texts of clients or servers, one text per line",
    )  # fmt: skip
    add(
        "--requests", type=Path, metavar="FILE",
        help="file with requests in the form of `infer` or of clients, one request per line",
    )  # fmt: skip
    add(
        "--tokenizer", type=Path, metavar="DIR",
        help="folder of the router's tokenizer, for --routing",
    )  # fmt: skip
    add(
        "--concurrency", type=int, metavar="N",
        help="number of requests that clients will send at a time",
    )  # fmt: skip
    add(
        "--connections", type=int, metavar="N",
        help="number of client connections that carry the load",
    )  # fmt: skip
    add("--input-tokens", type=float, metavar="N", help="number of tokens of a prompt")
    add(
        "--max-tokens", type=float, metavar="N",
        help="maximum number of tokens that requests allow for an answer",
    )  # fmt: skip
    add(
        "--max-num-tokens", type=float, metavar="N",
        help="maximum number of tokens of a step that the engine was built for",
    )  # fmt: skip


def _add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the load that the doctor sends to the servers."""
    add = parser.add_argument_group("a load that the doctor sends").add_argument
    add(
        "--probe", action="store_true",
        help="send a load, to loopback only unless --allow-host allows more",
    )  # fmt: skip
    add(
        "--allow-host", action="append", default=[], metavar="HOST",
        help="host beyond loopback that --probe may load",
    )  # fmt: skip
    add(
        "--probe-model", metavar="NAME",
        help="model that gets the load (default: the model that is no step of another model)",
    )  # fmt: skip
    add(
        "--probe-body", type=Path, metavar="FILE",
        help="file with the request that --probe sends, as JSON (default: made from the model's "
            "inputs)",
    )  # fmt: skip
    add(
        "--probe-requests", type=int, default=500, metavar="N",
        help="number of requests that --probe sends to each server (default: %(default)s)",
    )  # fmt: skip
    add(
        "--probe-concurrency", type=int, default=8, metavar="N",
        help="number of requests that --probe sends to each server at a time (default: "
            "%(default)s)",
    )  # fmt: skip
    add(
        "--probe-seconds", type=float, default=30.0, metavar="S",
        help="longest time of the whole load of --probe, seconds (default: %(default)g)",
    )  # fmt: skip
    add(
        "--measure", type=Path, metavar="FILE",
        help="file to which --probe writes service times by batch size, as JSON",
    )  # fmt: skip


def doctor_command(args: argparse.Namespace) -> int:
    """Run `warmroute doctor`, and return its exit status."""
    if args.routing:
        return routing_command(args)
    if args.causes:
        for cause in sorted(CAUSES):
            print(f"{cause.number:>2}  {cause.name}  ({cause.source})")
        return NOTHING
    from router.doctor.examine import examine

    try:
        report = asyncio.run(examine(args.servers, _options(args), _progress(args)))
        if args.measure is not None:
            _write(args.measure, report)
    except DoctorError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREADABLE
    except KeyboardInterrupt:
        print("error: stopped before the end", file=sys.stderr)
        return UNREADABLE
    print(json.dumps(report.shown(), indent=2) if args.json else report.text())
    return report.status


def _options(args: argparse.Namespace) -> Options:
    """Return the options in the arguments. Raises DoctorError for invalid ones."""
    from router.doctor.examine import Options

    for name in ("seconds", "timeout", "probe_seconds", "probe_requests", "probe_concurrency"):
        value = getattr(args, name)
        if not 0 < value <= 1e6:
            raise DoctorError(f"--{name.replace('_', '-')} {value:g}: more than 0 is needed")
    for name in ("tokenizer", "admin_key_file"):
        if getattr(args, name) is not None:
            raise DoctorError(f"--{name.replace('_', '-')} needs --routing")
    if args.measure is not None and not args.probe:
        raise DoctorError("--measure needs --probe, which takes the times")
    if args.probe_concurrency > 1024:
        raise DoctorError("--probe-concurrency: at most 1024")
    return Options(
        seconds=args.seconds,
        timeout_s=args.timeout,
        router=args.router,
        log=args.log,
        requests=args.requests,
        concurrency=args.concurrency,
        connections=args.connections,
        input_tokens=args.input_tokens,
        max_tokens=args.max_tokens,
        max_num_tokens=args.max_num_tokens,
        probe=_limits(args) if args.probe else None,
    )


def _limits(args: argparse.Namespace) -> ProbeLimits:
    from router.doctor.probe import ProbeLimits

    return ProbeLimits(
        requests=args.probe_requests,
        concurrency=args.probe_concurrency,
        seconds=args.probe_seconds,
        hosts=tuple(args.allow_host),
        model=args.probe_model,
        body=_body(args.probe_body),
    )


def _body(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BODY + 1)
    except OSError as error:
        raise DoctorError(f"--probe-body {path}: {error.strerror or error}") from error
    if len(data) > _MAX_BODY:
        raise DoctorError(f"--probe-body {path}: more than {_MAX_BODY} bytes")
    return data


def _write(path: Path, report: DoctorReport) -> None:
    measured: dict[str, Any] = dict(report.measured or {})
    if not measured.get("sizes"):
        raise DoctorError(
            "--measure: no batch ran, or the server does not count batches by size (only Triton "
            "does); nothing was written"
        )
    try:
        path.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DoctorError(f"--measure {path}: {error.strerror or error}") from error


def _progress(args: argparse.Namespace) -> Any:
    """Return a function that shows progress on stderr; in a terminal it overwrites one line."""
    if args.quiet:
        return lambda line: None
    end = "\r" if sys.stderr.isatty() else "\n"

    def show(line: str) -> None:
        over = end if line.startswith("watched") else "\n"
        print(f"{line:<60}" if over == "\r" else line, end=over, file=sys.stderr, flush=True)

    return show
