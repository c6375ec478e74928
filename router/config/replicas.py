"""The configuration's section of routers that share state."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Several routers of the same workers, joined by `state`. Lifetime: process."""

    name: Annotated[
        str,
        Meta(pattern=f"{_NAME}|^$", description="this router among them; empty: the host's name"),
    ] = ""
    fleet: Annotated[
        str, Meta(pattern=_NAME, description="those of one fleet share; others know nothing of it")
    ] = "default"
    flush_s: Annotated[
        float, Meta(ge=0.001, le=0.25, description="what is new waits so long to be told, seconds")
    ] = 0.01
    lease_s: Annotated[
        float, Meta(ge=1.0, le=60.0, description="unheard for so long a replica is gone, seconds")
    ] = 3.0
