"""Runs a gRPC server with its socket, TLS, health service and shutdown; its caller provides the
methods.

The health service is that of grpc/grpc, `doc/health-checking.md`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from router.body.protobuf import message_classes
from router.http.tls import Tls, TlsError, pem, server_tls
from router.request.service import Service
from router.server.settings import GrpcPortSettings
from router.server.sockets import cannot_listen, check_free

_HEALTH = "grpc.health.v1.Health"
_WATCH_S = 0.5  # interval between two checks of a health watch, seconds
_Asked = message_classes("grpc.health.v1", {"HealthCheckRequest": "string service"})[
    "HealthCheckRequest"
]
Serves = Callable[[str], bool | None]  # by a service's name; None: there is none

log = logging.getLogger(__name__)


def serves(service: Service) -> bool:
    """Return whether a request that arrives now would be sent to a worker."""
    return not service.reasons() and service.takes_any()


class GrpcPeer:
    """The facts that a gRPC request needs about its client's connection. Lifetime: call."""

    transport = None
    goes_on = True

    def __init__(self, address: str) -> None:
        """Parse an address in gRPC's form, `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`,
        percent-encoded.
        """
        kind, _, rest = address.partition(":")
        host = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")
        self.host = host.strip("[]") if kind in ("ipv4", "ipv6") else ""


class GrpcListener:
    """Serves gRPC calls at one port, with TLS or without, until it is closed. Lifetime: process."""

    def __init__(
        self,
        find: Callable[[str], Any],
        health: Serves,
        settings: Callable[[], GrpcPortSettings],
    ) -> None:
        """Make a server that does not listen yet. `find` returns the handler for a method, or None;
        `settings` returns the present settings.
        """
        self._find = find
        self._health = health
        self._settings = settings
        self._server: aio.Server | None = None
        self.address = ""  # host and port, once it listens
        self.stopping = asyncio.Event()  # set once it takes no more calls
        self._stopping: asyncio.Task[None] | None = None
        self._credentials: grpc.ServerCertificateConfiguration | None = None

    async def listen(self) -> None:
        """Begin to serve at the configured address. Raises OSError if the port is taken, and
        TlsError if the certificates are unusable.
        """
        place = self._settings()
        host = f"[{place.host}]" if ":" in place.host else place.host
        self._server = aio.server(
            options=(
                ("grpc.so_reuseport", int(place.shared)),
                ("grpc.max_receive_message_length", place.message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", place.header_bytes),
                ("grpc.server_handshake_timeout_ms", int(place.handshake_s * 1e3)),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", 60_000),  # a client that is gone without a word
                ("grpc.keepalive_timeout_ms", 20_000),
            ),
            maximum_concurrent_rpcs=place.calls,
        )
        self._server.add_generic_rpc_handlers((_Handlers(self._handler),))
        try:  # gRPC's library does not say why it cannot listen
            check_free(place.host, place.port, shared=place.shared)
        except OSError as error:
            raise cannot_listen(place.host, place.port, error, place.flag) from error
        try:
            self._read_files(place.tls)
            at = f"{host}:{place.port}"
            if self._credentials is None:
                port = self._server.add_insecure_port(at)
            else:
                port = self._server.add_secure_port(at, self._secure(place.tls))
        except RuntimeError as error:
            raise cannot_listen(place.host, place.port, OSError(str(error)), place.flag) from error
        await self._server.start()
        self.address = f"{host}:{port}"

    def renew(self) -> None:
        """Read the TLS files again. If they are unusable, the earlier ones stay in use."""
        try:
            self._read_files(self._settings().tls)
        except TlsError as error:
            log.error("TLS files not read anew for gRPC, the old ones stay: %s", error)

    def _read_files(self, tls: Tls) -> None:
        """Read the TLS files. Raises TlsError if they are unusable."""
        if tls.cert is None:
            return
        server_tls(tls)  # its error says what is wrong with the files
        key, cert, ca = pem(tls.key or tls.cert), pem(tls.cert), None
        if tls.client_ca is not None:
            ca = pem(tls.client_ca)
        self._credentials = grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def _secure(self, tls: Tls) -> grpc.ServerCredentials:
        """Return TLS credentials that gRPC asks for again at each handshake, so that new
        certificates are used.
        """
        assert self._credentials is not None, "read"
        return grpc.dynamic_ssl_server_credentials(
            self._credentials, lambda: self._credentials, tls.client_ca is not None
        )

    def accept_no_more(self) -> None:
        """Stop accepting calls, because another router listens now. Running calls may take up to
        `handover_s`; then they are cut off.
        """
        self._stop(self._settings().handover_s)

    async def left(self) -> None:
        """Wait until no call is running, after `accept_no_more`."""
        if self._stopping is not None:
            await self._stopping

    async def aclose(self) -> None:
        """Stop accepting calls, and return once no call is running, at the latest after
        `shutdown_s`, even if calls were granted more time before.
        """
        grace_s = self._settings().shutdown_s
        if self._server is not None and self._stopping is not None:
            await self._server.stop(grace_s)
        self._stop(grace_s)
        await self.left()

    def _stop(self, grace_s: float) -> None:
        self.stopping.set()
        if self._server is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._server.stop(grace_s))

    def _handler(self, method: str) -> Any:
        if method == f"/{_HEALTH}/Check":
            return grpc.unary_unary_rpc_method_handler(self._check)
        if method == f"/{_HEALTH}/Watch":
            return grpc.unary_stream_rpc_method_handler(self._watch)
        return self._find(method)

    async def _check(self, message: bytes, context: Any) -> bytes:
        """Answer the call grpc.health.v1.Health/Check."""
        try:
            name: str = _Asked.FromString(message).service
        except DecodeError:
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details("the message is no HealthCheckRequest")
            return b""
        well = self._health(name)
        if well is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("no such service here; ask with an empty name")
            return b""
        return _answer(well)

    async def _watch(self, message: bytes, context: Any) -> AsyncIterator[bytes]:
        """Answer the call grpc.health.v1.Health/Watch until the router ends."""
        try:
            name: str = _Asked.FromString(message).service
        except DecodeError:
            name = ""
        told: bool | None = None
        while told is None or not self.stopping.is_set():
            well = bool(self._health(name))
            if well is not told:
                told = well
                yield _answer(well)
            with suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_S):
                    await self.stopping.wait()
        if told:
            yield _answer(False)


def _answer(well: bool) -> bytes:
    """Return an encoded HealthCheckResponse, whose only field is 1 for SERVING or 2 for
    NOT_SERVING.
    """
    return b"\x08\x01" if well else b"\x08\x02"


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler for a gRPC call. Lifetime: process."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler for a call, or None if there is none."""
        return self._find(details.method)
