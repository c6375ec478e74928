"""The router's configuration: every key with its unit, range and default.

Each key is defined here once. The YAML file, the flags, the environment variables, their help texts
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
    """The limits of everything whose size could grow without end."""

    body_bytes: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 30,
            description=(
                "largest request body, bytes; raise this limit for long prompts or images"
            ),
        ),
    ] = 16 << 20
    messages: Annotated[
        int, Meta(ge=1, le=1_000_000, description="maximum number of messages of one chat request")
    ] = 20_000
    body_values: Annotated[
        int,
        Meta(
            ge=16_384,
            le=1 << 24,
            description="maximum number of JSON values of one request body; token ids do not count",
        ),
    ] = 131_072
    message_text_bytes: Annotated[
        int,
        Meta(
            ge=32_768,
            le=1 << 30,
            description=(
                "largest text of one message, bytes; only text with escapes or beyond ASCII counts"
            ),
        ),
    ] = 4 << 20
    tokenized_chars: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 30,
            description=(
                "longest prompt that the router tokenizes, characters; the router matches longer "
                "prompts by their text"
            ),
        ),
    ] = 4 << 20
    header_bytes: Annotated[
        int,
        Meta(
            ge=1_024, le=1 << 20, description="largest single header of a request or a reply, bytes"
        ),
    ] = 32 << 10
    inflight_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="maximum number of requests at workers and at the router; then clients "
            "get 503",
        ),
    ] = 16_384
    queued_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 50,
            description=(
                "maximum number of prompt tokens that wait, at workers and at the router; then "
                "clients get 503"
            ),
        ),
    ] = 1 << 40
    worker_requests: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 50,
            description=(
                "maximum number of unfinished requests of one worker; further requests "
                "wait at the router"
            ),
        ),
    ] = 1 << 40
    worker_queued_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 50,
            description=(
                "maximum number of prompt tokens that one worker has still to compute; further "
                "requests wait at the router"
            ),
        ),
    ] = 1 << 40
    hold_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="maximum number of requests that wait at the router for a worker; then "
            "clients get 503",
        ),
    ] = 1_024
    hold_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description="longest wait of a request at the router, seconds; then the client gets "
            "503",
        ),
    ] = 300.0
    sessions: Annotated[
        int,
        Meta(
            ge=256,
            le=1 << 24,
            description=(
                "maximum number of sessions that the router remembers; at least the number of "
                "requests at a time"
            ),
        ),
    ] = 1 << 17
    session_blocks: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 28,
            description="maximum number of prompt blocks that the router remembers to tell "
            "sessions apart",
        ),
    ] = 1 << 20
    client_buffer_bytes: Annotated[
        int,
        Meta(
            ge=4_096,
            le=1 << 30,
            description=(
                "how much of an answer the router keeps for a client that reads slowly, bytes"
            ),
        ),
    ] = 262_144
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=4_096,
            description="maximum number of workers at the same time; workers that are leaving "
            "count",
        ),
    ] = 256
    ranks: Annotated[
        int,
        Meta(
            ge=1,
            le=4_096,
            description="maximum number of data-parallel ranks behind one worker URL",
        ),
    ] = 64
    models: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="maximum number of models of one worker; LoRA adapters count",
        ),
    ] = 1_024
    index_entries: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 30,
            description=(
                "maximum number of distinct KV blocks in the prefix index; raise this limit for "
                "large fleets"
            ),
        ),
    ] = 1 << 21
    index_bytes: Annotated[
        int, Meta(ge=1 << 20, le=1 << 44, description="largest memory of the prefix index, bytes")
    ] = 1 << 30
    speculative_entries: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 30,
            description=(
                "maximum number of distinct KV blocks that the router expects at workers before "
                "KV events"
            ),
        ),
    ] = 1 << 20
    mirrored_blocks: Annotated[
        int,
        Meta(
            ge=1_024,
            le=1 << 30,
            description="maximum number of KV blocks that the router remembers for workers "
            "without KV events",
        ),
    ] = 1 << 22
    token_memo_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description=(
                "memory for token ids of earlier chats, bytes; 0: the router keeps no ids"
            ),
        ),
    ] = 64 << 20
    render_calls: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="maximum number of requests at a time whose token ids renderers make",
        ),
    ] = 64
    events_backlog_batches: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="maximum number of batches of a worker's KV events that wait during a "
            "replay of missed events",
        ),
    ] = 10_000


_HEADER = r"^[a-z0-9][a-z0-9-]{0,63}$"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base class of all sections. Lifetime: until the next reload."""


