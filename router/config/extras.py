"""Sections of extras in the configuration, which has them whether an extra is installed or not."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Migration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Streamed answers whose worker is lost. Lifetime: until the next reload."""

    moves: Annotated[
        int, Meta(ge=0, le=16, description="times a begun stream may go on elsewhere; 0: never")
    ] = 0
    stream_tokens: Annotated[
        int, Meta(ge=1, le=1 << 24, description="prompt and answer kept of a stream, tokens")
    ] = 1 << 17
    tokens: Annotated[
        int, Meta(ge=1, le=1 << 32, description="the same of all streams, tokens of 4 bytes")
    ] = 1 << 25


class NameSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names that clients ask for, and the models that answer. Lifetime: until the next reload."""

    aliases: Annotated[
        tuple[str, ...],
        Meta(description="NAME=MODEL or NAME=MODEL@REVISION each; * stands for any text in NAME"),
    ] = ()
    targets: Annotated[
        tuple[str, ...],
        Meta(description="NAME=MODEL@REVISION:WEIGHT,... each: shares of a name's sessions"),
    ] = ()
    missing_model: Annotated[
        Literal["only", "refuse"],
        Meta(description="a request without a model: the only one that is served, or 400"),
    ] = "only"


class Picker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where another data plane, as Envoy, asks which worker a request goes to (ext_proc)."""

    port: Annotated[
        int,
        Meta(ge=-1, le=65_535, description="port of the picker; 0: the system chooses; -1: none"),
    ] = -1
    host: Annotated[str, Meta(min_length=1, description="address of the picker's ports")] = (
        "127.0.0.1"
    )
    health_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description="port of gRPC health alone, without TLS; 0: the system chooses; -1: none",
        ),
    ] = -1
    decision_s: Annotated[
        float,
        Meta(ge=0.05, le=60.0, description="a decision, holding included, then 503, seconds"),
    ] = 5.0
    endpoints: Annotated[
        int,
        Meta(ge=1, le=3, description="named, best first; beyond 1 where the data plane tries them"),
    ] = 1
    objectives: Annotated[
        tuple[str, ...],
        Meta(description="NAME=PRIORITY of objectives that requests name; lower goes first"),
    ] = ()
    conformance: Annotated[
        bool, Meta(description="headers of the Inference Extension's conformance tests are obeyed")
    ] = False


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Several routers of the same workers, joined by `state`. Lifetime: process."""

    name: Annotated[
        str,
        Meta(pattern=f"{_NAME}|^$", description="this router's name; empty: the host's"),
    ] = ""
    fleet: Annotated[str, Meta(pattern=_NAME, description="replicas of one fleet share state")] = (
        "default"
    )
    flush_s: Annotated[
        float, Meta(ge=0.001, le=0.25, description="news waits so long to be sent, seconds")
    ] = 0.01
    lease_s: Annotated[
        float, Meta(ge=1.0, le=60.0, description="silence that means gone, seconds")
    ] = 3.0
