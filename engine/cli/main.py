"""`warmroute-engine`: start a worker from the command line."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvloop
import zmq

from engine.cli.options import add_addresses, add_turns, announce_of, turns
from engine.profiles import PROFILES, profile
from engine.scheduler.types import SchedulerSettings
from engine.server import WorkerSettings, serve
from engine.server.metrics import StepLogError
from engine.server.settings import DEFAULT_VOCAB
from engine.server.worker import Worker
from engine.wire.tokens import Tokenizer, WordTokenizer

LOG_LEVELS = ("debug", "info", "warning", "error")

DESCRIPTION = """\
Start a worker that behaves like a vLLM engine without a GPU: real HTTP, real scheduler, real
KV cache and KV events; only the computing is replaced by waiting as long as the profile says.

With a model: `warmroute-engine serve DIR` computes; see `warmroute-engine serve --help`.

The next token is a pure function of the tokens before it, so answers can be checked. When the
worker is ready it prints one line: ready URL model=... events=... replay=... kv_tokens=...
"""

EPILOG = """\
examples:
  warmroute-engine --timed llama-3.1-8b-h100 --port 8001
      one worker at real speed
  warmroute-engine --timed qwen3-32b-h100-tp2 --port 0 --speed 4 --kv-tokens 60000
      four times as fast, a small cache, on a port that the system picks
  warmroute-engine make-tiny DIR --arch qwen3
      write a small random checkpoint with tokenizer and template, to try real models with
  curl http://127.0.0.1:8001/v1/completions -d '{"prompt": "hello", "max_tokens": 5}'

profiles:
"""


class BriefParser(argparse.ArgumentParser):
    """Says what is wrong in one line, which a page of usage would hide. Lifetime: process."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit code: 0 stopped by a signal, 1 could not start, 2 bad flags."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["make-tiny"]:
        from engine.cli import make_tiny as tiny_cli

        return tiny_cli.main(given[1:])
    if given[:1] == ["calibrate-kernels"]:
        from engine.cli.calibrate import main as calibrate

        return calibrate(given[1:])
    if given[:1] == ["serve"]:
        # Needs this module's helpers, and most workers do without it.
        from engine.cli.serve import main as serve_model

        return serve_model(given[1:])
    parser = _parser()
    flags = parser.parse_args(given)
    logging.basicConfig(
        level=flags.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        settings, announce = _settings(flags), announce_of(flags)
        tokenizer = _tokenizer(settings)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        return _failed(f"cannot read the tokenizer: {error}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, tokenizer, _announce, announce=announce))
    except StepLogError as error:
        return _failed(str(error))
    except (OSError, zmq.ZMQError) as error:
        return _failed(f"cannot listen on {settings.host}: {why_not(error, settings)}")
    return 0


def _failed(message: str) -> int:
    print(f"warmroute-engine: {message}", file=sys.stderr)
    return 1


def why_not(error: OSError | zmq.ZMQError, settings: WorkerSettings) -> str:
    # ZMQ says "No such device" of a name that is none.
    if isinstance(error, socket.gaierror) or error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return "the host's name cannot be resolved, or it is no address of this machine to bind"
    return f"{error} ({_ports(settings)})"


def _ports(settings: WorkerSettings) -> str:
    return (
        f"--port {settings.port}, --events-port {settings.events_port}, "
        f"--replay-port {settings.replay_port}"
    )


def _announce(url: str, worker: Worker) -> None:
    """The capacity for people on stderr, the ready line for programs on stdout."""
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
    announce_ready(url, worker)


def announce_ready(url: str, worker: Worker) -> None:
    """The line that programs wait for."""
    settings, publisher = worker.settings, worker.publisher
    print(
        f"ready {url} model={worker.model} events={publisher.endpoint} "
        f"replay={publisher.replay_endpoint} kv_tokens={settings.blocks * settings.block_size}",
        flush=True,
    )


def _settings(flags: argparse.Namespace) -> WorkerSettings:
    scheduler = SchedulerSettings(
        max_num_tokens=flags.max_num_tokens,
        max_batch_size=flags.max_batch_size,
        max_model_tokens=flags.max_model_len,
        max_queue=flags.max_queue,
        **turns(flags),
    )
    return WorkerSettings(
        profile_name=flags.timed,
        speed=flags.speed,
        kv_tokens=flags.kv_tokens,
        block_size=flags.block_size,
        model_name=flags.model_name,
        host=flags.host,
        port=flags.port,
        events_port=flags.events_port,
        replay_port=flags.replay_port,
        tokenizer=flags.tokenizer,
        max_body_bytes=flags.max_body_bytes,
        grace_s=flags.grace_s,
        tenant_header=flags.tenant_header,
        step_log=flags.step_log,
        scheduler=scheduler,
    )


def _tokenizer(settings: WorkerSettings) -> Tokenizer:
    if settings.tokenizer is None:
        return WordTokenizer(settings.vocab)
    # Imported here: most workers do without, and the libraries are large.
    from engine.wire.hf import HfTokenizer

    return HfTokenizer(settings.tokenizer)


def _parser() -> argparse.ArgumentParser:
    parser = BriefParser(
        prog="warmroute-engine",
        description=DESCRIPTION,
        epilog=EPILOG + _profile_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limits, worker = SchedulerSettings(), WorkerSettings(profile_name=next(iter(PROFILES)))
    add = parser.add_argument_group("what it imitates").add_argument
    add(
        "--timed",
        metavar="PROFILE",
        required=True,
        help="model and GPU; listed below, or a calibrated .json file",
    )
    add("--speed", type=float, default=1.0, metavar="X", help="divide every step's time (1)")
    add("--kv-tokens", type=int, metavar="T", help="KV cache in tokens (the profile's)")
    add("--block-size", type=int, default=worker.block_size, metavar="B", help="tokens (16)")
    add("--model-name", default=worker.model_name, metavar="M", help="as clients name it")
    add(
        "--tokenizer", type=Path, metavar="DIR", help=f"tokenizer.json (words, {DEFAULT_VOCAB} ids)"
    )
    add_addresses(parser.add_argument_group("where it listens (0: the system picks)").add_argument)
    add = parser.add_argument_group("limits").add_argument
    add("--max-num-tokens", type=int, default=limits.max_num_tokens, help="a step (8192)")
    add("--max-batch-size", type=int, default=limits.max_batch_size, help="running (256)")
    add("--max-model-len", type=int, default=limits.max_model_tokens, help="tokens (131072)")
    add("--max-queue", type=int, default=limits.max_queue, help="requests waiting (4096)")
    add_turns(add)
    add("--max-body-bytes", type=int, default=worker.max_body_bytes, help="of a request (16 MiB)")
    add("--grace-s", type=float, default=worker.grace_s, help="for running requests at exit (5)")
    parser.add_argument(
        "--step-log", type=Path, metavar="FILE",
        help="write each step as a CSV line, for `warmroute-sim calibrate FILE`",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="warning", help="on stderr (warning)"
    )
    return parser


def _profile_table() -> str:
    rows = (
        f"  {row.name:<24}{row.step_time.prefill_tokens_per_s:>8,.0f} prefill tokens/s"
        f"{row.kv_capacity_tokens:>12,} KV tokens"
        for row in PROFILES.values()
    )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
