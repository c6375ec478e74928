"""Defines the section `server` of the configuration, and the settings of ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from router.http.addresses import Network
from router.http.parser import RequestLimits
from router.http.tls import Tls


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits for connections and for requests that arrive. Lifetime: until the next reload."""

    connections: Annotated[
        int, Meta(ge=1, le=1_000_000, description="maximum number of open connections of one port")
    ] = 16_384
    connections_per_address: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="maximum number of open connections from one address; 0: no bound",
        ),
    ] = 0
    head_bytes: Annotated[
        int,
        Meta(ge=1_024, le=1 << 22, description="largest request line and headers together, bytes"),
    ] = 64 << 10
    arriving_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            le=1 << 44,
            description="largest memory of all requests that are still arriving, bytes",
        ),
    ] = 1 << 30
    head_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3_600.0,
            description="time for the TLS handshake, then for the request's headers, seconds",
        ),
    ] = 20.0
    body_s: Annotated[
        float,
        Meta(ge=0.1, le=3_600.0, description="time for a whole request body to arrive, seconds"),
    ] = 60.0


@dataclass(frozen=True, slots=True)
class PortSettings:
    """The address and limits of an HTTP port. Lifetime: until the next reload."""

    host: str
    port: int  # 0: the system chooses
    shared: bool  # other routers may listen there, too
    tls: Tls
    connections: ServerSettings
    requests: RequestLimits
    trusted: tuple[Network, ...]  # peers that may send private headers
    client_s: float  # for a client to read waiting bytes
    keep_alive_s: float  # of an idle connection
    shutdown_s: float  # for running requests when the port closes


@dataclass(frozen=True, slots=True)
class GrpcPortSettings:
    """The address and limits of a gRPC port. Lifetime: until the next reload."""

    host: str
    port: int  # 0: the system chooses
    shared: bool  # other routers may listen there, too
    tls: Tls
    calls: int  # at the same time
    message_bytes: int  # of the largest message that a client may send
    header_bytes: int
    handshake_s: float
    handover_s: float  # for running calls when another router takes over
    shutdown_s: float  # for running calls when the port closes
    flag: str  # that sets the port
