"""The command `warmroute` and its subcommands."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from router.cli.admin import ABOUT as WORKERS_ABOUT
from router.cli.admin import add_workers_command, workers_command
from router.cli.config import NAMES_OF_KEYS, add_config_command, add_flags, check_command
from router.cli.init import ABOUT as INIT_ABOUT
from router.cli.init import add_init_command, init_command
from router.cli.keys import ABOUT as KEYS_ABOUT
from router.cli.keys import add_keys_command, keys_command
from router.cli.top import ABOUT as TOP_ABOUT
from router.cli.top import add_top_command, top_command
from router.config.file import ConfigError
from router.config.hints import HintingParser, with_hint
from router.record.logs import configure
from router.redis.url import redacted
from router.settings.extras import installed
from router.settings.load import Loaded, load_config
from router.settings.schema import Config

log = logging.getLogger(__name__)

_SERVE = """\
Route each OpenAI request to the worker whose KV cache holds most of the request's prompt, and
whose load is low.

The router asks each worker for the worker's engine, model, block size and KV events.
When the router listens, the router prints one line: ready http://HOST:PORT admin=http://HOST:PORT
Scripts wait for `GET /ready` at either port: 200 means that a worker can take a request.
At SIGHUP the router reads the configuration again; at SIGTERM running requests may finish.
"""
_SERVE_EXAMPLES = f"""\
{NAMES_OF_KEYS}
examples:
  warmroute serve --worker http://gpu1:8000 --worker http://gpu2:8000 --tokenizer /models/MODEL
      two engines; the folder has the model's tokenizer.json, so prompts are matched by token
  warmroute serve --config router.yaml --port 9000
      settings from a file, but for the port; check it: warmroute config --check router.yaml
  warmroute serve --discover dns:engines.internal:8000 --host 0.0.0.0 --api-keys-file keys.txt
      all addresses of a DNS name are workers; clients on other machines need an API key
"""
_SERVE_USAGE = "warmroute serve [--config FILE] [--worker URL]... [FLAG VALUE]..."
_CONFIG_EXAMPLES = """\
examples:
  warmroute config --check router.yaml
      say what is wrong with a file, before a router reads it
  warmroute config --print > router.yaml
      write all keys with their meanings and defaults
  warmroute config --from 'vllm-router --worker-urls http://gpu1:8000' > router.yaml
      write the file that does what another router's command line does

All flags of `warmroute serve` can be given, too: warmroute serve --help-all
"""
_CONFIG_USAGE = "warmroute config [--check FILE] [--print] [--from COMMAND] [FLAG VALUE]..."
_ADVISE = """\
Read the router's request log and say what to change: policy, thresholds, block size, roles,
workers.

  warmroute advise requests.jsonl --profile llama-3.1-8b-h100
  warmroute advise later.jsonl --profile mine.json --state requests.jsonl.advice --check

The command runs `warmroute-sim advise` at low priority; all options: warmroute advise --help
"""
# -P: no module of the folder it starts in.
_ADVISE_PROGRAM = ("-P", "-m", "simulator", "advise")
_ADVISE_BOUNDS = ("--nice=10", "--memory-mb=4096", "--budget=3600")


@dataclass(frozen=True, slots=True)
class _Command:
    """One subcommand of `warmroute`: its help, its flags and its function."""

    help: str
    about: str | None
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None  # None: it serves
    usage: str | None = None  # where argparse would write too long a one
    examples: str | None = None


def _absent(help: str, extra: str) -> _Command:
    """Return a subcommand that only tells the user which extra must be installed for it."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run(args: argparse.Namespace) -> int:
        print(f"error: router/{extra} is not installed, which this needs", file=sys.stderr)
        return 1

    return _Command(help, None, add, run)


def _kv() -> _Command:
    words = "what the router knows of a worker's cache"
    if not installed("admin"):
        return _absent(words, "admin")
    from router.cli.kv import ABOUT, add_kv_command, kv_command

    return _Command(words, ABOUT, add_kv_command, kv_command)


