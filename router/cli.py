"""The command `warmroute`: serve, or look at a configuration."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from kvkernels import native_build
from router.config import Config
from router.config_command import add_config_command, add_flags, check_command
from router.config_file import ConfigError
from router.config_load import load_config
from router.kv_command import ABOUT, add_kv_command, kv_command

_SERVE = """\
Route OpenAI requests to the worker whose KV cache is warm for them.

  warmroute serve --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002

A worker given by its URL alone is asked who it is: engine, model, block size, KV events.
When the router listens it prints one line: ready http://HOST:PORT admin=http://HOST:PORT
SIGHUP reads the configuration anew; SIGTERM lets running requests finish.
"""


class BriefParser(argparse.ArgumentParser):
    """Says what is wrong in one line, which a page of usage would hide. Lifetime: process.

    A flag must be written out: half of one is a mistake, not a wish to be guessed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 (cannot start) or 2 (bad configuration)."""
    native_build.warn()
    parser = BriefParser(
        prog="warmroute",
        description="KV-cache-aware router for pools of LLM engines",
        epilog="Start with: warmroute serve --help",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve | config | kv")
    serving = commands.add_parser(
        "serve",
        help="run the router",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(serving)
    configuring = commands.add_parser("config", help="check or print a configuration")
    add_config_command(configuring)
    looking = commands.add_parser(
        "kv",
        help="what the router knows of a worker's cache",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_kv_command(looking)
    args = parser.parse_args(argv)
    if args.command == "kv":
        return kv_command(args)
    return check_command(args) if args.command == "config" else _serve(args)


def _serve(args: argparse.Namespace) -> int:
    def read() -> Config:
        return load_config(args, os.environ).config

    try:
        config = read()
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    import uvloop  # only here: `warmroute config` starts faster without the server

    from router.serve import serve

    try:
        uvloop.run(serve(config, read))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # a key file or tokenizer that cannot be used
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _version() -> str:
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return "from a checkout"
