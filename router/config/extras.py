"""Sections of extras in the configuration, which has them whether an extra is installed or not."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Migration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Streamed answers whose worker is lost. Lifetime: until the next reload."""

    moves: Annotated[
        int, Meta(ge=0, le=16, description="times a begun stream may go on elsewhere; 0: never")
    ] = 0
    stream_tokens: Annotated[
        int, Meta(ge=1, le=1 << 24, description="prompt and answer kept of a stream, tokens")
    ] = 1 << 17
    tokens: Annotated[
        int, Meta(ge=1, le=1 << 32, description="the same of all streams, tokens of 4 bytes")
    ] = 1 << 25
