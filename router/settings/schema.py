"""The router's configuration: every key with its unit, range and default.

Each key stands here once. The YAML file, the flags, the environment variables, their help texts
and `docs/reference/configuration.md` all follow from these Structs (`router.config.keys`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from router.config.extras import Migration, NameSettings, Picker, Replicas
from router.core.placement.settings import Ejection, RetrySettings
from router.core.workers.roles import RoleSettings
from router.fleet.context import HealthSettings
from router.http.tls import Tls, WorkerTls
from router.identity.settings import IdentitySettings
from router.record.log_files import Recording
from router.record.trace_export import Tracing
from router.request.quotas import TenantRules
from router.server.settings import ServerSettings
from router.waiting.settings import WaitingSettings


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of everything that could grow."""

    body_bytes: Annotated[
        int, Meta(ge=1_024, le=1 << 30, description="largest request body, bytes")
    ] = 16 << 20
    messages: Annotated[
        int, Meta(ge=1, le=1_000_000, description="messages of one chat request")
    ] = 20_000
    body_values: Annotated[
        int,
        Meta(ge=16_384, le=1 << 24, description="JSON values of one body, token ids not counted"),
    ] = 131_072
    message_text_bytes: Annotated[
        int,
        Meta(
            ge=32_768,
            le=1 << 30,
            description="text of one message that has escapes or is not ASCII, bytes",
        ),
    ] = 4 << 20
    tokenized_chars: Annotated[
        int,
        Meta(ge=1_024, le=1 << 30, description="text of one prompt that is tokenized here"),
    ] = 4 << 20
    header_bytes: Annotated[
        int, Meta(ge=1_024, le=1 << 20, description="largest header of a request or reply, bytes")
    ] = 32 << 10
    inflight_requests: Annotated[
        int, Meta(ge=1, le=1_000_000, description="requests dispatched and held together")
    ] = 16_384
    queued_tokens: Annotated[
        int, Meta(ge=1, le=1 << 50, description="prompt tokens to be computed, sent or held")
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
        Meta(ge=256, le=1 << 24, description="sessions tracked; not fewer than requests"),
    ] = 1 << 17
    session_blocks: Annotated[
        int,
        Meta(ge=1_024, le=1 << 28, description="blocks that tell sessions apart"),
    ] = 1 << 20
    client_buffer_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 30, description="answer bytes kept for a slow client, bytes")
    ] = 262_144
    workers: Annotated[
        int, Meta(ge=1, le=4_096, description="workers at the same time, leaving ones included")
    ] = 256
    ranks: Annotated[
        int, Meta(ge=1, le=4_096, description="of these, data-parallel ranks of one URL")
    ] = 64
    models: Annotated[
        int, Meta(ge=1, le=65_536, description="models of one worker, LoRA adapters included")
    ] = 1_024
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
    render_calls: Annotated[
        int, Meta(ge=1, le=65_536, description="requests whose token ids renderers make at a time")
    ] = 64
    events_backlog_batches: Annotated[
        int, Meta(ge=1, le=1_000_000, description="event batches of a worker kept during a replay")
    ] = 10_000


