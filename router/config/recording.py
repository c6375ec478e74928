"""Keys of the section `recording`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of the traffic the folder `record` keeps."""

    part_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 40, description="beyond this a part is packed, bytes")
    ] = 64 << 20
    part_s: Annotated[
        float, Meta(ge=1.0, le=86_400.0, description="of unix time, that a part is of, seconds")
    ] = 3_600.0
    parts: Annotated[
        int, Meta(ge=2, le=100_000, description="parts kept; the oldest goes first")
    ] = 1_000
    total_bytes: Annotated[
        int, Meta(ge=8_192, le=1 << 50, description="of all parts; the oldest goes first, bytes")
    ] = 8 << 30
