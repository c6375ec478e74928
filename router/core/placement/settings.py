"""Defines the sections `ejection` and `retries` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Ejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings for the ejection of workers that fail requests. Lifetime: until the next reload."""

    failures: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000,
            description="number of failures in a row after which the router ejects a worker",
        ),
    ] = 3
    rate: Annotated[
        float,
        Meta(
            ge=0.01,
            le=1.0,
            description="share of failed requests within `window_s` at which the router ejects a "
            "worker",
        ),
    ] = 0.5
    requests: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="least number of results within `window_s` for `rate` to apply",
        ),
    ] = 20
    window_s: Annotated[
        float, Meta(ge=0.1, le=600.0, description="time over which `rate` is measured, seconds")
    ] = 5.0
    max_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="largest share of a pool that may be ejected; one worker always may be",
        ),
    ] = 0.5
    recover_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3_600.0,
            description=(
                "shortest time of an ejection, seconds; the time doubles while the worker keeps "
                "failing"
            ),
        ),
    ] = 2.0
    breaks: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000,
            description=(
                "number of broken-off answers after which the router ejects a worker; whole "
                "answers lower the count"
            ),
        ),
    ] = 8


class RetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that say when a failed request is sent to another worker. Lifetime: until the next
    reload.
    """

    attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="number of workers that may fail one request before the client gets an "
            "error",
        ),
    ] = 3
    backoff_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=60.0,
            description=(
                "longest wait before the first retry, seconds; the wait doubles with each retry"
            ),
        ),
    ] = 0.025
    backoff_max_s: Annotated[
        float, Meta(ge=0.0, le=60.0, description="longest wait before any retry, seconds")
    ] = 0.25
    budget_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=10.0,
            description="largest number of retries per request, averaged over ten seconds",
        ),
    ] = 0.2
    budget_per_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1e6,
            description="number of retries per second that are allowed beside `budget_share`",
        ),
    ] = 10.0
    busy_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=60.0,
            description=(
                "how long a worker that reports itself busy gets no requests, seconds; the time "
                "doubles while the worker stays busy"
            ),
        ),
    ] = 0.5
    busy_max_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=60.0,
            description=(
                "longest time without requests for a busy worker, even if the worker asks for "
                "more, seconds; 0: no pause"
            ),
        ),
    ] = 5.0