_HEADER = r"^[a-z0-9][a-z0-9-]{0,63}$"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all sections are. Lifetime: until the next reload."""


class TimeoutSettings(_Section, frozen=True):
    """How long to wait for what, seconds."""

    connect_s: Annotated[
        float, Meta(ge=0.01, le=60.0, description="connecting to a worker, seconds")
    ] = 2.0
    send_s: Annotated[
        float, Meta(ge=0.01, le=3_600.0, description="a worker takes nothing of a body, seconds")
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
        float, Meta(ge=0.05, le=600.0, description="silence of all streams, then a probe, seconds")
    ] = 0.5
    keep_alive_s: Annotated[
        float, Meta(ge=0.0, le=3_600.0, description="an idle client connection, seconds")
    ] = 75.0
    render_s: Annotated[
        float, Meta(ge=0.01, le=60.0, description="a renderer's token ids, with images, seconds")
    ] = 1.0
    probe_s: Annotated[
        float, Meta(ge=0.05, le=60.0, description="a health probe or load report, seconds")
    ] = 2.0
    shutdown_s: Annotated[
        float, Meta(ge=0.0, le=3_600.0, description="running requests at shutdown, seconds")
    ] = 30.0
    handover_s: Annotated[
        float,
        Meta(ge=0.0, le=86_400.0, description="running requests after a hot restart, seconds"),
    ] = 3_600.0
    speculative_s: Annotated[
        float, Meta(ge=0.1, le=600.0, description="an expected block without event, seconds")
    ] = 10.0


class Intervals(_Section, frozen=True):
    """How often, seconds."""

    load_report_s: Annotated[
        float,
        Meta(
            ge=0.02,
            le=60.0,
            description="between load reports of a worker, seconds; idle up to 8 times that",
        ),
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


class Config(_Section, frozen=True):
    """The whole configuration, valid by construction of `router.settings.load`."""

    host: Annotated[
        str,
        Meta(
            min_length=1,
            description="address that clients connect to; 0.0.0.0: from any machine",
            extra={"metavar": "ADDRESS"},
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65_535, description="port that clients connect to; 0: the system chooses"),
    ] = 8080
    admin_host: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "address of the admin port; keep it private: who reaches it controls the router"
            ),
            extra={"metavar": "ADDRESS"},
        ),
    ] = "127.0.0.1"
    admin_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65_535,
            description=(
                "port for operators: metrics, workers, the page /ui; 0: the system chooses"
            ),
        ),
    ] = 8081
    grpc_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description="port of KServe's gRPC, at `host`; 0: the system chooses; -1: none",
        ),
    ] = -1
    reuse_port: Annotated[
        bool, Meta(description="other routers may listen on the same client port (SO_REUSEPORT)")
    ] = False
    workers: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "an engine to send requests to: its URL, then options as ,key=value (in "
                "a file also as mappings)"
            ),
            extra={"flag": "--worker", "metavar": "URL"},
        ),
    ] = ()
    discovery: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "a source that names workers: file:PATH, dns:NAME:PORT, redis, "
                "kubernetes:..., inferencepool:..., trtllm:PATH"
            ),
            extra={"flag": "--discover", "metavar": "SOURCE"},
        ),
    ] = ()
    event_hosts: Annotated[
        tuple[str, ...],
        Meta(description="other hosts that engines may name for their events: NAME, CIDR, ipc, *"),
    ] = ()
    discovery_grace_s: Annotated[
        float,
        Meta(ge=0.0, le=86_400.0, description="a failing or empty source is not believed, seconds"),
    ] = 30.0
    slow_start_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description="slow start: until a new worker gets its full share, seconds",
        ),
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="for requests of a leaving worker, seconds; 0: any time",
        ),
    ] = 600.0
    policy: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "rule that chooses a worker: NAME?key=value&... or "
                "package.module:attr?..., then wrappers"
            ),
            extra={"metavar": "NAME"},
        ),
    ] = "warmset"
    policy_fallback: Annotated[
        str,
        Meta(
            min_length=1, description="decides if the policy fails: a built-in one without memory"
        ),
    ] = "least_requests"
    policy_slow_ms: Annotated[
        float,
        Meta(ge=0.1, le=60_000.0, description="a call of the policy beyond this is a fault, ms"),
    ] = 5.0
    policy_hang_s: Annotated[
        float,
        Meta(ge=0.5, le=3_600.0, description="a call of the policy beyond this ends the process"),
    ] = 10.0
    disaggregation: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="prefill and decode at two workers, of those with such roles"),
    ] = "auto"
    disaggregation_tpot_ms: Annotated[
        float,
        Meta(
            ge=0.0,
            le=60_000.0,
            description="time per token that clients accept, ms: auto prefills beside answers "
            "only what these bear; 0: unknown",
        ),
    ] = 0.0
    tokenizer: Annotated[
        str | None,
        Meta(
            description=(
                "folder with the model's tokenizer.json or tekken.json, as the engines "
                "have it; none: prompts are matched approximately, as text"
            ),
            extra={"metavar": "FOLDER"},
        ),
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "hf", "mistral"],
        Meta(description="which of both files vLLM workers use, as their --tokenizer-mode"),
    ] = "auto"
    harmony_date: Annotated[
        str,
        Meta(
            description="date in gpt-oss prompts: the workers' time zone (UTC, Europe/Berlin) or "
            "their VLLM_SYSTEM_START_DATE; local: this machine's zone"
        ),
    ] = "local"
    chat_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="shape of content in chat templates, as at the workers"),
    ] = "auto"
    chat_template_kwargs: Annotated[
        str, Meta(description="JSON: templates' default variables, as at the workers")
    ] = "{}"
    chat_drops_unused_tools: Annotated[
        bool, Meta(description="tool_choice none omits the tools, as set at the workers")
    ] = False
    render: Annotated[
        Literal["auto", "given", "never"],
        Meta(
            description="who makes token ids where the tokenizer is not exact: auto: `renderers`, "
            "else the workers; given: `renderers` alone; never: nobody"
        ),
    ] = "auto"
    renderers: Annotated[
        tuple[str, ...],
        Meta(description="URLs of servers that make token ids, as of `vllm launch render`"),
    ] = ()
    forward_token_ids: Annotated[
        bool, Meta(description="send exact ids instead of text to workers that take them")
    ] = False
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
        Meta(
            description=(
                "file of clients' API keys, a line each: KEY TENANT option=value...; "
                "none: clients need no key"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    admin_keys_file: Annotated[
        str | None,
        Meta(
            description=(
                "file of operators' keys, of the same form; none: the admin port needs no key"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    admin_open: Annotated[
        bool, Meta(description="the admin port may be beyond loopback without keys")
    ] = False
    admin_allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="host names by which the admin port may be asked, where it needs no key"),
    ] = ()
    drain_refuses: Annotated[
        bool, Meta(description="while the router drains (POST /drain) new requests get 503")
    ] = False
    unknown_paths: Annotated[
        Literal["refuse", "forward"],
        Meta(description="paths not in reference/apis.md: 404, or to a worker of the model"),
    ] = "refuse"
    model_limits: Annotated[
        tuple[str, ...],
        Meta(
            description="MODEL:max_requests=N,max_queued_tokens=N, what a model's workers may have "
            "of it at once; others wait"
        ),
    ] = ()
    triton_inputs: Annotated[
        tuple[str, ...],
        Meta(description="MODEL:ROLE=INPUT, what Triton models' inputs are; else by their config"),
    ] = ()
    triton_admin: Annotated[
        Literal["off", "load"],
        Meta(description="load: keys for all models may load and unload models at all Tritons"),
    ] = "off"
    explain: Annotated[
        bool, Meta(description="clients may ask x-warmroute-explain: 1, or full, for the decision")
    ] = True
    explain_every: Annotated[
        int, Meta(ge=0, le=1 << 30, description="every N-th decision is kept in full; 0: none")
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="least severe messages that are logged"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="form of the router's own log: text for people, json for log collectors"),
    ] = "text"
    request_log: Annotated[
        str | None,
        Meta(
            description="file to log requests to, for replays; none: no log",
            extra={"metavar": "FILE"},
        ),
    ] = None
    request_log_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 50, description="beyond this FILE becomes FILE.1, bytes")
    ] = 1 << 30
    record: Annotated[
        str | None,
        Meta(
            description="folder to log requests to in parts, for replays; none: off",
            extra={"metavar": "FOLDER"},
        ),
    ] = None
    access_log: Annotated[
        str | None,
        Meta(
            description=(
                "file that gets a JSON line for each request; -: standard output; none: no such log"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    access_log_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 50, description="beyond this FILE becomes FILE.1, bytes")
    ] = 1 << 30
    record_facts: Annotated[
        str | None,
        Meta(
            description="file to record all decisions to, for debugging; none: off",
            extra={"metavar": "FILE"},
        ),
    ] = None
    record_facts_bytes: Annotated[
        int, Meta(ge=4_096, le=1 << 50, description="beyond this the recording ends, bytes")
    ] = 1 << 30
    kv_state: Annotated[
        str | None,
        Meta(
            description="file to keep what is known of caches over a restart; none: off",
            extra={"metavar": "FILE"},
        ),
    ] = None
    hot_restart: Annotated[
        str | None,
        Meta(
            description="Unix socket by which the next router takes over; none: off",
            extra={"metavar": "SOCKET"},
        ),
    ] = None
    state: Annotated[
        str | None,
        Meta(
            description="redis URL by which several routers share what they know; none: alone",
            extra={"metavar": "URL"},
        ),
    ] = None
    limits: Limits = field(default_factory=Limits)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    intervals: Intervals = field(default_factory=Intervals)
    ejection: Ejection = field(default_factory=Ejection)
    health: HealthSettings = field(default_factory=HealthSettings)
    migration: Migration = field(default_factory=Migration)
    names: NameSettings = field(default_factory=NameSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    tls: Tls = field(default_factory=Tls)
    admin_tls: Tls = field(default_factory=Tls)
    workers_tls: WorkerTls = field(default_factory=WorkerTls)
    picker: Picker = field(default_factory=Picker)
    picker_tls: Tls = field(default_factory=Tls)
    recording: Recording = field(default_factory=Recording)
    retries: RetrySettings = field(default_factory=RetrySettings)
    roles: RoleSettings = field(default_factory=RoleSettings)
    identity: IdentitySettings = field(default_factory=IdentitySettings)
    waiting: WaitingSettings = field(default_factory=WaitingSettings)
    tenants: TenantRules = field(default_factory=TenantRules)
    replicas: Replicas = field(default_factory=Replicas)
    tracing: Tracing = field(default_factory=Tracing)

    def __repr__(self) -> str:
        """Brief, for `state` has a password in it."""
        return f"Config({len(self.workers)} workers, policy={self.policy!r})"
