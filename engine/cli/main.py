"""The program `warmroute-engine`: its commands, and the worker that imitates an engine by modelled
step times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cache_groups import parse_groups
from engine.cli.options import (
    BriefParser,
    CommandFailed,
    add_common,
    announce_of,
    print_ready,
    run_worker,
    scheduler_settings,
    start_logging,
    worker_settings,
)
from engine.profiles import PROFILES, profile
from engine.scheduler.types import SchedulerSettings
from engine.server import WorkerSettings
from engine.server.metrics import StepLogError
from engine.server.settings import DEFAULT_VOCAB
from engine.server.worker import Worker
from engine.wire.tokens import Tokenizer, WordTokenizer

DESCRIPTION = """\
Start a worker that behaves like a vLLM engine without a GPU: real HTTP, real scheduler, real
KV cache and KV events. In place of computing, the worker waits as long as the profile says.

`warmroute-engine serve DIR` computes with a model; see `warmroute-engine serve --help`.

The next token is a pure function of the tokens before it, so answers can be checked. When the
worker is ready, the worker prints one line: ready URL model=... events=... replay=... kv_tokens=...
"""

EPILOG = """\
examples:
  warmroute-engine --timed llama-3.1-8b-h100 --port 8001
      start one worker at real speed
  warmroute-engine --timed qwen3-32b-h100-tp2 --port 0 --speed 4 --kv-tokens 60000
      start a worker that is four times as fast, with a small cache, on a port that the system picks
  warmroute-engine make-tiny DIR --arch qwen3
      write a small random checkpoint with tokenizer and template, for trials of real models
  curl http://127.0.0.1:8001/v1/completions -d '{"prompt": "hello", "max_tokens": 5}'

profiles:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code: 0 if it was stopped by a signal, 1 if it could not
    start, 2 for bad flags.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(given)
    except CommandFailed as failure:
        print(f"warmroute-engine: {failure}", file=sys.stderr)
        return failure.code


def _run(given: Sequence[str]) -> int:
    # Each command imports only what it needs: most workers need no model.
    command, rest = given[:1], given[1:]
    if command == ["make-tiny"]:
        from engine.cli.files import write_tiny as run
    elif command == ["calibrate-kernels"]:
        from engine.cli.files import calibrate_kernels as run
    elif command == ["serve"]:
        from engine.cli.serve import main as run
    else:
        run, rest = serve_timed, given
    return run(rest)


def serve_timed(arguments: Sequence[str]) -> int:
    """Run a worker that waits in each step as long as its profile says; return the exit code."""
    flags = parser().parse_args(arguments)
    start_logging(flags)
    try:
        settings, announce = _settings(flags), announce_of(flags)
        tokenizer = _tokenizer(settings)
    except ValueError as error:
        parser().error(str(error))
    except OSError as error:
        raise CommandFailed(f"cannot read the tokenizer: {error}") from error
    try:
        run_worker(settings, tokenizer, _print_capacity, announce=announce)
    except StepLogError as error:
        raise CommandFailed(str(error)) from error
    return 0


def _print_capacity(url: str, worker: Worker) -> None:
    """Print the capacity for people on stderr, and the ready line for programs on stdout."""
    settings = worker.settings
    name = settings.profile_name or ""
    chosen = profile(name)
    print(
        f"{name} at speed {settings.speed:g}: "
        f"{chosen.step_time.prefill_tokens_per_s * settings.speed:,.0f} prefill tokens/s, "
        f"{settings.blocks:,} blocks of {settings.block_size} tokens, "
        f"at most {worker.max_model_tokens:,} tokens a request",
        file=sys.stderr,
    )
    print_ready(url, worker)


def _settings(flags: argparse.Namespace) -> WorkerSettings:
    return worker_settings(
        flags,
        scheduler_settings(flags, max_model_tokens=flags.max_model_len),
        profile_name=flags.timed,
        speed=flags.speed,
        kv_tokens=flags.kv_tokens,
        host_kv_tokens=flags.host_kv_tokens,
        host_gbytes_per_s=flags.host_gbytes_per_s,
        cache_groups=parse_groups(flags.cache_groups),
        model_name=flags.model_name,
        tokenizer=flags.tokenizer,
        step_log=flags.step_log,
    )


def _tokenizer(settings: WorkerSettings) -> Tokenizer:
    if settings.tokenizer is None:
        return WordTokenizer(settings.vocab)
    # Imported here: most workers do without, and the libraries are large.
    from engine.wire.hf import HfTokenizer

    return HfTokenizer(settings.tokenizer)


def parser() -> argparse.ArgumentParser:
    """Return the parser of a timed worker's flags."""
    parser = BriefParser(
        prog="warmroute-engine",
        description=DESCRIPTION,
        epilog=EPILOG + _profile_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_imitated(parser)
    add_common(parser)
    parser.add_argument(
        "--step-log", type=Path, metavar="FILE",
        help="file that gets a CSV line for each step, for `warmroute-sim calibrate FILE`",
    )  # fmt: skip
    return parser


def _add_imitated(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the engine that the worker imitates."""
    worker = WorkerSettings(profile_name=next(iter(PROFILES)))
    add = parser.add_argument_group("the imitated engine").add_argument
    add(
        "--timed", metavar="PROFILE", required=True,
        help="model and GPU: a profile listed below, or a calibrated .json file",
    )  # fmt: skip
    add(
        "--speed", type=float, default=1.0, metavar="X",
        help="divide every step's time by X (default: 1)",
    )  # fmt: skip
    add(
        "--kv-tokens", type=int, metavar="T",
        help="size of the KV cache, tokens (default: the profile's)",
    )  # fmt: skip
    add(
        "--host-kv-tokens", type=int, default=0, metavar="T",
        help="maximum number of evicted KV tokens that stay in host memory (default: 0)",
    )  # fmt: skip
    add(
        "--host-gbytes-per-s", type=float, metavar="X",
        help="GB/s at which the worker loads KV from host memory (default: 25 per GPU)",
    )  # fmt: skip
    add(
        "--cache-groups", default="", metavar="G",
        help="groups of layers besides full attention, as window:1024*5+state (default: none)",
    )  # fmt: skip
    add(
        "--block-size", type=int, default=worker.block_size, metavar="B",
        help="number of tokens of a KV block (default: 16)",
    )  # fmt: skip
    add(
        "--model-name", default=worker.model_name, metavar="M",
        help=f"name of the model in requests (default: {worker.model_name})",
    )  # fmt: skip
    add(
        "--tokenizer", type=Path, metavar="DIR",
        help=f"folder with a tokenizer.json (default: words are tokens, {DEFAULT_VOCAB} ids)",
    )  # fmt: skip
    longest = SchedulerSettings().max_model_tokens
    add(
        "--max-model-len", type=int, default=longest,
        help="maximum number of tokens of a prompt and its output (default: 131072)",
    )  # fmt: skip


def _profile_table() -> str:
    rows = (
        f"  {row.name:<24}{row.step_time.prefill_tokens_per_s:>8,.0f} prefill tokens/s"
        f"{row.kv_capacity_tokens:>12,} KV tokens"
        for row in PROFILES.values()
    )
    return "\n".join(rows)
