"""The flags, settings and failures that the commands of `warmroute-engine` share."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

import uvloop
import zmq

from engine.capacity import CapacityError
from engine.scheduler.types import BatchPolicy, SchedulerSettings
from engine.server import WorkerSettings, serve
from engine.server.announcer import Announce, parse_announce
from engine.server.settings import FailurePolicy, KvTransport, Role, ServedModel
from engine.server.worker import Worker
from engine.wire.tokens import Tokenizer

ANNOUNCE = "WARMROUTE_ANNOUNCE"  # a password is better kept off the command line
LOG_LEVELS = ("debug", "info", "warning", "error")
NEEDS_TORCH = (
    "computing needs torch and safetensors: pip install 'torch>=2.13' 'safetensors>=0.8' "
    "(or '.[engine]' in the checkout)"
)

_SCHEDULER_FLAGS = (
    *("export_lease_s", "max_exports"),
    *("max_num_tokens", "max_batch_size", "max_queue", "batch_scheduler_policy"),
    *("max_queue_delay_microseconds", "length_ageing_s", "tpot_target_ms"),
    *("tenant_share", "pinned_share"),
)
_WORKER_FLAGS = (
    *("block_size", "host", "port", "events_port", "replay_port"),
    *("max_body_bytes", "grace_s", "tenant_header", "renders"),
    *("role", "revision", "kv_transport", "kv_host", "kv_port", "kv_load_failure_policy"),
    *("kv_gbytes_per_s", "kv_latency_ms", "kv_overlap"),
)


class CommandFailed(Exception):  # noqa: N818 - how a command ends
    """Ends a command with a line for stderr and an exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class BriefParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, because a page of usage would hide it. Lifetime:
    process.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


