"""Builds the router's parts from a configuration and wires them together."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import zmq.asyncio

from policies.facts import Tick, WorkerChange
from policies.load import load
from router.collectors.core import router_metrics
from router.collectors.models import model_metrics
from router.collectors.ports_and_logs import log_metrics, picker_metrics, tracing_metrics
from router.collectors.replicas import former_metrics, replica_metrics
from router.collectors.tenants import held_metrics, tenant_metrics
from router.collectors.tokens import render_metrics
from router.collectors.workers import discovery_metrics, hit_metrics, role_metrics
from router.core.core import RouterCore
from router.engines.triton_inputs import given_roles
from router.engines.worker_spec import parse_worker_spec
from router.fleet.context import FleetContext, WorkerFact
from router.fleet.manager import FleetManager, RoleKeeper
from router.fleet.sources import Discovery, Source
from router.fleet.upstreams import GrpcOpener, WorkerTrust
from router.http.messages import Handler
from router.http.reply import RelayLimits
from router.keys.key_file import KeyFileError
from router.keys.key_ring import KeyRing
from router.metrics.exposition import exposition
from router.process.hang_watch import THREAD_USE, HangWatch, PolicyTrouble
from router.process.systemd import Pulse
from router.record.access_log import AccessLog, access_log
from router.record.recorder import FactRecorder
from router.record.request_log import RequestLog, request_log_of
from router.record.trace import Tracer, below_of
from router.record.trace_export import exporter
from router.redis.url import redacted
from router.request.attempts import Attempts
from router.request.dispatcher import Dispatcher, FleetCalls
from router.request.inference import Inference
from router.request.prompts import PromptReader
from router.request.quotas import Tenants
from router.request.reading import InferenceReader
from router.request.service import Service
from router.request.tokenizing import Tokenizing
from router.request.worker_hits import WorkerHits
from router.server.client_port import ClientPort
from router.settings.extras import installed
from router.settings.load import reloadable, without
from router.settings.ports import grpc_port_settings, picker_settings
from router.settings.schema import Config
from router.settings.terms import (
    admin_hosts,
    attempt_terms,
    core_settings,
    discovery_terms,
    fleet_terms,
    inference_terms,
    render_terms,
    replica_terms,
    request_log_terms,
    token_probe_terms,
    tokenizer_terms,
)
from router.tokens.check import TokenCheck
from router.upstream.native import NativeRelay
from router.waiting.known_models import KnownModels
from router.waiting.queue import WorkerWait

# Extras are imported where the configuration asks for them, or where they are on by default and
# there (`router.settings.extras`).
if TYPE_CHECKING:
    from router.admin.app import AdminApi
    from router.kserve.grpc_port import GrpcPort
    from router.kserve.port import KservePort
    from router.migration.stream import Migrations
    from router.names.model_names import ModelNames
    from router.picker.port import PickerPort
    from router.replicas.former import FormerRouters, OpenRequestReporter
    from router.replicas.replica import Replica
    from router.restart.saved_caches import StateKeeper

log = logging.getLogger(__name__)

_WORKER_SOCKETS = 5
_SPARE_SOCKETS = 64  # of workers that were removed and are being closed
_READING_THREADS = 2  # of each kind
_QUIET_TICK_S = 0.5
_LAST_POLLS_S = 2.5  # for answers under way: TensorRT-LLM waits up to 2 s for events


class Router:
    """All parts of the router, wired together. Lifetime: process."""

    def __init__(
        self, config: Config, http: aiohttp.ClientSession, trust: WorkerTrust | None = None
    ) -> None:
        """Build all parts for `config`. `trust` is the TLS towards workers; None takes it from
        `config`, but then not for the requests that `http` sends.
        """
        self.config = config
        core = _core(config)
        calls = self._fleet_calls()
        self.dispatcher = Dispatcher(core, time.monotonic, calls, _recorder(config, core))
        self.hang_watch = HangWatch(core.guard, time.monotonic, config.policy_hang_s)
        self._request_log = request_log_of(
            request_log_terms(config), core, lambda: len(self.fleet.members)
        )
        self.zmq = zmq.asyncio.Context()
        # A worker has up to five sockets: its stream, a replay, and monitors of connections (two
        # ends each).
        self.zmq.set(zmq.MAX_SOCKETS, _WORKER_SOCKETS * config.limits.workers + _SPARE_SOCKETS)
        self._threads = _reading_threads()
        self._rings = _rings(config, time.monotonic)
        keys = self.api_keys = self._rings.get("api_keys_file")
        replica = self.replica = self._replica(config, core)
        self._context = FleetContext(
            http,
            self.zmq,
            time.monotonic,
            self.dispatcher.handle_fact if config.kv_state is None else self._on_worker_fact,
            fleet_terms(config),
            first_seq=core.caches.first_question,
            wants_snapshot=core.caches.wants_snapshot,
            trust=trust or WorkerTrust(config.workers_tls),
            relay=NativeRelay.if_available(config.relay),
            grpc=_grpc_opener(config, lambda: self._context.terms.relay),
            claim=None if replica is None else replica.sharing.kv.claim,
            worker_count=lambda: len(self.fleet.members),
            borrow=None if replica is None else replica.borrowing.borrow,
        )
        self.fleet = FleetManager(self._context, config.limits.workers)
        self.roles = _roles(config, self.fleet, core)
        self.discovery = self._discovery()
        self._keeper = _keeper(config, core, self.fleet)
        self.tokenizing = self._tokenizing(http)
        prompts, check = self.tokenizing.reader, self.tokenizing.check
        lines = self._request_log
        self.hits = WorkerHits(core, check, self.tokenizing.renderers, prompts.has_tokenizer)
        self.metrics = router_metrics(core, self.fleet, prompts, lines, check, self._keeper)
        self.metrics.register(lambda: hit_metrics(core, self.fleet, self.hits))
        self.access, self.traces = _access_log(config), exporter(config.tracing)
        self.pulse = Pulse(self.relay_turn, time.monotonic)
        self._names: ModelNames | None = None
        self.waiting = self._waiting(core)
        self.service = self._service(config, lines, check)
        self.inference = _inference(self.service, prompts, config, keys)
        self._kserve = _kserve(self.service, self.inference, http)
        self._migrations: Migrations | None = None
        self.former = self._former(config)
        self._show_more(core)
        self.admin = self._admin_api(config) if installed("admin") else None
        self._settle_terms()
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the caches that an earlier router saved, before any worker joins, and begin to watch
        the key files.
        """
        if self._context.relay is not None:  # now, not when open files have run out
            self._context.relay.thread()
        self._watching = [asyncio.create_task(ring.watch()) for ring in self._rings.values()]
        if self.admin is not None:
            self._watching.append(asyncio.create_task(self.admin.ui.run(), name="page"))
        if self._keeper is not None:
            await self._keeper.load()
            self._keeper.start(lambda: self.config.intervals.kv_state_s)
        if self.replica is not None:
            self.replica.link.start()

    def _replica(self, config: Config, core: RouterCore) -> Replica | None:
        """Return this router's part among several replicas, or None if `state` is not
        configured.
        """
        if config.state is None:
            return None
        from router.replicas.replica import Replica

        use = None if self.api_keys is None else self.api_keys.shared_use
        return Replica(replica_terms(config), core, self.dispatcher.handle_fact, use)

    def _former(self, config: Config) -> FormerRouters | None:
        """Return the object that follows earlier routers at a hot restart, or None if `hot_restart`
        is not configured.
        """
        if config.hot_restart is None:
            return None
        from router.replicas.former import FormerRouters

        core, tell = self.dispatcher.core, self.dispatcher.handle_fact
        return FormerRouters(core, tell, time.monotonic, _shares(config))

    def _discovery(self) -> Discovery:
        def opened(text: str) -> Source:
            from router.discovery.opening import open_source

            return open_source(text, lambda: discovery_terms(self.config))

        return Discovery(self.fleet, opened, lambda: self.config.discovery_grace_s)

    def _tokenizing(self, http: aiohttp.ClientSession) -> Tokenizing:
        return Tokenizing(
            tokenizer_terms(self.config),
            lambda: token_probe_terms(self.config),
            lambda: render_terms(self.config),
            self._threads,
            self.fleet,
            http,
        )

    def _admin_api(self, config: Config) -> AdminApi:
        from router.admin.app import AdminApi

        pages: dict[str, Mapping[str, Handler]] = {}
        replicas: Callable[[], list[dict[str, Any]]] = list
        if installed("doctor"):
            from router.doctor.page import DoctorPages

            members = self.fleet.members
            doctor = DoctorPages(self.dispatcher, members, lambda: exposition(self.metrics))
            pages["/doctor"] = {"GET": doctor.examine}
        if self.replica is not None:
            from router.replicas.shown import replicas_shown

            replicas = partial(replicas_shown, self.replica)
        parts = (self.dispatcher, self.service, self.fleet, self.inference, self.service.latest)
        return AdminApi(
            *parts,
            self.metrics,
            keys=self._rings.get("admin_keys_file"),
            pages=pages,
            hosts=admin_hosts(config),
            sources=self.discovery.shown,
            replicas=replicas,
        )

    def _service(
        self, config: Config, request_log: RequestLog | None, check: TokenCheck
    ) -> Service:
        traced = self.traces is not None
        return Service(
            self.dispatcher,
            self.fleet,
            self.metrics,
            request_log,
            check,
            hits=self.hits,
            renderers=self.tokenizing.renderers,
            access=self.access,
            traces=self.traces,
            tracer=Tracer(below_of(config.tracing.sample)) if traced else None,
            hangs=self.pulse.hangs,
            refuses=lambda: self.config.drain_refuses,
            waiting=self.waiting,
        )

    def _waiting(self, core: RouterCore) -> WorkerWait:
        def named() -> frozenset[str]:
            models = [*self.config.waiting.models]
            models += filter(None, (one.spec.model for one in self.fleet.members.values()))
            return frozenset(models if self._names is None else [*models, *self._names.models()])

        clock = self.dispatcher.clock
        known = KnownModels(core.workers, clock, named, lambda: self.config.waiting.seen_s)
        return WorkerWait(core.workers, known, clock, lambda: self.config.waiting)

    def _fleet_calls(self) -> FleetCalls:
        """Return the functions by which the core calls the fleet, which is built after the core."""
        return FleetCalls(
            resync=self._resync,
            probe=lambda worker_id, within_s: self.fleet.probe(worker_id, within_s),
            given_up=lambda worker_id: self.fleet.given_up(worker_id),
            stalled=lambda worker_id: self.fleet.stalled(worker_id),
        )

    def _show_more(self, core: RouterCore) -> None:
        self._picked: Counter[str] = Counter()  # by the endpoint picker
        register = self.metrics.register
        if installed("migration"):  # whose counts are shown while they are zero, too
            from router.migration.metrics import MigrationMetrics

            self._moved = MigrationMetrics()
            register(self._moved.collect)
        if installed("names"):
            from router.names.metrics import NameMetrics

            self._name_counts = NameMetrics()
            register(self._name_counts.collect)
        register(lambda: log_metrics("access", self.access))
        register(lambda: tracing_metrics(self.traces))
        register(lambda: picker_metrics(self._picked))
        register(lambda: tenant_metrics(self.service.counts))
        register(lambda: held_metrics(core, self.dispatcher.clock()))
        register(lambda: model_metrics(core, self.waiting))
        register(lambda: discovery_metrics(self.discovery, self.fleet))
        register(lambda: replica_metrics(self.replica))
        register(lambda: former_metrics(self.former))
        register(lambda: role_metrics(self.roles))
        register(lambda: render_metrics(self.tokenizing.renderers, self.tokenizing.rendered))

    def _movers(self, config: Config) -> Migrations | None:
        """Return the part that moves running streams to another worker; None while
        `migration.moves` is 0.
        """
        if not config.migration.moves:
            return None
        if self._migrations is None:
            from router.migration.stream import Migrations

            self._migrations = Migrations(self.service, self._moved, config.migration)
        self._migrations.renew(config.migration)
        return self._migrations

    def _name_models(self, config: Config) -> None:
        """Give the core the model names that the configuration defines; without any, clients' model
        names are not looked up.
        """
        if not (config.names.aliases or config.names.targets):
            self.service.names = None
            if self._names is not None:  # it is asked which models are known
                self._names.renew(config.names)
            return
        if self._names is None:
            from router.names.model_names import ModelNames

            workers, known = self.dispatcher.core.workers, self.waiting.known.__contains__
            self._names = ModelNames(config.names, workers, self._name_counts, known)
        self._names.renew(config.names)
        self.service.names = self._names

    def client_port(self) -> ClientPort:
        """Return the handler of all requests at the client port."""
        forwards = self.config.unknown_paths == "forward"
        return ClientPort(self.inference.handle, self.service, forwards, self._dialects)

    @property
    def _dialects(self) -> tuple[KservePort, ...]:
        return () if self._kserve is None else (self._kserve,)

    def grpc_port(self) -> GrpcPort | None:
        """Return the port of KServe's gRPC, or None if the configuration has none."""
        if self.config.grpc_port < 0 or self._kserve is None:
            return None
        from router.kserve.grpc_port import GrpcPort

        return GrpcPort(
            self.inference, self.service, self._kserve, lambda: grpc_port_settings(self.config)
        )

    def picker_port(self) -> PickerPort | None:
        """Return the port of the endpoint picker, or None if the configuration has none."""
        if self.config.picker.port < 0:
            return None
        from router.picker.port import PickerPort

        return PickerPort(
            self.inference,
            self.service,
            self._dialects,
            lambda: picker_settings(self.config),
            self._picked,
            self.discovery.priority_of,
        )

    async def relay_turn(self) -> None:
        """Wait until the relay's thread has run once since this call."""
        if self._context.relay is not None:
            await self._context.relay.turn()

    async def tick(self) -> None:
        """Send the core the current time at each tick, until cancelled, and run what is due at a
        tick: the waiting queue, workers that leave, and changes of roles.
        """
        core = self.dispatcher.core
        while True:
            await self._until_tick()
            self.dispatcher.handle_fact(Tick(self.dispatcher.clock()))
            self.waiting.tick()
            self.fleet.sweep(lambda worker_id: len(core.ledger.on_worker(worker_id)))
            self.service.log_unusable_roles()
            if self._kserve is not None:
                self._kserve.check_inputs()
            if self.roles is not None:
                self.roles.look()

    async def _until_tick(self) -> None:
        """Wait until the next tick is due: `tick_s` seconds, or up to `_QUIET_TICK_S` while no
        request is running.
        """
        tick_s, core, busy = self.config.intervals.tick_s, self.dispatcher.core, self._context.busy
        for _ in range(max(int(_QUIET_TICK_S / tick_s), 1)):
            await self._context.pauses.sleep(tick_s)
            if not core.is_quiet or len(self.waiting):
                busy.set()
                return
        busy.clear()

    def apply(self, config: Config) -> list[str]:
        """Replace the configuration. Return the changes that a running router cannot make, with
        reasons; a worker for which there is no slot is among them.

        Raises ValueError for a policy or a worker that cannot be used; then nothing has changed.
        """
        applied, refused = reloadable(self.config, config)
        policy = load(config.policy)
        specs = [parse_worker_spec(spec) for spec in config.workers]
        if "policy" in applied:
            self.dispatcher.set_policy(policy)
            if self._request_log is not None:
                self._request_log.set_policy(policy.spec)
        lines = [f"{key}: {reason}" for key, reason in refused.items()]
        if "workers" in applied or "discovery" in applied:
            lines += self.discovery.apply(specs, config.discovery)
        self.config = without(refused, config, self.config)
        self._settle_terms()
        if self.replica is not None:
            self.replica.renew(replica_terms(self.config))
        if "log_level" in applied:
            logging.getLogger().setLevel(config.log_level.upper())
        log.info("reloaded; changed: %s", ", ".join(applied) or "nothing")
        return lines

    def _settle_terms(self) -> None:
        """Give each part of the router its values from the current configuration."""
        config = self.config
        self._context.renew(fleet_terms(config))
        if self.admin is not None:
            self.admin.renew(admin_hosts(config))
        self.inference.renew(inference_terms(config), attempt_terms(config), self._movers(config))
        self._name_models(config)
        if self._kserve is not None:
            self._kserve.renew(given_roles(config.triton_inputs), config.triton_admin == "load")
        self.dispatcher.set_model_limits(config.model_limits)
        if self.service.tracer is not None:
            self.service.tracer.renew(below_of(config.tracing.sample))

    def reload_keys(self) -> None:
        """Read the files of clients' keys again. If a file cannot be used, log that and keep its
        old keys.
        """
        for name, ring in self._rings.items():
            try:
                ring.reload()
            except KeyFileError as error:
                log.error("%s not read anew, the old keys stay: %s", name, error)

    def reopen_files(self) -> None:
        """Open the log files again by their names, for a log rotation that moved the present files
        away.
        """
        if self._request_log is not None:
            self._request_log.reopen()
        if self.access is not None:
            self.access.reopen()

    async def save(self) -> None:
        """Save what the router knows of the workers' caches, so that the next router can start with
        it.
        """
        if self._keeper is not None:
            await self._keeper.save()

    def open_request_reporter(self, line: socket.socket) -> OpenRequestReporter:
        """Return the object that reports this router's running requests to the router that replaces
        it, over the connection `line`.
        """
        from router.replicas.former import OpenRequestReporter

        return OpenRequestReporter(line, self.dispatcher.core, time.monotonic)

    def retire(self, why: str) -> None:
        """Make `/ready` answer that the router is not ready from now on, with the reason `why`."""
        self.service.retire(why)

    def hand_over(self) -> None:
        """Make `/ready` answer no and stop saving caches, because another router has taken over."""
        self.retire("another router has taken over")
        if self._keeper is not None:
            self._keeper.retire()

    async def aclose(self) -> None:
        """Stop following workers, write all queued lines, and free sockets and threads."""
        for task in self._watching:
            task.cancel()
        if self.config.state is not None:  # while this router still reads the events for its peers
            await self._context.readers.finish(_LAST_POLLS_S)
        if self.replica is not None:
            await self.replica.aclose()
        if self.former is not None:
            await self.former.aclose()
        if self._request_log is not None:  # before the fleet goes, which a header counts
            await asyncio.to_thread(self._request_log.close)
        if self.access is not None:
            await asyncio.to_thread(self.access.close)
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        if self._keeper is not None:  # while the workers are still known
            await self._keeper.close()
        await self.tokenizing.close()
        await self.discovery.aclose()
        await self.fleet.aclose()
        if self._context.relay is not None:  # after the connections that it has to workers
            self._context.relay.stop()
        if self.dispatcher.recorder is not None:
            await asyncio.to_thread(self.dispatcher.recorder.close)
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        self.zmq.destroy(linger=0)

    def _on_worker_fact(self, fact: WorkerFact) -> None:
        if self._keeper is not None and isinstance(fact, WorkerChange):
            fact = self._keeper.with_saved_cache(fact)
        self.dispatcher.handle_fact(fact)

    def _resync(self, worker_id: int, from_seq: int) -> None:
        member = self.fleet.members.get(worker_id)
        if member is not None and member.feed is not None:
            member.feed.resync(from_seq)


