"""The router's parts, built from a configuration and wired together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_network
from pathlib import Path

import aiohttp
import msgspec
import zmq.asyncio
from aiohttp import web

from policies.facts import Tick, WorkerChange
from policies.load import load
from router.config import Config
from router.config_keys import value_at
from router.config_load import reloadable
from router.core.core import RouterCore
from router.fleet_io.context import FleetContext, WorkerFact
from router.fleet_io.manager import FleetManager
from router.http.admin_app import AdminApi
from router.http.client_app import client_app
from router.http.decisions import DecisionLog
from router.http.inference import Inference
from router.http.tenants import Tenants, read_keys
from router.metrics import RouterMetrics
from router.policy_watch import HangWatch, PolicyTrouble
from router.record.recorder import FactRecorder
from router.record.request_line import Header
from router.record.request_log import RequestLog
from router.state.keeper import StateKeeper
from router.switchboard import Switchboard
from router.terms import core_settings, fleet_terms, inference_terms
from router.tokenizing import Tokenizing
from router.worker_spec import parse_worker_spec

log = logging.getLogger(__name__)

_WORKER_SOCKETS = 5
_SPARE_SOCKETS = 64  # of workers that were removed and are being closed
_TOKENIZER_THREADS = 2  # tokenizing holds no lock of Python's; two keep a long prompt from blocking


class Router:
    """All parts, wired. Lifetime: process."""

    def __init__(self, config: Config, http: aiohttp.ClientSession) -> None:
        self.config = config
        report = PolicyTrouble().report
        core = RouterCore(
            load(config.policy), core_settings(config), config.seed, report, time.monotonic
        )
        self.switchboard = Switchboard(core, time.monotonic)
        self.hang_watch = HangWatch(core.guard, time.monotonic, config.policy_hang_s)
        self._request_log = self._open_log(config)
        self.switchboard.recorder = _recorder(config, core)
        self.zmq = zmq.asyncio.Context()
        # A worker has up to five: its stream, a replay, what tells of connections (two ends each).
        self.zmq.set(zmq.MAX_SOCKETS, _WORKER_SOCKETS * config.limits.workers + _SPARE_SOCKETS)
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._context = FleetContext(
            http,
            self.zmq,
            time.monotonic,
            self._tell,
            fleet_terms(config),
            first_seq=core.roster.first_question,
            wants_snapshot=core.roster.wants_snapshot,
        )
        self.fleet = FleetManager(self._context, config.limits.workers)
        self._keeper = _keeper(config, core, self.fleet)
        self.switchboard.resync = self._resync
        decisions = DecisionLog()
        self.tokenizing = Tokenizing(lambda: self.config, self._executor, self.fleet, http)
        prompts, check = self.tokenizing.reader, self.tokenizing.check
        self.metrics = RouterMetrics(
            core, self.fleet, prompts, self._request_log, check, self._keeper
        )
        self.inference = Inference(
            self.switchboard,
            self.fleet,
            prompts,
            _tenants(config),
            self.metrics,
            decisions,
            lambda: inference_terms(self.config),
            self._request_log,
            check,
        )
        self.admin = AdminApi(self.switchboard, self.fleet, self.inference, decisions, self.metrics)

    async def start(self) -> None:
        """Read what a router before this one saved, before any worker joins."""
        if self._keeper is not None:
            await self._keeper.load()
            self._keeper.start(lambda: self.config.intervals.kv_state_s)

    def client_app(self) -> web.Application:
        """The application of the client port."""
        limit = self.config.limits.body_bytes
        return client_app(self.inference, self.switchboard, self.fleet, self.metrics, limit)

    def admin_app(self) -> web.Application:
        """The application of the admin port."""
        return self.admin.app(self.config.limits.body_bytes)

    async def tick(self) -> None:
        """Tell the core the time, for ever."""
        core = self.switchboard.core
        while True:
            await asyncio.sleep(self.config.intervals.tick_s)
            self.switchboard.tell(Tick(self.switchboard.clock()))
            self.fleet.sweep(lambda worker_id: len(core.ledger.on_worker(worker_id)))

    def apply(self, config: Config) -> list[str]:
        """Take over a new configuration; returns what cannot change while running, and why.

        Raises ValueError for a policy or a worker that cannot be used; nothing has changed then.
        A worker for which there is no slot is named among what is refused.
        """
        applied, refused = reloadable(self.config, config)
        policy = load(config.policy)
        specs = [parse_worker_spec(spec) for spec in config.workers]
        if "policy" in applied:
            self.switchboard.set_policy(policy)
        lines = [f"{key}: {reason}" for key, reason in refused.items()]
        if "workers" in applied:
            lines += self.fleet.reconcile(specs)
        self.config = _without(refused, config, self.config)
        self._context.terms = fleet_terms(self.config)
        log.info("reloaded; changed: %s", ", ".join(applied) or "nothing")
        return lines

    def reopen_files(self) -> None:
        """Go on in new files where those written to were moved away."""
        if self._request_log is not None:
            self._request_log.reopen()

    async def aclose(self) -> None:
        """Stop following workers, write what waits, free sockets and threads."""
        if self._request_log is not None:  # before the fleet goes, which a header counts
            await asyncio.to_thread(self._request_log.close)
        if self._keeper is not None:  # while the workers are still known
            await self._keeper.close()
        await self.fleet.aclose()
        if self.switchboard.recorder is not None:
            await asyncio.to_thread(self.switchboard.recorder.close)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.zmq.destroy(linger=0)

    def _open_log(self, config: Config) -> RequestLog | None:
        """Raises OSError."""
        if config.request_log is None:
            return None

        def header(started: float) -> Header:
            policy = self.switchboard.core.policy.spec
            return Header(round(started, 6), policy, len(self.fleet.members))

        return RequestLog(
            Path(config.request_log), config.request_log_bytes, time.monotonic, time.time, header
        )

    def _tell(self, fact: WorkerFact) -> None:
        if self._keeper is not None and isinstance(fact, WorkerChange):
            fact = self._keeper.heard(fact)
        self.switchboard.tell(fact)

    def _resync(self, worker_id: int, from_seq: int) -> None:
        member = self.fleet.members.get(worker_id)
        if member is not None and member.feed is not None:
            member.feed.resync(from_seq)


def _without(refused: Iterable[str], new: Config, old: Config) -> Config:
    """`new` with the values of `old` for the keys refused, which stay in force."""
    for path in refused:
        section, dot, name = path.rpartition(".")
        kept = {name: value_at(old, path)}
        if dot:
            kept = {section: msgspec.structs.replace(getattr(new, section), **kept)}
        new = msgspec.structs.replace(new, **kept)
    return new


def _keeper(config: Config, core: RouterCore, fleet: FleetManager) -> StateKeeper | None:
    if config.kv_state is None:
        return None
    return StateKeeper(Path(config.kv_state), core, lambda: fleet.members)


def _recorder(config: Config, core: RouterCore) -> FactRecorder | None:
    """Raises OSError."""
    if config.record_facts is None:
        return None
    path = Path(config.record_facts)
    return FactRecorder(path, config.record_facts_bytes, core, config.seed)


def _tenants(config: Config) -> Tenants:
    path = config.api_keys_file
    keys = None if path is None else read_keys(Path(path))
    peers = tuple(ip_network(peer) for peer in config.trusted_peers)
    return Tenants(keys, config.tenant_header, peers)
