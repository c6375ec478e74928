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
    worker = WorkerSettings(profile_name=None, kv_tokens=16)
    add = parser.add_argument_group(
        "addresses of the worker (port 0: the system picks a port)"
    ).add_argument
    add("--host", default=worker.host, help="address that the worker binds (default: 127.0.0.1)")
    add("--port", type=int, default=worker.port, metavar="P", help="port for HTTP (default: 8000)")
    add(
        "--events-port", type=int, default=0, metavar="E",
        help="port of the ZMQ PUB socket that sends KV events (default: 0)",
    )  # fmt: skip
    add(
        "--replay-port", type=int, default=0, metavar="R",
        help="port of the ZMQ ROUTER socket that sends past KV events again (default: 0)",
    )  # fmt: skip
    add(
        "--announce", default=os.environ.get(ANNOUNCE), metavar="REDIS[,url=URL]",
        help=f"announce this worker to routers in Redis; {ANNOUNCE} does so, too (default: no)",
    )  # fmt: skip
    parser.add_argument(
        "--render", action="store_true", dest="renders",
        help="answer routers that ask for a request's token ids at .../completions/render",
    )  # fmt: skip
    _add_transfers(parser)
    _add_limits(parser)
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="warning",
        help="least severe messages that are logged on stderr (default: warning)",
    )  # fmt: skip


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the scheduler and of other limits."""
    limits, worker = SchedulerSettings(), WorkerSettings(profile_name=None, kv_tokens=16)
    add = parser.add_argument_group("limits").add_argument
    add(
        "--max-num-tokens", type=int, default=limits.max_num_tokens,
        help="maximum number of tokens of one step (default: 8192)",
    )  # fmt: skip
    add(
        "--max-batch-size", type=int, default=limits.max_batch_size,
        help="maximum number of running requests (default: 256)",
    )  # fmt: skip
    add(
        "--max-queue", type=int, default=limits.max_queue,
        help="maximum number of waiting requests (default: 4096)",
    )  # fmt: skip
    add(
        "--batch-scheduler-policy", choices=get_args(BatchPolicy), default="max_utilization",
        help="rule by which the scheduler admits waiting requests (default: max_utilization)",
    )  # fmt: skip
    add(
        "--max-queue-delay-microseconds", type=int, default=0,
        help="how long an idle worker waits for a fuller first batch, microseconds (default: 0)",
    )  # fmt: skip
    add(
        "--length-ageing-s", type=float, default=0.0,
        help="seconds of waiting that put a request as far ahead as a prompt shorter by 1000 "
            "tokens (default: 0)",
    )  # fmt: skip
    add(
        "--tpot-target-ms", type=float, default=0.0,
        help="longest time per output token that prefills may cause, ms; 0: no limit (default: 0)",
    )  # fmt: skip
    add(
        "--tenant-share", type=float, default=1.0, metavar="X",
        help="largest share of the KV blocks that one tenant may use, 0..1 (default: 1)",
    )  # fmt: skip
    add(
        "--pinned-share", type=float, default=0.0, metavar="X",
        help="largest share of the KV blocks that may be pinned, 0..0.9 (default: 0)",
    )  # fmt: skip
    add(
        "--tenant-header", default=worker.tenant_header, metavar="H",
        help="request header that names the tenant (default: x-tenant)",
    )  # fmt: skip
    add(
        "--max-body-bytes", type=int, default=worker.max_body_bytes,
        help="largest body of a request, bytes (default: 16 MiB)",
    )  # fmt: skip
    add(
        "--grace-s", type=float, default=worker.grace_s,
        help="seconds that running requests get when the worker stops (default: 5)",
    )  # fmt: skip


def _add_transfers(parser: argparse.ArgumentParser) -> None:
    """Add the flags of KV transfers between workers (docs/disaggregation.md)."""
    limits, worker = SchedulerSettings(), WorkerSettings(profile_name=None, kv_tokens=16)
    add = parser.add_argument_group("KV transfers between workers").add_argument
    add(
        "--role", choices=get_args(Role), default=worker.role,
        help="role that the worker reports at /server_info (default: both)",
    )  # fmt: skip
    add(
        "--revision", metavar="TEXT",
        help="revision of the model, which the worker reports at /version and announces",
    )  # fmt: skip
    add(
        "--kv-transport", choices=get_args(KvTransport), default=worker.kv_transport,
        help="how other workers read KV from this worker; shm: through shared memory where "
            "possible; none: no worker reads KV (default: tcp)",
    )  # fmt: skip
    add(
        "--kv-host", metavar="H",
        help="address at which other workers reach this worker (default: --host)",
    )  # fmt: skip
    add(
        "--kv-port", type=int, default=0, metavar="P",
        help="port at which other workers read KV from this worker (default: 0)",
    )  # fmt: skip
    add(
        "--kv-load-failure-policy", choices=get_args(FailurePolicy),
        default=worker.kv_load_failure_policy, help="what the worker does with a prompt whose KV "
            "does not arrive from another worker",
    )  # fmt: skip
    add(
        "--kv-gbytes-per-s", type=float, metavar="X",
        help="GB/s at which KV leaves the worker (default: the speed of the sockets; timed "
            "worker: 50)",
    )  # fmt: skip
    add(
        "--kv-latency-ms", type=float, default=0.0, metavar="X",
        help="delay before KV leaves the worker, ms (default: 0)",
    )  # fmt: skip
    add(
        "--kv-overlap", action="store_true",
        help="send the KV of a prompt while the worker still computes the rest of the prompt",
    )  # fmt: skip
    add(
        "--export-lease-s", type=float, default=limits.export_lease_s, metavar="S",
        help="seconds that the worker keeps KV until another worker fetches the KV (default: 30)",
    )  # fmt: skip
    add(
        "--max-exports", type=int, default=limits.max_exports,
        help="maximum number of prompts whose KV the worker keeps for other workers (default: "
            "1024)",
    )  # fmt: skip


def start_logging(flags: argparse.Namespace) -> None:
    """Log to stderr, from the severity `--log-level` on."""
    logging.basicConfig(
        level=flags.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def announce_of(flags: argparse.Namespace) -> Announce | None:
    """Return the registry in which to announce the worker, or None if the flags name none. Raises
    ValueError for an invalid flag.
    """
    return parse_announce(flags.announce, flags.host) if flags.announce else None


def scheduler_settings(flags: argparse.Namespace, **others: Any) -> SchedulerSettings:
    """Return the scheduler settings that the flags and `others` give. Raises ValueError for an
    invalid setting.
    """
    given: dict[str, Any] = {name: getattr(flags, name) for name in _SCHEDULER_FLAGS}
    return SchedulerSettings(**given, **others)


def worker_settings(
    flags: argparse.Namespace, scheduler: SchedulerSettings, **others: Any
) -> WorkerSettings:
    """Return the worker settings that the flags and `others` give. Raises ValueError for an invalid
    setting.
    """
    given: dict[str, Any] = {name: getattr(flags, name) for name in _WORKER_FLAGS}
    return WorkerSettings(**given, **others, scheduler=scheduler)


def run_worker(
    settings: WorkerSettings,
    tokenizer: Tokenizer,
    on_ready: Callable[[str, Worker], None],
    served: ServedModel | None = None,
    announce: Announce | None = None,
) -> None:
    """Serve the worker until a signal stops it. Raises CommandFailed if the worker cannot listen on
    its ports.
    """
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