def _core(config: Config) -> RouterCore:
    report, clock = PolicyTrouble().report, time.monotonic
    settings = core_settings(config)
    return RouterCore(load(config.policy), settings, config.seed, report, clock, THREAD_USE)


def _recorder(config: Config, core: RouterCore) -> FactRecorder | None:
    if config.record_facts is None:
        return None
    path = Path(config.record_facts)
    return FactRecorder(path, config.record_facts_bytes, core, config.seed)


def _access_log(config: Config) -> AccessLog | None:
    if config.access_log is None:
        return None
    return access_log(config.access_log, config.access_log_bytes)


def _shares(config: Config) -> str:
    """Return a text that names the fleet and the Redis through which this router shares state; two
    routers share state if their texts are equal. It is "" if this router shares none.
    """
    return "" if config.state is None else f"{config.replicas.fleet} {redacted(config.state)}"


def _grpc_opener(config: Config, limits: Callable[[], RelayLimits]) -> GrpcOpener | None:
    if config.grpc_port < 0:
        return None
    from router.kserve.grpc_upstream import grpc_opener

    return grpc_opener(time.monotonic, config.workers_tls, limits)


def _kserve(
    service: Service, inference: Inference, http: aiohttp.ClientSession
) -> KservePort | None:
    if not installed("kserve"):
        return None
    from router.kserve.port import KservePort

    return KservePort(service, inference.tenants, http)