def _doctor() -> _Command:
    words = "why servers do not batch, or caches are not hit, and what to change"
    if not installed("doctor"):
        return _absent(words, "doctor")
    from router.cli.doctor import ABOUT, add_doctor_command, doctor_command

    return _Command(words, ABOUT, add_doctor_command, doctor_command)


_COMMANDS = MappingProxyType(
    {
        "serve": _Command("run the router", _SERVE, add_flags, None, _SERVE_USAGE, _SERVE_EXAMPLES),
        "init": _Command(
            *("find engines and write a configuration", INIT_ABOUT, add_init_command, init_command)
        ),
        "config": _Command(
            *("check or print a configuration", None, add_config_command, check_command),
            *(_CONFIG_USAGE, _CONFIG_EXAMPLES),
        ),
        "keys": _Command("make API keys", KEYS_ABOUT, add_keys_command, keys_command),
        "kv": _kv(),
        "workers": _Command(
            "list, add, drain and remove workers",
            WORKERS_ABOUT,
            add_workers_command,
            workers_command,
        ),
        "advise": _Command("what to change, by the request log", _ADVISE, lambda parser: None),
        "doctor": _doctor(),
        "top": _Command(
            "watch the fleet and the decisions, live", TOP_ABOUT, add_top_command, top_command
        ),
    }
)


class BriefParser(HintingParser):
    """Reports a wrong flag in one line, because a page of usage would hide the error. Flags must be
    written in full; an abbreviated flag is an error. Lifetime: process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        # It may quote a given value, such as a mistyped --state.
        message = redacted(with_hint(message))
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command `warmroute`. Return the exit status: 0, 1 (cannot start) or 2 (bad
    configuration).
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["advise"]:  # its options are another program's
        return _advise(argv[1:])
    args = _parser().parse_args(argv)
    run = _COMMANDS[args.command].run
    if run is None:
        return _serve(args, argv)
    gc.enable()  # `serve` does so once the router is built
    return run(args)


def _parser() -> BriefParser:
    parser = BriefParser(
        prog="warmroute",
        description="KV-cache-aware router for pools of LLM engines",
        epilog="Start with: warmroute init, or warmroute serve --help",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {_version()}")
    words = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(_COMMANDS))
    for word, command in _COMMANDS.items():
        adding = words.add_parser(
            word,
            help=command.help,
            usage=command.usage,
            description=command.about,
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(adding)
    return parser


def advise_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of the simulator's advice. `arguments` come last, so that they take
    precedence.
    """
    return [sys.executable, *_ADVISE_PROGRAM, *_ADVISE_BOUNDS, *arguments]


def _advise(arguments: Sequence[str]) -> int:
    """Run the simulator's advice as a process of its own, because the router does not import the
    simulator. Return the exit status of the process.
    """
    process = subprocess.Popen(advise_command(arguments))
    while True:
        try:
            return process.wait()
        # The terminal interrupted both processes: the other one ends by itself.
        except KeyboardInterrupt:
            continue


def _serve(args: argparse.Namespace, argv: list[str]) -> int:
    def read() -> Config:
        return _noted(load_config(args, os.environ))

    try:
        loaded = load_config(args, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    config = loaded.config
    configure(config.log_level, config.log_format)
    _noted(loaded)
    try:
        before = None
        if config.hot_restart is not None:
            from router.restart.hot_restart import take_over

            before = take_over(Path(config.hot_restart))
        import uvloop  # only here: `warmroute config` starts faster without the server

        from router.cli.serve import serve

        uvloop.run(serve(config, read, argv, before))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # a key file or tokenizer that cannot be used
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _noted(loaded: Loaded) -> Config:
    for note in loaded.notes:
        log.info("%s", note)
    return loaded.config


def _version() -> str:
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return "from a checkout"
