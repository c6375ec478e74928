"""A satellite as a program: serves the client port, asks the leader for each decision."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from router.config.schema import Config
from router.front import inference
from router.http.client_app import client_app
from router.http.prompts import PromptReader
from router.http.token_check import TokenCheck
from router.keys.ring import KeyRing
from router.keys.tenant_counts import TenantCounts
from router.listening import Port
from router.logs import configure
from router.metrics.access import AccessCollector
from router.metrics.door import DoorCollector
from router.metrics.migration import MigrationMetrics
from router.metrics.tenant import TenantCollector
from router.metrics.token import TokenCollector
from router.metrics.tracing import TracingCollector
from router.processes.messages import Figures, Joined, Logged
from router.processes.metrics import SatelliteCollector
from router.processes.remote_desk import SILENT_S, RemoteDesk
from router.processes.seat import Seat, hold
from router.processes.tally import families_of
from router.processes.usage import used_here
from router.record.access_log import AccessLog, Told
from router.serve import allow_many_files
from router.tokenizing import encoder_of
from router.tracing.export import exporter

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_TOKENIZER_THREADS = 2


class ToldCheck(TokenCheck):
    """Believes the leader, who hears of all replies. Lifetime: process."""

    def __init__(self, desk: RemoteDesk) -> None:
        super().__init__(desk.clock, lambda: 0.0)
        self._desk = desk

    def trusts(self, model: str) -> bool:
        """See `TokenCheck`."""
        return self._desk.trusts(model)


class Satellite:
    """Its parts, wired. Lifetime: process."""

    def __init__(self, desk: RemoteDesk, config: Config) -> None:
        self._desk = desk
        self._config = config
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        check = ToldCheck(desk)
        self.reader = PromptReader(
            encoder_of(config),
            self._executor,
            time.time,
            config.limits.inflight_requests,
            check,
            drops_unused_tools=config.chat_drops_unused_tools,
        )
        self.registry = CollectorRegistry()
        self.collectors: list[Collector] = [
            self.registry,
            SatelliteCollector(desk.unanswered, self.reader),
            TokenCollector(check, self.reader.encoder),
        ]
        path = config.api_keys_file
        self.keys = None if path is None else KeyRing(Path(path), desk.clock, desk.key_secret)
        counts = TenantCounts()
        self.collectors.append(TenantCollector(counts))
        told = MigrationMetrics(self.registry)
        self.access: AccessLog | None = None
        if config.access_log is not None:
            offset_s = time.time() - time.monotonic()
            self.access = AccessLog(Told(_telling(desk)), offset_s)
        self.collectors.append(AccessCollector(self.access, satellite=True))
        parts = (desk, self.reader, lambda: self.config, self.keys, counts, told)
        self.traces = exporter(config.tracing)
        self.collectors.append(TracingCollector(self.traces))
        self._inference = inference(*parts, self.access, self.traces)

    @property
    def config(self) -> Config:
        """As the leader told it last."""
        return self._desk.config or self._config

    def app(self) -> web.Application:
        """The application of the client port."""
        config = self._config
        forwards = config.unknown_paths == "forward"
        return client_app(self._inference, self._desk, config.limits.body_bytes, forwards)

    async def beat(self) -> None:
        """Tell the leader our figures, for ever, and notice when it says nothing."""
        while True:
            usage, families = used_here(), families_of(self.collectors)
            self._desk.line.say(Figures(usage.cpu_s, usage.resident_bytes, families))
            self._desk.look()
            await asyncio.sleep(_BEAT_S)

    async def aclose(self) -> None:
        """Free sockets and threads."""
        if self.access is not None:
            await asyncio.to_thread(self.access.close)
            await asyncio.sleep(0)  # what it said last is told
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await self._desk.carriers.aclose()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _telling(desk: RemoteDesk) -> Callable[[bytes], None]:
    """What lets another thread tell lines to the leader."""
    loop = asyncio.get_running_loop()

    def tell(lines: bytes) -> None:
        if desk.lost:
            raise OSError("the leader is gone")
        loop.call_soon_threadsafe(desk.line.say, Logged(lines))

    return tell


async def serve_clients(seat: Seat) -> None:
    """Serve the client port until SIGTERM, SIGINT or the supervisor's end.

    Raises OSError where there is no leader or the port cannot be bound.
    """
    files = allow_many_files()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the leader tells what is new
    desk = RemoteDesk()
    handed = asyncio.Event()

    def told(words: list[str]) -> None:
        if words == ["succeeded"]:
            handed.set()
            stop.set()

    lifeline = await hold(seat.lifeline, told, stop.set)
    await loop.create_unix_connection(lambda: desk.line, str(seat.path))
    desk.line.say(Joined(seat.number, os.getpid()))
    async with asyncio.timeout(SILENT_S):
        await desk.welcomed.wait()
    if desk.config is None:
        raise ConnectionError(f"the leader is gone: {desk.lost}")
    config = desk.config
    configure(config.log_level, config.log_format, anew=True)
    satellite = Satellite(desk, config)
    port = Port(lambda: satellite.config, files)

    def settle() -> None:
        logging.getLogger().setLevel(satellite.config.log_level.upper())
        port.renew()

    desk.on_settings = settle
    satellite.collectors.append(DoorCollector({"client": port.door}))
    beating = [
        asyncio.create_task(satellite.beat(), name="beat"),
    ]
    if satellite.keys is not None:
        beating.append(asyncio.create_task(satellite.keys.watch(), name="keys"))
    try:
        await port.listen(satellite.app(), seat.client)
        lifeline.say("ready")
        await stop.wait()
    finally:
        if handed.is_set():  # another router listens with the same sockets
            port.accept_no_more()
            await port.until_left(config.timeouts.shutdown_s)
        await port.aclose()
        for task in beating:
            task.cancel()
        await asyncio.wait(beating)
        await satellite.aclose()
        desk.leaving = True
        desk.line.hang_up()
        lifeline.close()
