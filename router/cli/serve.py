"""Runs the router as a program, which listens at its ports, prints that it is ready, and stops on a
signal.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from router.assembly import Router
from router.collectors.ports_and_logs import server_metrics
from router.engines.worker_spec import parse_worker_spec
from router.fleet.upstreams import WorkerTrust
from router.process.garbage import release, settle
from router.process.systemd import notify, notify_ready, reloading
from router.server.listener import AdminListener, ClientListener, enough
from router.server.sockets import cannot_listen, listening_at
from router.settings.extras import not_served
from router.settings.ports import admin_port_settings, client_port_settings
from router.settings.rules import is_loopback
from router.settings.schema import Config

if TYPE_CHECKING:
    from router.kserve.grpc_port import GrpcPort
    from router.picker.port import PickerPort
    from router.restart.hot_restart import HandoverServer, Predecessor, RestartHandover

log = logging.getLogger(__name__)

_HEARD_S = 5.0  # for sources of workers to be read, while the router before serves
_OPEN_FILES = 65_536  # wanted; the system may allow fewer


async def serve(
    config: Config,
    read_config: Callable[[], Config],
    argv: Sequence[str] = (),
    before: Predecessor | None = None,
) -> None:
    """Run the router until SIGTERM or SIGINT. On SIGHUP, `read_config` reads the configuration
    again. `argv` has the arguments of this router's command, with which a next router is started in
    a hot restart. `before` is the previous router of a hot restart, or None. Raises OSError, whose
    text says which address cannot be bound, which file cannot be written, or that too few files may
    be open. Raises ValueError for a bad policy or key file.
    """
    files = enough(allow_many_files())
    faulthandler.enable()  # systemd ends what hangs by SIGABRT: the log then says where it stood
    for line in not_served():
        log.warning("%s", line)
    trust = WorkerTrust(config.workers_tls)
    async with trust.session() as http:
        router = Router(config, http, trust)
        server = Server(router, files, read_config, _follower(argv, config))
        server.handle_signals()
        ticking = asyncio.create_task(router.tick(), name="tick")
        checking = asyncio.create_task(router.tokenizing.run(), name="token check")
        beating = asyncio.create_task(server.pulse.run(), name="pulse")
        router.hang_watch.start()
        try:
            await server.start(before)
            await _until(server.stop, ticking, beating)
        finally:
            await server.aclose()
            for task in (ticking, checking, beating):
                task.cancel()
            await asyncio.wait([ticking, checking, beating])
            await router.aclose()
            server.handle_stop_signals_only()
            router.hang_watch.stop()
            release()


class Server:
    """Runs a router with its ports in one process. Lifetime: process."""

    def __init__(
        self,
        router: Router,
        files: int,
        read_config: Callable[[], Config],
        follow: Callable[[], None],
    ) -> None:
        """Make the server of a router. `files` is the number of files that may be open. `follow`
        starts the next router of a hot restart. Raises TlsError for certificates that cannot be
        used.
        """
        self.stop = asyncio.Event()
        self._router = router
        self._read_config = read_config
        self._follow = follow
        self._client = ClientListener(lambda: client_port_settings(router.config), files)
        self._admin: AdminListener | None = None
        if router.admin is not None:
            self._admin = AdminListener(lambda: admin_port_settings(router.config))
        self._grpc: GrpcPort | None = None
        self._picker: PickerPort | None = None
        self._sockets: tuple[list[socket.socket], list[socket.socket]] = ([], [])
        self._handover: HandoverServer | None = None
        self.pulse = router.pulse
        self._listens = False  # both ports do
        self._lingering: asyncio.Task[None] | None = None  # another router serves in our place
        router.metrics.register(lambda: server_metrics(self._client.server))

    def handle_signals(self) -> None:
        """Begin to handle the signals that stop, reload or replace the router."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR2, self._follow)

    def handle_stop_signals_only(self) -> None:
        """Handle only the signals that stop the router from now on. gRPC keeps a reference to the
        event loop; handlers that stay in the loop would keep the router and its native objects
        until after the end of the interpreter.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGHUP, signal.SIGUSR2):
            loop.add_signal_handler(number, _nothing)

    async def start(self, before: Predecessor | None) -> None:
        """Learn the workers, listen at the ports, and print that the router is ready. Raises
        OSError or ReplicaRefusedError if the router cannot start.
        """
        router, config = self._router, self._router.config
        if router.replica is not None:
            await router.replica.link.agree()
        self._sockets = _sockets(config, before)
        handover = None if before is None else before.handover
        if handover is None:
            client, admin = await self._listen()
        await router.start()
        workers = [parse_worker_spec(spec) for spec in config.workers]
        for spec in workers:
            router.fleet.add(spec)
        found = () if handover is None else handover.found
        router.discovery.start(workers, config.discovery, found)
        if before is not None and handover is not None:  # it serves meanwhile
            await router.discovery.wait_until_reported(_HEARD_S)
            await self._resume(before, handover)
            client, admin = await self._listen()
        if self._admin is not None:
            _warn_of_exposure(config)
        _warn_of_no_worker(config, admin)
        settle()
        await self._follow_on(before)
        notify_ready()
        self.pulse.serve(True)
        shown = f" admin={admin}" if admin else ""
        grpc = "" if self._grpc is None else f" grpc={self._grpc.address}"
        print(f"ready {client}{shown}{grpc}{self._picker_shown()}", flush=True)

    async def _resume(self, before: Predecessor, handover: RestartHandover) -> None:
        """Add the workers of the previous router."""
        from router.cli.handover import resume

        router = self._router
        await resume(router, handover)
        if handover.tells and router.former is not None:
            await router.former.follow(before.line, handover.shares)

    async def _follow_on(self, before: Predecessor | None) -> None:
        """Tell the previous router that this router serves, and wait for a next router that
        replaces this one.
        """
        router, socket_path = self._router, self._router.config.hot_restart
        if socket_path is None or router.former is None:
            return
        from router.restart.hot_restart import HandoverServer

        if before is not None:
            await before.serving(router.former.wait_until_gone if before.handover.tells else None)
            router.former.serve(zip(before.lines, before.handover.lines, strict=True))
        path = Path(socket_path)
        self._handover = HandoverServer(
            path, self.leave, self.hand_over, router.open_request_reporter
        )
        self._handover.start()

    def _picker_shown(self) -> str:
        """Return the picker's addresses for the ready line."""
        if (picker := self._picker) is None:
            return ""
        health = f" health={picker.probed.address}" if picker.probed.address else ""
        return f" picker={picker.address}{health}"

    async def leave(self) -> tuple[RestartHandover, list[socket.socket]]:
        """Return the state and the listening sockets that the next router of a hot restart takes
        over.
        """
        from router.cli.handover import added_by_hand, workers_of
        from router.restart.hot_restart import RestartHandover

        await self._router.save()
        added, workers = added_by_hand(self._router), workers_of(self._router)
        client, admin = self._sockets
        found, former = self._router.discovery.found(), self._router.former
        assert former is not None, "there may be a follower"
        lines = former.lines()
        shares = tuple(shared for _, shared in lines)
        handover = RestartHandover(
            *(len(client), len(admin), added, workers, found), True, former.shares, shares
        )
        return handover, [*client, *admin, *(line for line, _ in lines)]

    async def hand_over(self) -> None:
        """Accept no more connections, because another router serves now, and stop when all requests
        are answered.
        """
        self.pulse.serve(False)
        self._router.hand_over()
        self._client.accept_no_more()
        if self._admin is not None:
            self._admin.accept_no_more()
        for port in (self._grpc, self._picker):
            if port is not None:
                port.accept_no_more()
        if self._router.former is not None:
            await self._router.former.leave()
        self._lingering = asyncio.create_task(self._linger(), name="after a hot restart")

    async def _linger(self) -> None:
        """Stop the router once all connections have ended, or after a time limit."""
        handover_s = self._router.config.timeouts.handover_s
        log.info("handed over: what runs here gets %g s (timeouts.handover_s)", handover_s)
        ports = [port for port in (self._client, self._grpc, self._picker) if port is not None]
        try:
            async with asyncio.timeout(handover_s):
                await asyncio.gather(*(port.left() for port in ports))
        except TimeoutError:
            left = self._client.server.connections
            log.warning("timeouts.handover_s is over with %d connections open", left)
        self.stop.set()

    async def aclose(self) -> None:
        """Let running requests finish, and then close the router."""
        router, shutdown_s = self._router, self._router.config.timeouts.shutdown_s
        if self._lingering is not None:
            self._lingering.cancel()
        else:
            notify("STOPPING=1")
        router.retire("the router stops")
        if self._listens:
            log.info("stopping: no new requests; running ones get %g s", shutdown_s)
        # They have been sent nowhere yet: another router may take them at once.
        why = "the router is shutting down"
        if held := router.dispatcher.turn_away_held(why) + router.waiting.turn_away(why):
            log.info("turned away %d requests that waited for a worker", held)
        closing = [self._client.aclose()]
        closing += [port.aclose() for port in (self._grpc, self._picker) if port is not None]
        await asyncio.gather(*closing)
        if self._admin is not None:  # last: it shows how the requests end
            await self._admin.aclose()
        if self._handover is not None:
            await self._handover.aclose()

    async def _listen(self) -> tuple[str, str]:
        """Return the URLs of the client port and the admin port; a URL is "" if the port is not
        served.
        """
        router = self._router
        client = await self._client.listen(router.client_port(), self._sockets[0])
        self._grpc = router.grpc_port()
        if self._grpc is not None:
            await self._grpc.listen()
        self._picker = router.picker_port()
        if self._picker is not None:
            await self._picker.listen()
        admin = ""
        if self._admin is not None and router.admin is not None:
            admin = await self._admin.listen(router.admin, self._sockets[1])
        self._listens = True
        return client, admin

    def _reload(self) -> None:
        """Read the configuration again. An invalid one changes nothing, but logs are reopened in
        any case.
        """
        with reloading() if self.pulse.serves else nullcontext():
            self._router.reopen_files()
            self._client.renew()
            if self._admin is not None:
                self._admin.renew()
            for port in (self._grpc, self._picker):
                if port is not None:
                    port.renew()
            self._router.reload_keys()
            try:
                refused = self._router.apply(self._read_config())
            except ValueError as error:
                log.error("reload refused, the old configuration stays: %s", error)
                return
            self._client.settle()
            if self._admin is not None:
                self._admin.settle()
            if self._picker is not None:
                self._picker.settle()
            for line in refused:
                log.warning("not changed while running: %s", line)


