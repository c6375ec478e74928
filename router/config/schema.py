"""The router's configuration: every key with its unit, range and default.

Each key stands here once. The YAML file, the flags, the environment variables, their help texts
and `docs/reference/configuration.md` all follow from these Structs (`router.config.keys`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from router.config.door import Door, Tls, WorkerTls
from router.config.failure import Ejection, Retries
from router.config.limits import Limits
from router.config.migration import Migration
from router.config.recording import Recording
from router.config.replicas import Replicas
from router.config.tracing import Tracing

_HEADER = r"^[a-z0-9][a-z0-9-]{0,63}$"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all sections are. Lifetime: until the next reload."""


class Timeouts(_Section, frozen=True):
    """How long to wait for what, seconds."""

    connect_s: Annotated[
        float, Meta(ge=0.01, le=60.0, description="connecting to a worker, seconds")
    ] = 2.0
    send_s: Annotated[
        float, Meta(ge=0.01, le=3_600.0, description="a worker takes no more of a body, seconds")
    ] = 30.0
    first_byte_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0, description="a reply's first byte (prefill), seconds")
    ] = 600.0
    first_byte_ms_per_token: Annotated[
        float, Meta(ge=0.0, le=1_000.0, description="more for each prompt token to compute, ms")
    ] = 0.0
    whole_answer_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0, description="an answer that does not stream, seconds")
    ] = 600.0
    between_bytes_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0, description="silence within a reply, seconds")
    ] = 120.0
    total_s: Annotated[
        float, Meta(ge=0.0, le=86_400.0, description="a request in all, seconds; 0: no bound")
    ] = 0.0
    stall_s: Annotated[
        float, Meta(ge=0.05, le=600.0, description="all of a worker's streams silent: ask, seconds")
    ] = 0.5
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


class TenantRules(_Section, frozen=True):
    """What tenants may do to each other."""

    isolate: Annotated[
        bool, Meta(description="each tenant has caches of its own: no prefix is shared across")
    ] = False


class Config(_Section, frozen=True):
    """The whole configuration, valid by construction of `router.config.load`."""

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
    reuse_port: Annotated[
        bool, Meta(description="other routers may listen on the same client port (SO_REUSEPORT)")
    ] = False
    workers: Annotated[
        tuple[str, ...],
        Meta(description="workers: URL,key=value,... each (in a file also as mappings)"),
    ] = ()
    discovery: Annotated[
        tuple[str, ...],
        Meta(description="who else names workers: file:PATH, dns:NAME:PORT, redis, kubernetes:..."),
    ] = ()
    discovery_grace_s: Annotated[
        float,
        Meta(ge=0.0, le=86_400.0, description="a source that names nobody any more: not believed"),
    ] = 30.0
    ramp_s: Annotated[
        float,
        Meta(
            ge=0.0, le=3_600.0, description="a worker that joins a pool gets its share in so long"
        ),
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0.0, le=86_400.0, description="what runs at a leaving worker may take; 0: any time"
        ),
    ] = 600.0
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
    front: Annotated[
        Literal["auto", "aiohttp"],
        Meta(description="auto: the door serves plain inference requests itself; or only aiohttp"),
    ] = "auto"
    relay: Annotated[
        Literal["auto", "python"],
        Meta(
            description="auto: replies move on a thread of their own where they can; or only python"
        ),
    ] = "auto"
    seed: Annotated[
        int, Meta(ge=0, le=(1 << 63) - 1, description="seed of all draws: same facts, same routes")
    ] = 0
    session_header: Annotated[
        str, Meta(pattern=_HEADER, description="header that names a client's session")
    ] = "x-session-id"
    tenant_header: Annotated[
        str, Meta(pattern=_HEADER, description="header that names the tenant, from trusted peers")
    ] = "x-tenant"
    deadline_header: Annotated[
        str, Meta(pattern=_HEADER, description="header of a client's deadline, milliseconds")
    ] = "x-request-timeout-ms"
    trusted_peers: Annotated[
        tuple[str, ...], Meta(description="CIDRs of peers whose tenant header is believed")
    ] = ()
    api_keys_file: Annotated[
        str | None,
        Meta(description="file of lines `KEY TENANT option=value...`; none: no keys are asked"),
    ] = None
    admin_keys_file: Annotated[
        str | None, Meta(description="the same for the admin port; none: it asks for no key")
    ] = None
    admin_open: Annotated[
        bool, Meta(description="the admin port may be beyond loopback without keys")
    ] = False
    drain_refuses: Annotated[
        bool, Meta(description="while the router drains (POST /drain) new requests get 503")
    ] = False
    unknown_paths: Annotated[
        Literal["refuse", "forward"],
        Meta(description="paths not in reference/apis.md: 404, or to a worker of the model"),
    ] = "refuse"
    explain: Annotated[
        bool, Meta(description="clients may ask x-warmroute-explain: 1, or full, for the decision")
    ] = True
    explain_every: Annotated[
        int, Meta(ge=0, le=1 << 30, description="every N-th decision is kept in full; 0: none")
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level to log")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="lines of the router's own log")
    ] = "text"
    request_log: Annotated[
        str | None, Meta(description="file to log requests to, for replays; none: no log")
    ] = None
    request_log_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 50, description="beyond this FILE becomes FILE.1, bytes")
    ] = 1 << 30
    record: Annotated[
        str | None, Meta(description="folder to log requests to in parts, for replays; none: off")
    ] = None
    access_log: Annotated[
        str | None,
        Meta(description="file for a JSON line a request; -: standard output; none: off"),
    ] = None
    access_log_bytes: Annotated[
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
    takeover: Annotated[
        str | None,
        Meta(description="Unix socket by which the next router takes over from this; none: off"),
    ] = None
    state: Annotated[
        str | None,
        Meta(description="redis URL by which several routers share what they know; none: alone"),
    ] = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    intervals: Intervals = field(default_factory=Intervals)
    ejection: Ejection = field(default_factory=Ejection)
    migration: Migration = field(default_factory=Migration)
    door: Door = field(default_factory=Door)
    tls: Tls = field(default_factory=Tls)
    admin_tls: Tls = field(default_factory=Tls)
    workers_tls: WorkerTls = field(default_factory=WorkerTls)
    recording: Recording = field(default_factory=Recording)
    retries: Retries = field(default_factory=Retries)
    tenants: TenantRules = field(default_factory=TenantRules)
    replicas: Replicas = field(default_factory=Replicas)
    tracing: Tracing = field(default_factory=Tracing)

    def __repr__(self) -> str:
        """Brief, for `state` has a password in it."""
        return f"Config({len(self.workers)} workers, policy={self.policy!r})"