def _reading_threads() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Return two thread pools: one that tokenizes prompts, and one that reads long bodies, so that
    short prompts need not wait for long bodies.
    """
    one, other = (
        ThreadPoolExecutor(_READING_THREADS, thread_name_prefix=name)
        for name in ("tokenizer", "long-body")
    )
    return one, other


def _inference(
    service: Service, prompts: PromptReader, config: Config, keys: KeyRing | None
) -> Inference:
    """Return the handler of inference paths; `keys` are clients' API keys."""
    peers = tuple(ip_network(peer) for peer in config.trusted_peers)
    tenants = Tenants(keys, config.tenant_header, peers)
    asks_keys = tenants.asks_keys
    attempts = Attempts(service, attempt_terms(config), not asks_keys)
    reader = InferenceReader(service, prompts, inference_terms(config))
    return Inference(service, tenants, reader, attempts)


def _roles(config: Config, fleet: FleetManager, core: RouterCore) -> RoleKeeper | None:
    return RoleKeeper(fleet, core, config.roles) if config.roles.follow else None


def _keeper(config: Config, core: RouterCore, fleet: FleetManager) -> StateKeeper | None:
    if config.kv_state is None:
        return None
    from router.restart.saved_caches import StateKeeper

    return StateKeeper(Path(config.kv_state), core, lambda: fleet.members)


def _rings(config: Config, clock: Callable[[], float]) -> dict[str, KeyRing]:
    """Return the keys of each port that asks for keys, by configuration key. Raises
    KeyFileError.
    """
    files = {"api_keys_file": config.api_keys_file, "admin_keys_file": config.admin_keys_file}
    return {name: KeyRing(Path(path), clock) for name, path in files.items() if path is not None}