def _sockets(
    config: Config, before: Predecessor | None
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return the sockets that listen for clients and for the admin port. A list is empty if the
    port makes its own sockets. Raises OSError, whose text says which address cannot be bound.
    """
    if config.hot_restart is None:
        return [], []
    found = []
    inherited = ([], []) if before is None else (before.client, before.admin)
    client = config.host, config.port, config.reuse_port
    admin = config.admin_host, config.admin_port, False
    for (host, port, shared), sockets in zip((client, admin), inherited, strict=True):
        try:
            found.append(listening_at(host, port, sockets, shared=shared))
        except OSError as error:
            raise cannot_listen(host, port, error) from error
    return found[0], found[1]


def allow_many_files() -> int:
    """Raise the limit of open files, and return it.

    Each request in flight takes two sockets, and the usual soft limit is 1,024 open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


async def _until(stop: asyncio.Event, *lasting: asyncio.Task[None]) -> None:
    """Wait until `stop` is set or one of the `lasting` tasks ends. Raises the error of such a task,
    because its end is a defect.
    """
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([stopping, *lasting], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in lasting:
        if task.done():
            task.result()


def _follower(argv: Sequence[str], config: Config) -> Callable[[], None]:
    """Return a function that starts the next router of a hot restart with the same arguments."""
    if config.hot_restart is None:
        words = "SIGUSR2: no follower is started: the key `hot_restart` names no socket"
        return lambda: log.error(words)
    from router.restart.hot_restart import Successor

    return Successor(argv).start


def _nothing() -> None:
    """Do nothing when a signal arrives."""


def _warn_of_exposure(config: Config) -> None:
    if not (is_loopback(config.admin_host) or config.admin_keys_file):
        log.warning(
            "the admin port listens on %s, beyond loopback: whoever reaches it controls the router",
            config.admin_host,
        )


def _warn_of_no_worker(config: Config, admin: str) -> None:
    if not config.workers and not config.discovery:
        log.warning(
            "no worker to send requests to: start with --worker URL (or `workers` in the file) or "
            "--discover SOURCE%s",
            f", or POST one to {admin}/workers" if admin else "",
        )
