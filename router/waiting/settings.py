"""The keys of the section `waiting`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class WaitingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of the requests that wait for a first worker of their model.

    Lifetime: until the next reload.
    """

    models: Annotated[
        tuple[str, ...],
        Meta(description="models to wait for from the start, though no worker serves them yet"),
    ] = ()
    wait_s: Annotated[
        float,
        Meta(ge=0.0, le=3_600.0, description="longest wait for a worker, seconds; 0: none waits"),
    ] = 300.0
    requests: Annotated[
        int, Meta(ge=1, le=16_384, description="requests that wait so at the same time")
    ] = 1_024
    bytes: Annotated[
        int, Meta(ge=1_024, le=1 << 40, description="bodies of these together, bytes")
    ] = 256 << 20
    seen_s: Annotated[
        float,
        Meta(ge=0.0, le=604_800.0, description="a model stays known without workers, seconds"),
    ] = 3_600.0
    per_s: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="waiting requests let go in the first second, by ready workers; "
            "as many more in each second after it",
        ),
    ] = 16
    ping_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description="streams that wait, or whose worker is silent, get a comment so often, "
            "seconds; 0: none",
        ),
    ] = 15.0
