"""Configuration sections of parts that may not be installed (extras). The keys exist whether or not
an extra is installed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Migration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings for streamed answers whose worker is lost. Lifetime: until the next reload."""

    moves: Annotated[
        int,
        Meta(ge=0, le=16, description="limit of the moves of one stream to another worker"),
    ] = 0
    stream_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="limit of the tokens that the router keeps of one stream for a move",
        ),
    ] = 1 << 17
    tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 32,
            description="limit of the tokens that the router keeps of all streams (4 bytes each)",
        ),
    ] = 1 << 25


class NameSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the model names that clients may use. Lifetime: until the next reload."""

    aliases: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME=MODEL or NAME=MODEL@REVISION: requests for NAME go to MODEL; "
            "* stands for any text in NAME"
        ),
    ] = ()
    targets: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME=MODEL@REVISION:WEIGHT,...: the router divides NAME's sessions by "
            "the weights"
        ),
    ] = ()
    missing_model: Annotated[
        Literal["only", "refuse"],
        Meta(
            description="what happens to a request without a model; only: the router takes the "
            "only model of the workers; refuse: the client gets 400"
        ),
    ] = "only"


class Picker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the endpoint picker, which proxies such as Envoy ask for a worker (ext_proc)."""

    port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description=(
                "port of the endpoint picker (ext_proc); 0: the system chooses; -1: no such port"
            ),
        ),
    ] = -1
    host: Annotated[str, Meta(min_length=1, description="address of the picker's ports")] = (
        "127.0.0.1"
    )
    health_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description=(
                "port for gRPC health checks only, without TLS; 0: the system chooses; -1: no "
                "such port"
            ),
        ),
    ] = -1
    decision_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60.0,
            description=(
                "longest time for a decision, including the wait for a worker, seconds; then the "
                "client gets 503"
            ),
        ),
    ] = 5.0
    endpoints: Annotated[
        int,
        Meta(
            ge=1,
            le=3,
            description=(
                "number of workers that an answer names, best first; above 1 only for gateways "
                "that retry"
            ),
        ),
    ] = 1
    objectives: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "NAME=PRIORITY: priority of an objective that requests name; requests with a "
                "lower number go first"
            )
        ),
    ] = ()
    conformance: Annotated[
        bool,
        Meta(
            description="whether the picker obeys headers of the Inference Extension's "
            "conformance tests"
        ),
    ] = False


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of routers that share workers and are connected by `state`. Lifetime: process."""

    name: Annotated[
        str,
        Meta(
            pattern=f"{_NAME}|^$",
            description="name of this router among replicas; empty: the host's name",
        ),
    ] = ""
    fleet: Annotated[
        str,
        Meta(
            pattern=_NAME, description="name of the fleet; replicas of the same fleet share state"
        ),
    ] = "default"
    flush_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=0.25,
            description="longest time before the router sends a change to the other replicas, "
            "seconds",
        ),
    ] = 0.01
    lease_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=60.0,
            description="silence of a replica after which the other replicas "
            "count it as gone, seconds",
        ),
    ] = 3.0