class TimeoutSettings(_Section, frozen=True):
    """The time limits of each step, in seconds."""

    connect_s: Annotated[
        float, Meta(ge=0.01, le=60.0, description="longest time to connect to a worker, seconds")
    ] = 2.0
    send_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=3_600.0,
            description=(
                "longest time in which a worker reads nothing of a request's body, seconds"
            ),
        ),
    ] = 30.0
    first_byte_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400.0,
            description="longest time until a reply begins, which includes the prefill, seconds",
        ),
    ] = 600.0
    first_byte_ms_per_token: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1_000.0,
            description=(
                "time added to `first_byte_s` for each prompt token that must be computed, ms"
            ),
        ),
    ] = 0.0
    whole_answer_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400.0,
            description="longest time for an answer that does not stream, seconds",
        ),
    ] = 600.0
    between_bytes_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0, description="longest silence within a reply, seconds")
    ] = 120.0
    total_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="longest time of a request in all, seconds; 0: no bound",
        ),
    ] = 0.0
    stall_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=600.0,
            description=(
                "silence of all streams of a worker after which the router probes the worker, "
                "seconds"
            ),
        ),
    ] = 0.5
    keep_alive_s: Annotated[
        float,
        Meta(
            ge=0.0, le=3_600.0, description="how long an idle client connection stays open, seconds"
        ),
    ] = 75.0
    render_s: Annotated[
        float,
        Meta(
            ge=0.01, le=60.0, description="longest time for a renderer to make token ids, seconds"
        ),
    ] = 1.0
    probe_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=60.0,
            description=(
                "longest time for a worker to answer a health probe or to report its load, seconds"
            ),
        ),
    ] = 2.0
    shutdown_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description="time that running requests get when the router stops, seconds",
        ),
    ] = 30.0
    handover_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description=(
                "time that running requests of the old router get after a hot restart, seconds"
            ),
        ),
    ] = 3_600.0
    speculative_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=600.0,
            description=(
                "how long the router expects a KV block at a worker if no KV event confirms the "
                "block, seconds"
            ),
        ),
    ] = 10.0


class Intervals(_Section, frozen=True):
    """The times between repeated actions, in seconds."""

    load_report_s: Annotated[
        float,
        Meta(
            ge=0.02,
            le=60.0,
            description=(
                "time between two load reports of a worker, seconds; up to 8 times as long while "
                "the worker is idle"
            ),
        ),
    ] = 0.25
    health_s: Annotated[
        float,
        Meta(ge=0.05, le=600.0, description="time between two health probes of a worker, seconds"),
    ] = 1.0
    tick_s: Annotated[
        float,
        Meta(
            ge=0.005,
            le=5.0,
            description="time after which the router looks again at the requests that wait, "
            "seconds",
        ),
    ] = 0.05
    token_recheck_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=3_600.0,
            description=(
                "time until a model whose token ids differed from the engine's is "
                "checked again, seconds"
            ),
        ),
    ] = 300.0
    kv_state_s: Annotated[
        float,
        Meta(ge=1.0, le=86_400.0, description="time between two savings of `kv_state`, seconds"),
    ] = 60.0


