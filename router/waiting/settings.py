"""Defines the keys of the configuration section `waiting`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class WaitingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the requests that wait for a first worker of their model.

    Lifetime: until the next reload.
    """

    models: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "models for which requests wait from the start, before any worker serves them"
            )
        ),
    ] = ()
    wait_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description=(
                "longest wait for a model's first worker, seconds; 0: requests do not wait"
            ),
        ),
    ] = 300.0
    requests: Annotated[
        int,
        Meta(
            ge=1,
            le=16_384,
            description="maximum number of requests that wait for a model's first worker",
        ),
    ] = 1_024
    bytes: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 40,
            description="largest total size of the bodies of waiting requests, bytes",
        ),
    ] = 256 << 20
    seen_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=604_800.0,
            description="how long the router remembers a model after the model's last worker has "
            "left, seconds",
        ),
    ] = 3_600.0
    per_s: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description=(
                "number of waiting requests that a ready worker gets in the first second; in each "
                "later second the worker gets this number more"
            ),
        ),
    ] = 16
    ping_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description=(
                "time between comments in a stream whose worker is silent or missing, seconds; 0: "
                "no comments"
            ),
        ),
    ] = 15.0
