"""The configuration's sections of what happens when workers fail."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Ejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a failing worker is put aside. Lifetime: until the next reload."""

    failures: Annotated[
        int, Meta(ge=1, le=1_000, description="failures in a row that put a worker aside")
    ] = 3
    rate: Annotated[
        float, Meta(ge=0.01, le=1.0, description="or this share of failures within the window")
    ] = 0.5
    requests: Annotated[
        int, Meta(ge=1, le=1_000_000, description="least answers and failures for the share")
    ] = 20
    window_s: Annotated[
        float, Meta(ge=0.1, le=600.0, description="the window of the share, seconds")
    ] = 5.0
    max_share: Annotated[
        float, Meta(ge=0.0, le=1.0, description="of a pool aside at once; one always may be")
    ] = 0.5
    recover_s: Annotated[
        float, Meta(ge=0.1, le=3_600.0, description="shortest time aside, seconds; grows")
    ] = 2.0


class Retries(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a failed request goes to another worker. Lifetime: until the next reload."""

    attempts: Annotated[
        int, Meta(ge=1, le=100, description="workers that may fail one request; unreached: no")
    ] = 3
    backoff_s: Annotated[
        float, Meta(ge=0.0, le=60.0, description="most a first retry waits; doubles, seconds")
    ] = 0.025
    backoff_max_s: Annotated[
        float, Meta(ge=0.0, le=60.0, description="most that any retry waits, seconds")
    ] = 0.25
    budget_share: Annotated[
        float, Meta(ge=0.0, le=10.0, description="retries per request over ten seconds")
    ] = 0.2
    budget_per_s: Annotated[
        float, Meta(ge=0.0, le=1e6, description="retries allowed besides, per second")
    ] = 10.0