@contextmanager
def computing() -> Iterator[None]:
    """Turn errors of reading a model, a device or a file into CommandFailed."""
    try:
        yield
    except ImportError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise CommandFailed(NEEDS_TORCH) from error
    except (ValueError, OSError, RuntimeError, CapacityError) as error:
        raise CommandFailed(str(error)) from error


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags of addresses, scheduling, limits and logging."""
    limits, worker = SchedulerSettings(), WorkerSettings(profile_name=None, kv_tokens=16)
    add = parser.add_argument_group("where it listens (0: the system picks)").add_argument
    add("--host", default=worker.host, help="address to bind (127.0.0.1)")
    add("--port", type=int, default=worker.port, metavar="P", help="HTTP (8000)")
    add("--events-port", type=int, default=0, metavar="E", help="KV events, ZMQ PUB (0)")
    add("--replay-port", type=int, default=0, metavar="R", help="their replay, ROUTER (0)")
    add(
        "--announce", default=os.environ.get(ANNOUNCE), metavar="REDIS[,url=URL]",
        help=f"tell routers of us in Redis; or {ANNOUNCE} (no)",
    )  # fmt: skip
    parser.add_argument(
        "--render", action="store_true", dest="renders",
        help="make token ids of requests for routers at .../completions/render",
    )  # fmt: skip
    _add_transfers(parser)
    add = parser.add_argument_group("limits").add_argument
    add("--max-num-tokens", type=int, default=limits.max_num_tokens, help="a step (8192)")
    add("--max-batch-size", type=int, default=limits.max_batch_size, help="running (256)")
    add("--max-queue", type=int, default=limits.max_queue, help="requests waiting (4096)")
    add("--batch-scheduler-policy", choices=get_args(BatchPolicy), default="max_utilization")
    add("--max-queue-delay-microseconds", type=int, default=0, help="to fill a first batch (0)")
    add("--length-ageing-s", type=float, default=0.0, help="wait worth 1000 tokens of prompt (0)")
    add("--tpot-target-ms", type=float, default=0.0, help="prompts yield to decodes for it (0)")
    add("--tenant-share", type=float, default=1.0, metavar="X", help="of the blocks, 0..1 (1)")
    add("--pinned-share", type=float, default=0.0, metavar="X", help="may be pinned, 0..0.9 (0)")
    add(
        "--tenant-header", default=worker.tenant_header, metavar="H",
        help="names a request's tenant (x-tenant)",
    )  # fmt: skip
    add("--max-body-bytes", type=int, default=worker.max_body_bytes, help="of a request (16 MiB)")
    add("--grace-s", type=float, default=worker.grace_s, help="for running requests at exit (5)")
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="warning", help="on stderr (warning)"
    )


def _add_transfers(parser: argparse.ArgumentParser) -> None:
    """Add the flags of KV transfers between workers (docs/disaggregation.md)."""
    limits, worker = SchedulerSettings(), WorkerSettings(profile_name=None, kv_tokens=16)
    add = parser.add_argument_group("KV of other workers, KV for them").add_argument
    add("--role", choices=get_args(Role), default=worker.role, help="told at /server_info (both)")
    add("--revision", metavar="TEXT", help="of what it serves, told at /version and announced")
    add(
        "--kv-transport", choices=get_args(KvTransport), default=worker.kv_transport,
        help="shm: mapped where it can be; none: its KV stays here (tcp)",
    )  # fmt: skip
    add("--kv-host", metavar="H", help="by which others reach this worker (--host)")
    add("--kv-port", type=int, default=0, metavar="P", help="where they read its KV (0)")
    add(
        "--kv-load-failure-policy", choices=get_args(FailurePolicy),
        default=worker.kv_load_failure_policy, help="for a prompt whose KV does not come",
    )  # fmt: skip
    add(
        "--kv-gbytes-per-s", type=float, metavar="X",
        help="at which KV leaves (as sockets do; a timed worker's: 50)",
    )  # fmt: skip
    add("--kv-latency-ms", type=float, default=0.0, metavar="X", help="before it does (0)")
    add(
        "--kv-overlap", action="store_true",
        help="KV leaves while the rest of its prompt is computed (docs say what it costs)",
    )  # fmt: skip
    add(
        "--export-lease-s", type=float, default=limits.export_lease_s, metavar="S",
        help="for so long KV is kept that nobody asks for (30)",
    )  # fmt: skip
    add("--max-exports", type=int, default=limits.max_exports, help="prompts kept at once (1024)")


def start_logging(flags: argparse.Namespace) -> None:
    """Log to stderr, from the severity `--log-level` on."""
    logging.basicConfig(
        level=flags.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def announce_of(flags: argparse.Namespace) -> Announce | None:
    """Return where to announce the worker. Raises ValueError."""
    return parse_announce(flags.announce, flags.host) if flags.announce else None


def scheduler_settings(flags: argparse.Namespace, **others: Any) -> SchedulerSettings:
    """Return the scheduler settings in the flags and in `others`. Raises ValueError."""
    given: dict[str, Any] = {name: getattr(flags, name) for name in _SCHEDULER_FLAGS}
    return SchedulerSettings(**given, **others)


def worker_settings(
    flags: argparse.Namespace, scheduler: SchedulerSettings, **others: Any
) -> WorkerSettings:
    """Return the worker settings in the flags and in `others`. Raises ValueError."""
    given: dict[str, Any] = {name: getattr(flags, name) for name in _WORKER_FLAGS}
    return WorkerSettings(**given, **others, scheduler=scheduler)


def run_worker(
    settings: WorkerSettings,
    tokenizer: Tokenizer,
    on_ready: Callable[[str, Worker], None],
    served: ServedModel | None = None,
    announce: Announce | None = None,
) -> None:
    """Serve until a signal. Raises CommandFailed if the worker cannot listen."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, tokenizer, on_ready, served, announce))
    except (OSError, zmq.ZMQError) as error:
        ports = (
            f"--port {settings.port}, --events-port {settings.events_port}, "
            f"--replay-port {settings.replay_port}"
        )
        why = f"{error} ({ports})"
        # ZMQ says "No such device" of a name that is none.
        if isinstance(error, socket.gaierror) or error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
            why = "the host's name cannot be resolved, or it is no address of this machine to bind"
        raise CommandFailed(f"cannot listen on {settings.host}: {why}") from error


def print_ready(url: str, worker: Worker) -> None:
    """Print the ready line, which programs wait for."""
    settings, publisher = worker.settings, worker.publisher
    print(
        f"ready {url} model={worker.model} events={publisher.endpoint} "
        f"replay={publisher.replay_endpoint} kv_tokens={settings.blocks * settings.block_size}",
        flush=True,
    )
