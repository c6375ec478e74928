"""The router's configuration: every key with its unit, range and default.

Each key stands here once. The YAML file, the flags, the environment variables, their help texts
and `docs/configuration.md` all follow from these Structs (`router.config_keys`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

_HEADER = r"^[a-z0-9][a-z0-9-]{0,63}$"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all sections are. Lifetime: until the next reload."""


class Limits(_Section, frozen=True):
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


class Timeouts(_Section, frozen=True):
    """How long to wait for what, seconds."""

    connect_s: Annotated[
        float, Meta(ge=0.01, le=60.0, description="connecting to a worker, seconds")
    ] = 2.0
    first_byte_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0, description="a reply's first byte (prefill), seconds")
    ] = 600.0
    between_bytes_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0, description="silence within a reply, seconds")
    ] = 120.0
    keep_alive_s: Annotated[
        float, Meta(ge=0.0, le=3_600.0, description="an idle client connection, seconds")
    ] = 75.0
    probe_s: Annotated[
        float, Meta(ge=0.05, le=60.0, description="a health probe or load report, seconds")
    ] = 2.0
    shutdown_s: Annotated[
        float, Meta(ge=0.0, le=3_600.0, description="running requests at shutdown, seconds")
    ] = 30.0
    speculative_s: Annotated[
        float, Meta(ge=0.1, le=600.0, description="an expected block no event confirms, seconds")
    ] = 10.0


class Intervals(_Section, frozen=True):
    """How often, seconds."""

    load_report_s: Annotated[
        float, Meta(ge=0.02, le=60.0, description="between load reports of a worker, seconds")
    ] = 0.25
    health_s: Annotated[
        float, Meta(ge=0.05, le=600.0, description="between health probes of a worker, seconds")
    ] = 1.0
    tick_s: Annotated[
        float, Meta(ge=0.005, le=5.0, description="between expiries of held requests, seconds")
    ] = 0.05
    token_recheck_s: Annotated[
        float,
        Meta(ge=1.0, le=3_600.0, description="until a model with differing tokens is checked anew"),
    ] = 300.0
    kv_state_s: Annotated[
        float, Meta(ge=1.0, le=86_400.0, description="between two savings of `kv_state`, seconds")
    ] = 60.0


class Ejection(_Section, frozen=True):
    """When a failing worker is put aside."""

    failures: Annotated[
        int, Meta(ge=1, le=1_000, description="failures in a row that put a worker aside")
    ] = 3
    recover_s: Annotated[
        float, Meta(ge=0.1, le=3_600.0, description="shortest time aside, seconds; grows")
    ] = 2.0


class Config(_Section, frozen=True):
    """The whole configuration, valid by construction of `router.config_load`."""

    host: Annotated[str, Meta(min_length=1, description="address of the client port")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="client port; 0: the system chooses")
    ] = 8080
    admin_host: Annotated[
        str, Meta(min_length=1, description="address of the admin port; keep it private")
    ] = "127.0.0.1"
    admin_port: Annotated[
        int, Meta(ge=0, le=65_535, description="admin port; 0: the system chooses")
    ] = 8081
    workers: Annotated[
        tuple[str, ...],
        Meta(description="workers: URL,key=value,... each (in a file also as mappings)"),
    ] = ()
    policy: Annotated[
        str,
        Meta(
            min_length=1,
            description="NAME?key=value&... or package.module:attr?..., then its wrappers",
        ),
    ] = "warmset"
    policy_fallback: Annotated[
        str, Meta(min_length=1, description="decides where the policy fails: a built-in, no memory")
    ] = "least_requests"
    policy_slow_ms: Annotated[
        float,
        Meta(ge=0.1, le=60_000.0, description="a call of the policy beyond this is a fault, ms"),
    ] = 5.0
    policy_hang_s: Annotated[
        float,
        Meta(ge=0.5, le=3_600.0, description="a call of the policy beyond this ends the process"),
    ] = 10.0
    tokenizer: Annotated[
        str | None, Meta(description="folder with tokenizer.json; none: text blocks, approximate")
    ] = None
    chat_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="shape of content that templates get, as the workers are told"),
    ] = "auto"
    chat_template_kwargs: Annotated[
        str, Meta(description="JSON object: templates' default variables, as the workers are told")
    ] = "{}"
    chat_drops_unused_tools: Annotated[
        bool, Meta(description="tool_choice none leaves the tools out of the prompt, as at workers")
    ] = False
    forward_token_ids: Annotated[
        bool, Meta(description="send exact ids instead of text to workers that take them")
    ] = False
    seed: Annotated[
        int, Meta(ge=0, le=(1 << 63) - 1, description="seed of all draws: same facts, same routes")
    ] = 0
    session_header: Annotated[
        str, Meta(pattern=_HEADER, description="header that names a client's session")
    ] = "x-session-id"
    tenant_header: Annotated[
        str, Meta(pattern=_HEADER, description="header that names the tenant, from trusted peers")
    ] = "x-tenant"
    trusted_peers: Annotated[
        tuple[str, ...], Meta(description="CIDRs of peers whose tenant header is believed")
    ] = ()
    api_keys_file: Annotated[
        str | None, Meta(description="file of lines `key tenant`; none: no keys are asked")
    ] = None
    explain: Annotated[
        bool, Meta(description="clients may ask x-warmroute-explain: 1, or full, for the decision")
    ] = True
    explain_every: Annotated[
        int, Meta(ge=0, le=1 << 30, description="every N-th decision is kept in full; 0: none")
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level to log")
    ] = "info"
    request_log: Annotated[
        str | None, Meta(description="file to log requests to, for replays; none: no log")
    ] = None
    request_log_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 50, description="beyond this FILE becomes FILE.1, bytes")
    ] = 1 << 30
    record_facts: Annotated[
        str | None, Meta(description="file to record all decisions to, for debugging; none: off")
    ] = None
    record_facts_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 50, description="beyond this the recording ends, bytes")
    ] = 1 << 30
    kv_state: Annotated[
        str | None,
        Meta(description="file to keep what is known of caches over a restart; none: off"),
    ] = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    intervals: Intervals = field(default_factory=Intervals)
    ejection: Ejection = field(default_factory=Ejection)