class Config(_Section, frozen=True):
    """The whole configuration, after `router.settings.load` has checked it."""

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
                "address of the admin port; keep the port private: anyone who reaches the port "
                "controls the router"
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
            description=(
                "port at `host` for Triton's clients (KServe's gRPC); 0: the system chooses; -1: "
                "no such port"
            ),
        ),
    ] = -1
    reuse_port: Annotated[
        bool,
        Meta(
            description="whether several routers may listen on the same client port (SO_REUSEPORT)"
        ),
    ] = False
    workers: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "engine that gets requests: URL, then options as ,key=value (in a file also as "
                "mappings)"
            ),
            extra={"flag": "--worker", "metavar": "URL"},
        ),
    ] = ()
    discovery: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "source of workers: file:PATH, dns:NAME:PORT, redis, kubernetes:..., "
                "inferencepool:..., trtllm:PATH"
            ),
            extra={"flag": "--discover", "metavar": "SOURCE"},
        ),
    ] = ()
    event_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "hosts besides a worker's own host that may send the worker's KV events: NAME, "
                "CIDR, ipc, *"
            )
        ),
    ] = ()
    discovery_grace_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="how long the router keeps the last workers if `discovery` fails or names "
            "no worker, seconds",
        ),
    ] = 30.0
    slow_start_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3_600.0,
            description="time until a new worker gets a full share of requests, seconds",
        ),
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description=(
                "longest time for requests of a leaving worker to end, seconds; 0: no bound"
            ),
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
            min_length=1,
            description="policy that decides if `policy` fails; a built-in policy without memory",
        ),
    ] = "least_requests"
    policy_slow_ms: Annotated[
        float,
        Meta(
            ge=0.1,
            le=60_000.0,
            description="time after which a decision of `policy` counts as a fault, ms",
        ),
    ] = 5.0
    policy_hang_s: Annotated[
        float,
        Meta(
            ge=0.5,
            le=3_600.0,
            description="time after which a decision of `policy` ends the router's process, "
            "seconds",
        ),
    ] = 10.0
    disaggregation: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description=(
                "whether one worker prefills a request and another decodes it, if workers have "
                "these roles; auto: if the split pays"
            )
        ),
    ] = "auto"
    disaggregation_tpot_ms: Annotated[
        float,
        Meta(
            ge=0.0,
            le=60_000.0,
            description=(
                "time per output token that clients accept, ms; with `disaggregation: auto` "
                "workers with running answers get only prefills that keep this time; 0: unknown"
            ),
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
        Meta(
            description="tokenizer file that vLLM workers use, as the workers' --tokenizer-mode "
            "says"
        ),
    ] = "auto"
    harmony_date: Annotated[
        str,
        Meta(
            description=(
                "date in gpt-oss prompts: the workers' time zone (UTC, Europe/Berlin) "
                "or their VLLM_SYSTEM_START_DATE; local: this machine's zone"
            )
        ),
    ] = "local"
    chat_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="shape of message content in chat templates; set this key as the workers do"
        ),
    ] = "auto"
    chat_template_kwargs: Annotated[
        str,
        Meta(
            description="variables of chat templates, a JSON object; set this key as the workers do"
        ),
    ] = "{}"
    chat_drops_unused_tools: Annotated[
        bool,
        Meta(
            description=(
                "whether the prompt leaves out tools if tool_choice is none; set this key as the "
                "workers do"
            )
        ),
    ] = False
    render: Annotated[
        Literal["auto", "given", "never"],
        Meta(
            description=(
                "servers that make token ids where the router's tokenizer is not exact; auto: "
                "`renderers`, else the workers; given: `renderers` only; never: no server"
            )
        ),
    ] = "auto"
    renderers: Annotated[
        tuple[str, ...],
        Meta(description="URLs of servers that make token ids, such as `vllm launch render`"),
    ] = ()
    forward_token_ids: Annotated[
        bool,
        Meta(description=("whether workers that take token ids get exact ids in place of text")),
    ] = False
    relay: Annotated[
        Literal["auto", "python"],
        Meta(
            description=(
                "how the router passes on replies; auto: on a native thread where possible; "
                "python: always in Python"
            )
        ),
    ] = "auto"
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=(1 << 63) - 1,
            description=("seed of random choices; the same requests and seed give the same routes"),
        ),
    ] = 0
    session_header: Annotated[
        str, Meta(pattern=_HEADER, description="request header with the client's session id")
    ] = "x-session-id"
    tenant_header: Annotated[
        str,
        Meta(
            pattern=_HEADER,
            description="request header with the tenant; only `trusted_peers` may set this header",
        ),
    ] = "x-tenant"
    deadline_header: Annotated[
        str,
        Meta(
            pattern=_HEADER,
            description="request header with the client's deadline, in milliseconds from now",
        ),
    ] = "x-request-timeout-ms"
    trusted_peers: Annotated[
        tuple[str, ...],
        Meta(description="CIDRs of clients whose tenant header the router believes"),
    ] = ()
    api_keys_file: Annotated[
        str | None,
        Meta(
            description=(
                "file of clients' API keys, a line for each key: KEY TENANT option=value...; none: "
                "clients need no key"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    admin_keys_file: Annotated[
        str | None,
        Meta(
            description=(
                "file of operators' keys, in the form of `api_keys_file`; none: the admin port "
                "needs no key"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    admin_open: Annotated[
        bool,
        Meta(
            description=(
                "whether an admin port without keys may be open beyond loopback, behind a network "
                "policy"
            )
        ),
    ] = False
    admin_allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "host names that requests to an admin port without keys may use, besides "
                "addresses and localhost"
            )
        ),
    ] = ()
    drain_refuses: Annotated[
        bool,
        Meta(
            description="whether the router answers new requests with 503 while it drains "
            "(POST /drain)"
        ),
    ] = False
    unknown_paths: Annotated[
        Literal["refuse", "forward"],
        Meta(
            description=(
                "what the router does with requests of unknown paths; refuse: answer 404; "
                "forward: send the request to a worker of the model"
            )
        ),
    ] = "refuse"
    model_limits: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "MODEL:max_requests=N,max_queued_tokens=N: limits of a model's requests and "
                "prompt tokens at workers at a time; further requests wait; * stands for each "
                "other model"
            )
        ),
    ] = ()
    triton_inputs: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "MODEL:ROLE=INPUT: the role of an input of a Triton model; default: the model's "
                "configuration"
            )
        ),
    ] = ()
    triton_admin: Annotated[
        Literal["off", "load"],
        Meta(
            description=(
                "whether clients may load and unload models at all Tritons; load: clients with a "
                "key for all models may"
            )
        ),
    ] = "off"
    explain: Annotated[
        bool,
        Meta(
            description=(
                "whether clients may ask for the router's decision by the header "
                "x-warmroute-explain: 1, or full"
            )
        ),
    ] = True
    explain_every: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 30,
            description="the router keeps every N-th decision in full for /explain; 0: no decision",
        ),
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
            description=(
                "file that gets a line for each request, for replays in the simulator; "
                "none: no such file"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    request_log_bytes: Annotated[
        int,
        Meta(
            ge=4_096,
            le=1 << 50,
            description="size at which the router renames the log FILE to FILE.1, bytes",
        ),
    ] = 1 << 30
    record: Annotated[
        str | None,
        Meta(
            description=(
                "folder that gets the request log in parts, for replays in the simulator; none: off"
            ),
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
        int,
        Meta(
            ge=4_096,
            le=1 << 50,
            description="size at which the router renames the log FILE to FILE.1, bytes",
        ),
    ] = 1 << 30
    record_facts: Annotated[
        str | None,
        Meta(
            description="file that records all that the router sees and decides, for debugging; "
            "none: off",
            extra={"metavar": "FILE"},
        ),
    ] = None
    record_facts_bytes: Annotated[
        int,
        Meta(
            ge=4_096,
            le=1 << 50,
            description="size of the file `record_facts` at which the "
            "router stops recording, bytes",
        ),
    ] = 1 << 30
    kv_state: Annotated[
        str | None,
        Meta(
            description="file that keeps the router's knowledge of caches over a restart; none: "
            "off",
            extra={"metavar": "FILE"},
        ),
    ] = None
    hot_restart: Annotated[
        str | None,
        Meta(
            description=(
                "Unix socket by which a new router process takes over without a pause; none: off"
            ),
            extra={"metavar": "SOCKET"},
        ),
    ] = None
    state: Annotated[
        str | None,
        Meta(
            description=(
                "Redis URL by which several routers share load, sessions and quotas; none: this "
                "router is alone"
            ),
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
        """Return a short text that omits most values, because `state` contains a password."""
        return f"Config({len(self.workers)} workers, policy={self.policy!r})"
