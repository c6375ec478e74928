"""The section `picker` of the configuration, and what else the picker's port obeys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from router.server.settings import GrpcPortSettings

MESSAGE_BYTES = 1 << 20  # beside a body, in one message


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


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """What the picker obeys. Lifetime: until the next reload."""

    picker: Picker
    port: GrpcPortSettings
    health_port: GrpcPortSettings  # where `picker.health_port` is given
    body_bytes: int  # of the largest body of a request
    tenant_header: str
    forwards_unknown_paths: bool
