"""The sections `ejection` and `retries` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Ejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a failing worker is ejected. Lifetime: until the next reload."""

    failures: Annotated[
        int, Meta(ge=1, le=1_000, description="failures in a row that eject a worker")
    ] = 3
    rate: Annotated[
        float, Meta(ge=0.01, le=1.0, description="or this share of failures within the window")
    ] = 0.5
    requests: Annotated[
        int, Meta(ge=1, le=1_000_000, description="least number of results for the share")
    ] = 20
    window_s: Annotated[
        float, Meta(ge=0.1, le=600.0, description="the window of the share, seconds")
    ] = 5.0
    max_share: Annotated[
        float, Meta(ge=0.0, le=1.0, description="most of a pool ejected; one always may be")
    ] = 0.5
    recover_s: Annotated[
        float, Meta(ge=0.1, le=3_600.0, description="shortest ejection, seconds; grows")
    ] = 2.0
    breaks: Annotated[
        int,
        Meta(
            ge=1, le=1_000, description="or broken answers that many good ones do not make up for"
        ),
    ] = 8


class RetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a failed request goes to another worker. Lifetime: until the next reload."""

    attempts: Annotated[
        int, Meta(ge=1, le=100, description="workers that may fail one request")
    ] = 3
    backoff_s: Annotated[
        float, Meta(ge=0.0, le=60.0, description="longest first wait, seconds; doubles")
    ] = 0.025
    backoff_max_s: Annotated[
        float, Meta(ge=0.0, le=60.0, description="longest wait of a retry, seconds")
    ] = 0.25
    budget_share: Annotated[
        float, Meta(ge=0.0, le=10.0, description="retries per request over ten seconds")
    ] = 0.2
    budget_per_s: Annotated[
        float, Meta(ge=0.0, le=1e6, description="further retries, per second")
    ] = 10.0
    busy_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=60.0,
            description="how long a worker that says it is busy is spared, seconds; doubles",
        ),
    ] = 0.5
    busy_max_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=60.0,
            description="longest such time, whatever the worker says, seconds; 0: none is spared",
        ),
    ] = 5.0
