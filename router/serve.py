"""The router as a program: listens, announces itself, runs until told to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable
from ipaddress import ip_address

import aiohttp
from aiohttp import web

from router.assembly import Router
from router.config import Config
from router.http.client_reply import SERVER_OPTIONS
from router.worker_spec import parse_worker_spec

log = logging.getLogger(__name__)

_OPEN_FILES = 65_536  # wanted; the system may allow fewer


async def serve(config: Config, read_config: Callable[[], Config]) -> None:
    """Run the router until SIGTERM or SIGINT; `read_config` reads it anew on SIGHUP.

    Raises OSError that says which address cannot be bound or which file not written, and why;
    ValueError for a bad policy or key file.
    """
    _allow_many_files()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector) as http:
        router = Router(config, http)
        loop.add_signal_handler(signal.SIGHUP, lambda: _reload(router, read_config))
        runners: list[web.AppRunner] = []
        ticking = asyncio.create_task(router.tick(), name="tick")
        checking = asyncio.create_task(router.tokenizing.run(), name="token check")
        router.hang_watch.start()
        try:
            client = await _listen(router.client_app(), config.host, config.port, config, runners)
            admin = await _listen(
                router.admin_app(), config.admin_host, config.admin_port, config, runners
            )
            await router.start()
            for spec in config.workers:
                router.fleet.add(parse_worker_spec(spec))
            _warn_of_exposure(config)
            _warn_of_no_worker(config, admin)
            print(f"ready http://{client} admin=http://{admin}", flush=True)
            await _until(stop, ticking)
        finally:
            log.info("stopping: no new requests; running ones get %g s", config.timeouts.shutdown_s)
            # They have been sent nowhere yet: another router may take them at once.
            if held := router.switchboard.turn_away_held("the router is shutting down"):
                log.info("turned away %d requests that waited for a worker", held)
            for runner in runners:
                await runner.cleanup()
            ticking.cancel()
            checking.cancel()
            await asyncio.wait([ticking, checking])
            await router.aclose()
            router.hang_watch.stop()


def _allow_many_files() -> None:
    """Each request in flight takes two sockets; the usual soft limit is 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _until(stop: asyncio.Event, ticking: asyncio.Task[None]) -> None:
    """Return when told to stop; a tick that dies is a defect and ends the program."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([stopping, ticking], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if ticking.done():
        ticking.result()


async def _listen(
    app: web.Application, host: str, port: int, config: Config, runners: list[web.AppRunner]
) -> str:
    """Serve `app`; returns the address it got, which matters for port 0."""
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=config.timeouts.shutdown_s,
        keepalive_timeout=config.timeouts.keep_alive_s,
        max_line_size=config.limits.header_bytes,
        max_field_size=config.limits.header_bytes,
        **SERVER_OPTIONS,
    )
    await runner.setup()
    runners.append(runner)
    site = web.TCPSite(runner, host, port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {_why(error)}") from error
    bound = runner.addresses[0]
    return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host's name cannot be resolved ({error.strerror})"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the host is no address of this machine"
    return error.strerror or str(error)


def _reload(router: Router, read_config: Callable[[], Config]) -> None:
    """A configuration that cannot be used changes nothing. Logs are begun anew all the same."""
    router.reopen_files()
    try:
        refused = router.apply(read_config())
    except ValueError as error:
        log.error("reload refused, the old configuration stays: %s", error)
        return
    for line in refused:
        log.warning("not changed while running: %s", line)


def _warn_of_exposure(config: Config) -> None:
    try:
        loopback = ip_address(config.admin_host).is_loopback
    except ValueError:
        loopback = config.admin_host == "localhost"
    if not loopback:
        log.warning(
            "the admin port listens on %s, beyond loopback: whoever reaches it controls the router",
            config.admin_host,
        )


def _warn_of_no_worker(config: Config, admin: str) -> None:
    if not config.workers:
        log.warning(
            "no worker to send requests to: start with --worker URL (or `workers` in the file), "
            "or POST one to http://%s/workers",
            admin,
        )
