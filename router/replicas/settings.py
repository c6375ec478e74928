"""The section `replicas` of the configuration, and what replicas must have alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


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


@dataclass(frozen=True, slots=True)
class ReplicaTerms:
    """What makes this router one of several. Lifetime: until the next reload."""

    url: str | None  # of Redis, where state is shared; None: this router is alone
    replicas: Replicas
    alike: Mapping[str, str]  # values that all replicas must have, by key of the configuration
    tokenizer: str | None  # folder whose tokenizer.json they must have alike
    api_keys_file: str | None  # whose tenants' salts they must have alike
