"""The command `warmroute init`: writes a first configuration for the engines that it finds."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from router.config.paths import near_path
from router.engines.spec import WorkerSpecError
from router.engines.worker_spec import parse_worker_spec

ABOUT = """\
Find the engines on this machine and write a first configuration file.

  warmroute init                                       look at the usual ports of engines
  warmroute init --worker http://gpu1:8000 --out -     ask one engine; print the file

The command looks for engines at the ports 8000-8010 (vLLM, Triton, TensorRT-LLM) and 30000-30001
(SGLang) of 127.0.0.1, and sends engines no prompt. A file is overwritten only with --force.
"""
PORTS = (*range(8000, 8011), 30000, 30001)
_FIRST_PORT = 8080  # the router's own, or the next free one


def add_init_command(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `warmroute init`."""
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL",
        help="engine for the configuration, in place of a search on this machine; may be repeated",
    )
    parser.add_argument(
        "--out",
        default="router.yaml",
        metavar="FILE",
        help="file that gets the configuration; -: standard output (default %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")


def init_command(args: argparse.Namespace) -> int:
    """Run `warmroute init`. Return 0 if the configuration file was written, and 2 if it was not."""
    # Their HTTP client is loaded where it is needed: other commands start sooner.
    from router.cli.find_engines import configuration, find_engines, free_ports

    out = None if args.out == "-" else Path(args.out)
    try:
        specs = list({spec.url: spec for spec in map(parse_worker_spec, args.worker)}.values())
        if out is not None:
            _check_place(out, args.force)
    except (WorkerSpecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = asyncio.run(find_engines(specs, PORTS))
    text = configuration(found, *free_ports(_FIRST_PORT))
    say = sys.stderr if out is None else sys.stdout
    for one in found:
        print(f"found {one.spec.name}: {one}", file=say)
    if not found:
        print(
            f"no engine answers on this machine (ports {PORTS[0]}-{PORTS[-3]}, {PORTS[-2]}, "
            f"{PORTS[-1]}): the file has an example worker; put your engine's URL there",
            file=say,
        )
    if out is None:
        print(text, end="")
        return 0
    try:
        with out.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"error: {out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {out}; next: warmroute serve --config {out}")
    return 0


def _check_place(out: Path, force: bool) -> None:
    """Raise OSError with the reason if the file cannot be written at `out`."""
    if out.is_dir():
        raise OSError(f"{out} is a folder; name a file in it")
    if out.exists() and not force:
        raise OSError(f"{out} exists: give --force to overwrite it, or another --out FILE")
    if not out.parent.is_dir():
        raise OSError(f"{out.parent} is not a folder; create it first{near_path(out.parent)}")
