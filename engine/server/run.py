"""Runs the process of a worker: it binds ports, announces the worker, serves, and drains and stops
on a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.server.announcer import Announce, announcing
from engine.server.app import make_app
from engine.server.settings import ServedModel, WorkerSettings
from engine.server.worker import Worker
from engine.wire.tokens import Tokenizer

HEADERS_BYTES = 64 << 10
http_log = logging.getLogger("engine.server.http")

log = logging.getLogger(__name__)


class Unread(logging.Filter):
    """Counts invalid HTTP requests instead of logging them, because aiohttp's error quotes bytes
    that may be a prompt. Lifetime: worker.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._worker.counters.unread_requests += 1
        return False


@contextlib.asynccontextmanager
async def serving(
    settings: WorkerSettings, tokenizer: Tokenizer, served: ServedModel | None = None
) -> AsyncIterator[tuple[str, Worker]]:
    """Serve a worker at the given URL until the block ends.

    At the end the worker takes no new requests, lets running ones end for `settings.grace_s`
    seconds, and cuts the rest. Raises OSError or zmq.ZMQError if a port is taken. If the step loop
    fails, its exception cancels the block and is raised.
    """
    worker = Worker(settings, tokenizer, served)
    unread = Unread(worker)
    http_log.addFilter(unread)
    try:
        app_runner = web.AppRunner(
            make_app(worker),
            access_log=None,
            logger=http_log,
            handler_cancellation=True,  # a client that leaves stops its request at once
            shutdown_timeout=1.0,
            max_line_size=HEADERS_BYTES,
            max_field_size=HEADERS_BYTES,
        )
        await app_runner.setup()
        _watch(app_runner, worker)
        try:
            if worker.transfers is not None:
                await worker.transfers.listen()
            site = web.TCPSite(app_runner, settings.host, settings.port, backlog=1024)
            await site.start()
            async with asyncio.TaskGroup() as loops:
                tasks = [
                    loops.create_task(worker.runner.run(), name="steps"),
                    loops.create_task(worker.publisher.serve_replay(), name="replay"),
                ]
                yield _url(settings.host, app_runner), worker
                worker.draining = True
                await site.stop()
                await _drain(worker, settings.grace_s)
                for task in tasks:
                    task.cancel()
        finally:
            if worker.transfers is not None:
                await worker.transfers.close()
            await app_runner.cleanup()
    finally:
        http_log.removeFilter(unread)
        worker.close()


async def serve(
    settings: WorkerSettings,
    tokenizer: Tokenizer,
    on_ready: Callable[[str, Worker], None],
    served: ServedModel | None = None,
    announce: Announce | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal cuts the grace period short. `announce` is the
    registry in which routers find the worker; None means that the worker is not announced.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with serving(settings, tokenizer, served) as (url, worker):
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, _stop_or_cut, stop, worker)
        # All objects loaded so far stay. Visiting them in every full collection takes longer than a
        # step does (10 ms against 8).
        gc.freeze()
        on_ready(url, worker)
        async with announcing(announce, url, worker):
            await stop.wait()
        log.info("stopping: %d unfinished", worker.unfinished)


def _watch(app_runner: web.AppRunner, worker: Worker) -> None:
    """Let the worker know for each connection whether it ended with an error; aiohttp's handlers
    learn only that it ended.
    """
    server, transfers = app_runner.server, worker.transfers
    if server is None or transfers is None:
        return
    lost = server.connection_lost

    def connection_lost(handler: Any, exc: BaseException | None = None) -> None:
        lost(handler, exc)
        transfers.lost(handler, exc)

    server.connection_lost = connection_lost  # type: ignore[method-assign]


def _stop_or_cut(stop: asyncio.Event, worker: Worker) -> None:
    if stop.is_set():
        worker.cut_all()
    stop.set()


async def _drain(worker: Worker, grace_s: float) -> None:
    """Wait at most `grace_s` for the running requests, then cut them."""
    try:
        async with asyncio.timeout(grace_s):
            await worker.idle.wait()
    except TimeoutError:
        log.warning("cutting %d requests after %.1f s of grace", worker.unfinished, grace_s)
        worker.cut_all()


def _url(host: str, app_runner: web.AppRunner) -> str:
    """Return the URL of the worker with the port that is in use."""
    port = app_runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
