"""Options that computing and timed workers share; addresses and scheduling."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, get_args

from engine.scheduler.types import BatchPolicy
from engine.server.announcer import Announce, parse_announce
from engine.server.settings import WorkerSettings

ANNOUNCE = "WARMROUTE_ANNOUNCE"  # a password is better kept off the command line

_NAMES = (
    *("batch_scheduler_policy", "max_queue_delay_microseconds", "length_ageing_s"),
    *("tpot_target_ms", "tenant_share", "pinned_share"),
)


def add_addresses(add: Callable[..., object]) -> None:
    """Declare with `add` where a worker listens."""
    worker = WorkerSettings(profile_name=None, kv_tokens=16)
    add("--host", default=worker.host, help="address to bind (127.0.0.1)")
    add("--port", type=int, default=worker.port, metavar="P", help="HTTP (8000)")
    add("--events-port", type=int, default=0, metavar="E", help="KV events, ZMQ PUB (0)")
    add("--replay-port", type=int, default=0, metavar="R", help="their replay, ROUTER (0)")
    add(
        "--announce", default=os.environ.get(ANNOUNCE), metavar="REDIS[,url=URL]",
        help=f"tell routers of us in Redis; or {ANNOUNCE} (no)",
    )  # fmt: skip


def announce_of(flags: argparse.Namespace) -> Announce | None:
    """Where to announce. Raises ValueError."""
    return parse_announce(flags.announce, flags.host) if flags.announce else None


def add_turns(add: Callable[..., object]) -> None:
    """Declare them with `add`, the `add_argument` of a group."""
    add("--batch-scheduler-policy", choices=get_args(BatchPolicy), default="max_utilization")
    add("--max-queue-delay-microseconds", type=int, default=0, help="to fill a first batch (0)")
    add("--length-ageing-s", type=float, default=0.0, help="wait worth 1000 tokens of prompt (0)")
    add("--tpot-target-ms", type=float, default=0.0, help="prompts yield to decodes for it (0)")
    add("--tenant-share", type=float, default=1.0, metavar="X", help="of the blocks, 0..1 (1)")
    add("--pinned-share", type=float, default=0.0, metavar="X", help="may be pinned, 0..0.9 (0)")
    add(
        "--tenant-header", default="x-tenant", metavar="H",
        help="names a request's tenant (x-tenant)",
    )  # fmt: skip


def turns(flags: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as fields of `SchedulerSettings`."""
    return {name: getattr(flags, name) for name in _NAMES}
