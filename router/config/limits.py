"""Keys of the section `limits`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of everything that could grow."""

    body_bytes: Annotated[
        int, Meta(ge=1_024, le=1 << 30, description="largest request body, bytes")
    ] = 16 << 20
    messages: Annotated[
        int, Meta(ge=1, le=1_000_000, description="messages of one chat request")
    ] = 20_000
    header_bytes: Annotated[
        int, Meta(ge=1_024, le=1 << 20, description="largest header of a request or reply, bytes")
    ] = 32 << 10
    inflight_requests: Annotated[
        int, Meta(ge=1, le=1_000_000, description="requests dispatched and held together")
    ] = 16_384
    queued_tokens: Annotated[
        int, Meta(ge=1, le=1 << 50, description="prompt tokens to be computed, sent and held ones")
    ] = 1 << 40
    worker_requests: Annotated[
        int, Meta(ge=1, le=1 << 50, description="unfinished requests of one worker; others wait")
    ] = 1 << 40
    worker_queued_tokens: Annotated[
        int, Meta(ge=1, le=1 << 50, description="prompt tokens sent to one worker, not computed")
    ] = 1 << 40
    hold_requests: Annotated[
        int, Meta(ge=0, le=1_000_000, description="requests that wait at the router for a worker")
    ] = 1_024
    hold_s: Annotated[
        float, Meta(ge=0.0, le=3_600.0, description="longest wait at the router, seconds")
    ] = 300.0
    sessions: Annotated[
        int,
        Meta(ge=256, le=1 << 24, description="sessions followed, and no fewer than requests"),
    ] = 1 << 17
    session_blocks: Annotated[
        int,
        Meta(ge=1_024, le=1 << 28, description="blocks of their prompts that tell them apart"),
    ] = 1 << 20
    client_buffer_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 30, description="answer bytes kept for a slow client, bytes")
    ] = 262_144
    workers: Annotated[
        int, Meta(ge=1, le=4_096, description="workers at the same time, leaving ones included")
    ] = 256
    index_entries: Annotated[
        int, Meta(ge=1_024, le=1 << 30, description="distinct blocks the prefix index remembers")
    ] = 1 << 21
    index_bytes: Annotated[
        int, Meta(ge=1 << 20, le=1 << 44, description="memory of the prefix index, bytes")
    ] = 1 << 30
    speculative_entries: Annotated[
        int, Meta(ge=1_024, le=1 << 30, description="distinct blocks expected from own dispatches")
    ] = 1 << 20
    mirrored_blocks: Annotated[
        int, Meta(ge=1_024, le=1 << 30, description="blocks remembered of workers without events")
    ] = 1 << 22
    token_memo_bytes: Annotated[
        int, Meta(ge=0, le=1 << 40, description="ids of known beginnings of chats, bytes; 0: none")
    ] = 64 << 20
    events_backlog_batches: Annotated[
        int, Meta(ge=1, le=1_000_000, description="event batches of a worker kept during a replay")
    ] = 10_000
