"""The configuration's sections of the door (`router.http.door`) and of TLS."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Door(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of what clients may do before they are a request. Lifetime: until the next reload."""

    connections: Annotated[
        int, Meta(ge=1, le=1_000_000, description="connections at a port at the same time")
    ] = 16_384
    connections_per_address: Annotated[
        int, Meta(ge=0, le=1_000_000, description="of these from one address; 0: any number")
    ] = 0
    head_bytes: Annotated[
        int, Meta(ge=1_024, le=1 << 22, description="a request's whole head, bytes")
    ] = 64 << 10
    arriving_bytes: Annotated[
        int, Meta(ge=1 << 16, le=1 << 44, description="requests still arriving, in all, bytes")
    ] = 1 << 30
    head_s: Annotated[
        float, Meta(ge=0.1, le=3_600.0, description="TLS, then a head, to be whole, seconds each")
    ] = 20.0
    body_s: Annotated[
        float, Meta(ge=0.1, le=3_600.0, description="a request's body, to be whole, seconds")
    ] = 60.0


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files of one port's TLS; read anew on reload. Lifetime: until the next reload."""

    cert: Annotated[
        str | None, Meta(description="PEM file, own certificate and chain; none: no TLS")
    ] = None
    key: Annotated[str | None, Meta(description="PEM file of the certificate's key")] = None
    client_ca: Annotated[
        str | None, Meta(description="PEM file; clients must show a certificate of one of these")
    ] = None


class WorkerTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How https workers are believed. Lifetime: until the next reload."""

    ca: Annotated[
        str | None, Meta(description="PEM file that workers' certificates go back to; none: system")
    ] = None
    cert: Annotated[
        str | None, Meta(description="PEM file, certificate shown to workers; none: none shown")
    ] = None
    key: Annotated[str | None, Meta(description="PEM file of that certificate's key")] = None
