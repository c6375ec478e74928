"""The command-line flags of other routers, and the keys of our configuration that they become. Each
row is one flag of one or more other routers. The rows were taken from the argument parsers of the
releases that `PEERS` names: from the Python parsers in the wheels of sglang-router, smg and
vllm-router, and from `src/vllm_router/parsers/parser.py` at the named commit of production-stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NONE, ONE, SEVERAL = 0, 1, 2  # how many values a flag takes


@dataclass(frozen=True, slots=True)
class PeerRouter:
    """Describes another router program: its release, its command, and its default address."""

    name: str
    letter: str  # in `PeerFlag.peers`
    release: str
    host: str
    port: int
    programs: tuple[str, ...]  # and images, without registry and tag
    modules: tuple[str, ...]  # of `python -m`
    rules: str  # its names of policies, separated by blanks


@dataclass(frozen=True, slots=True)
class PeerFlag:
    """A flag of another router, and the key that it becomes, or the reason why it becomes
    no key.
    """

    name: str
    peers: str  # letters of the peers that have it
    takes: int
    key: str = ""  # our key; of `rule`: NAME:PARAMETER of a policy
    how: str = ""  # a step of `router.cli.convert`; empty: it becomes no key
    value: str = ""  # the written value, if `fixed`
    why: str = ""  # why there is no key and what to do; else a remark about the line
    default: str = ""  # the peers' value if the flag is not given, where ours is another
    alias_of: str = ""  # the flag's other name


PEERS = (
    PeerRouter(
        *("sglang-router", "g", "0.3.2 (January 2026)", "0.0.0.0", 30000),
        ("sglang-router", "amg", "sgl-model-gateway"),
        ("sglang_router", "sglang_router.launch_router", "sglang_router.cli"),
        "random round_robin cache_aware power_of_two manual",
    ),
    PeerRouter(
        *("smg", "s", "1.13.0 (October 2026)", "0.0.0.0", 30000),
        *(("smg",), ("smg", "smg.launch_router", "smg.cli")),
        "random round_robin passthrough cache_aware power_of_two least_load manual "
        "consistent_hashing prefix_hash",
    ),
    PeerRouter(
        *("vllm-router", "v", "0.1.17 (November 2026)", "127.0.0.1", 30000),
        *(("vllm-router",), ("vllm_router", "vllm_router.launch_router")),
        "random round_robin cache_aware kv_aware power_of_two consistent_hash sticky_least_loaded",
    ),
    PeerRouter(
        *("production-stack", "p", "a6c01db0 (2026-08-05)", "0.0.0.0", 8001),
        *(("lmstack-router",), ("vllm_router.app",)),
        "roundrobin session kvaware prefixaware disaggregated_prefill "
        "disaggregated_prefill_orchestrated",
    ),
)

# Our policy for each rule of another router. Rules that follow caches become our default policy.
AFFINITY = "warmset"
RULES: Mapping[str, str] = MappingProxyType(
    {
        "cache_aware": AFFINITY,
        "kv_aware": AFFINITY,
        "kvaware": AFFINITY,
        "prefixaware": AFFINITY,
        "disaggregated_prefill": AFFINITY,
        "disaggregated_prefill_orchestrated": AFFINITY,
        "random": "random",
        "round_robin": "round_robin",
        "roundrobin": "round_robin",
        "power_of_two": "power_of_two",
        "least_load": "least_load",
        "prefix_hash": "prefix_hash",
        "manual": "session_sticky",
        "session": "session_sticky",
        "consistent_hash": "session_sticky",
        "consistent_hashing": "session_sticky",
        "sticky_least_loaded": "session_sticky",
    }
)


def _row(peers: str, spec: str, key: str, how: str, **more: str) -> PeerFlag:
    """Return the `PeerFlag` for a text: `--flag` takes no value, `--flag=` takes one value, and
    `--flag=*` takes several values.
    """
    name, equals, many = spec.partition("=")
    return PeerFlag(name, peers, SEVERAL if many else ONE if equals else NONE, key, how, **more)


def _to(
    peers: str, spec: str, key: str, how: str = "text", why: str = "", default: str = ""
) -> PeerFlag:
    return _row(peers, spec, key, how, why=why, default=default)


def _fixed(peers: str, spec: str, key: str, value: str, why: str = "") -> PeerFlag:
    return _row(peers, spec, key, "fixed", value=value, why=why)


def _also(peers: str, spec: str, other: str) -> PeerFlag:
    return _row(peers, spec, "", "", alias_of=other)


def _none(peers: str, why: str, *specs: str) -> tuple[PeerFlag, ...]:
    return tuple(_row(peers, spec, "", "", why=why) for spec in specs)


_METRICS = "metrics are at the admin port"
_LISTENING = (
    _to("gsvp", "--host=", "host"),
    _to("gsvp", "--port=", "port"),
    _to("gs", "--prometheus-port=", "admin_port", "text", _METRICS, default="29000"),
    _to("v", "--prometheus-port=", "admin_port", "text", _METRICS),
    *_none(
        "gsv",
        "the admin port stays on loopback, for whoever reaches it controls the router; "
        "give admin_keys_file before you set admin_host",
        "--prometheus-host=",
    ),
    *_none("gs", "the buckets of metrics are fixed", "--prometheus-duration-buckets=*"),
    *_none("p", "the paths begin at /; let a proxy cut the prefix", "--root-path="),
    *_none("gsv", "the router answers no CORS; let a proxy do it", "--cors-allowed-origins=*"),
    *_none("s", "/health and /ready are at the client port", "--health-check-port="),
    _to("gsv", "--max-payload-size=", "limits.body_bytes", default="536870912"),
    _to("s", "--header-read-timeout-secs=", "server.head_s", default="30"),
    _to("s", "--idle-connection-timeout-secs=", "timeouts.keep_alive_s", default="90"),
    *_none(
        "s",
        "server.body_s bounds the time of a whole body instead",
        "--stream-body-stall-timeout-secs=",
    ),
    _to("s", "--sse-keepalive-secs=", "waiting.ping_s"),
    _to("gs", "--shutdown-grace-period-secs=", "timeouts.shutdown_s", default="180"),
    _to("gsv", "--request-timeout-secs=", "timeouts.total_s", default="1800"),
    _to("gs", "--tls-cert-path=", "tls.cert"),
    _to("gs", "--tls-key-path=", "tls.key"),
    _to("gs", "--client-cert-path=", "workers_tls.cert"),
    _to("gs", "--client-key-path=", "workers_tls.key"),
    _to("gs", "--ca-cert-paths=*", "workers_tls.ca", "first", "join several files into one"),
    *_none("s", "workers are spoken to by HTTP/1.1", "--upstream-http2"),
    *_none("s", "idle connections to workers are managed", "--upstream-pool-idle-timeout-secs="),
    *_none("s", "every request is kept until it is answered", "--max-buffered-request-bytes="),
)

_WORKERS = (
    _to("gsv", "--worker-urls=*", "workers", "workers"),
    _to("gsv", "--prefill=*", "workers", "prefill"),
    _to("gsv", "--decode=", "workers", "decode"),
    _to("p", "--static-backends=", "workers", "static"),
    _to("p", "--static-models=", "workers", "of_static"),
    _to("p", "--static-model-labels=", "workers", "of_static"),
    _to("p", "--prefill-model-labels=", "workers", "of_static"),
    _to("p", "--decode-model-labels=", "workers", "of_static"),
    *_none("p", "each worker is asked what it serves", "--static-model-types="),
    _fixed("gs", "--pd-disaggregation", "disaggregation", "always"),
    _fixed("v", "--vllm-pd-disaggregation", "disaggregation", "always"),
    _to("v", "--kv-connector=", "workers", "of_workers"),
    _to("v", "--kv-event-source=", "workers", "of_workers"),
    _to("v", "--kv-event-replay-source=", "workers", "of_workers"),
    _to("v", "--pd-kv-events=", "workers", "of_workers"),
    _to("v", "--kv-event-block-size=", "workers", "of_workers"),
    _to("gs", "--backend=", "workers", "of_workers"),
    *_none("v", "each worker is asked what it serves", "--kv-event-model="),
    *_none("s", "each worker is asked for its block size", "--block-size="),
    *_none("s", "encoders have no role of their own here", "--encode=*", "--epd-disaggregation"),
    *_none(
        "v",
        "workers do not register by vLLM's ZMQ discovery; list them, or use a source of "
        "docs/reference/discovery.md",
        "--vllm-discovery-address=",
    ),
    *_none("gsv", "nothing to set: each worker is asked for its models", "--enable-igw"),
    *_none("gs", "nothing to set: each data-parallel rank is a worker", "--dp-aware"),
    *_none(
        "v",
        "nothing to set: each data-parallel rank is a worker",
        "--intra-node-data-parallel-size=",
    ),
    *_none("s", "the policy chooses among ranks, too", "--dp-minimum-tokens-scheduler"),
    *_none("gv", "the router is the only one there is", "--mini-lb"),
    *_none("s", "workers are reached by HTTP, not by ZMQ", "--zmq-engine-count="),
    *_none(
        "gsv",
        "the router starts without workers and uses each one as soon as it is ready",
        *("--worker-startup-timeout-secs=", "--worker-startup-check-interval="),
    ),
    *_none(
        "s",
        "the router starts without workers and uses each one as soon as it is ready",
        "--worker-startup-delay=",
    ),
    _to("s", "--worker-warmup-secs=", "slow_start_s"),
    *_none(
        "s",
        "the policy prices the cold cache of a new worker; slow_start_s is all there is to set",
        *("--worker-warmup-share=", "--worker-warmup-blocks=", "--worker-warmup-thin-ratio="),
        "--worker-warmup-divert-every=",
    ),
    *_none("s", "workers are added and removed at once", "--job-queue-capacity="),
    *_none("s", "workers are added and removed at once", "--job-queue-concurrency="),
)

_DISCOVERY = (
    _to("gsv", "--service-discovery", "discovery", "pods"),
    _to("p", "--service-discovery=", "discovery", "pods"),
    _to("gsv", "--selector=*", "discovery", "of_pods"),
    _to("gsv", "--service-discovery-port=", "discovery", "of_pods"),
    _to("gsv", "--service-discovery-namespace=", "discovery", "of_pods"),
    _to("gsv", "--prefill-selector=*", "discovery", "of_pods"),
    _to("gsv", "--decode-selector=*", "discovery", "of_pods"),
    _to("p", "--k8s-namespace=", "discovery", "of_pods"),
    _to("p", "--k8s-port=", "discovery", "of_pods"),
    _to("p", "--k8s-label-selector=", "discovery", "of_pods"),
    *_none("p", "the watch is renewed by itself", "--k8s-watcher-timeout-seconds="),
    *_none("p", "each address of the Service is a worker", "--k8s-service-discovery-type="),
    *_none(
        "s",
        "write the workers in the form of docs/reference/discovery.md and name the file as "
        "discovery: [file:PATH]",
        *("--discovery-provider=", "--discovery-file=", "--discovery-check-interval-secs="),
    ),
    *_none(
        "s",
        "give `transfer` to the source, as in kubernetes:NAMESPACE/SERVICE,transfer=mooncake",
        *("--kv-connector-annotation=", "--kv-engine-id-annotation="),
    ),
    *_none("s", "encoders have no role of their own here", "--encode-selector=*"),
    *_none("s", "each worker is asked what it serves; names.aliases renames", "--model-id-from="),
    *_none(
        "p",
        "list such a server as a worker with `kind: openai`",
        "--external-providers-config=",
    ),
    *_none(
        "p",
        "convert the flags in it, too; SIGHUP makes the router read its file again",
        *("--dynamic-config-yaml=", "--dynamic-config-json="),
    ),
)

_POLICY = (
    _to("gsv", "--policy=", "policy", "policy"),
    _to("p", "--routing-logic=", "policy", "policy"),
    *_none("gsv", "one policy places both legs", "--prefill-policy=", "--decode-policy="),
    *_none("s", "encoders have no role of their own here", "--encode-policy="),
    _to("gsv", "--cache-threshold=", "cache_aware:match_threshold", "rule"),
    _also("s", "--cache-match-threshold=", "--cache-threshold"),
    _to("gsv", "--balance-abs-threshold=", "cache_aware:balance_abs", "rule"),
    _also("s", "--spill-abs-threshold=", "--balance-abs-threshold"),
    _to("gsv", "--balance-rel-threshold=", "cache_aware:balance_rel", "rule"),
    _also("s", "--spill-rel-threshold=", "--balance-rel-threshold"),
    _to("s", "--balance-token-usage-threshold=", "cache_aware:kv_spread", "rule"),
    _to("s", "--overload-token-usage-threshold=", "cache_aware:kv_ceiling", "rule"),
    _to("s", "--prefix-token-count=", "prefix_hash:prefix_tokens", "rule"),
    _to("s", "--prefix-hash-load-factor=", "prefix_hash:load_factor", "rule"),
    _to("s", "--least-load-kv-pressure-weight=", "least_load:kv_weight_s", "rule"),
    *_none(
        "s",
        "our rule of that name has no such parameter",
        *("--prefix-hash-balance-abs-threshold=", "--least-load-default-throughput="),
        *("--least-load-mean-prefill-tokens=", "--least-load-max-waiting-requests="),
    ),
    _to("s", "--power-of-two-load-metric=", "policy", "of_policy"),
    *_none(
        "gsv",
        "the index follows the engines' own evictions; limits.index_bytes bounds its memory",
        *("--eviction-interval-secs=", "--max-tree-size="),
    ),
    *_none(
        "s",
        "one index follows the engines' KV events; there is none to choose",
        *("--kv-index=", "--cache-index=", "--cache-ttl-secs=", "--cache-boundaries="),
    ),
    *_none("gs", "one policy places both legs", "--bucket-adjust-interval-secs="),
    *_none(
        "gs",
        "session_sticky forgets the oldest sessions; its parameter max_sessions says how many",
        "--max-idle-secs=",
    ),
    _also("s", "--sticky-key-idle-secs=", "--max-idle-secs"),
    *_none("gs", "a new session goes where the fewest requests are", "--assignment-mode="),
    *_none(
        "s",
        "warmset keeps a session where its cache is; policy: session_sticky never moves one",
        "--routing-key-override",
    ),
    _also("s", "--sticky-sessions", "--routing-key-override"),
    _to("s", "--routing-key-headers=*", "session_header", "header"),
    _to("p", "--session-key=", "session_header", "header"),
    *_none(
        "v",
        "warmset keeps a session where its cache is",
        "--kv-aware-session-affinity-ttl-secs=",
    ),
    *_none(
        "v",
        "KV in host memory or on disk counts as the engine reports it; policy: dynamo has "
        "host_credit and disk_credit",
        *("--kv-penalty-host=", "--kv-penalty-external=", "--kv-penalty-disk="),
    ),
    *_none("v", "the cheapest worker is taken", "--router-temperature="),
    *_none("s", "the cheapest worker is taken", "--selection-temperature=", "--selection-policy="),
    *_none(
        "s",
        "what was sent counts from the moment it is sent; timeouts.speculative_s bounds it",
        "--selection-accounting-ttl-ms=",
    ),
    *_none("s", "policy: dynamo?decay=N fades hits behind a queue", "--overlap-decay="),
    *_none(
        "v",
        "warmset holds new sessions while caches are full; sessions are read from the requests",
        *("--enable-program-scheduling", "--program-scheduling-config-json="),
    ),
    *_none(
        "p",
        "the engines tell their caches by KV events, without an LMCache controller",
        *("--lmcache-controller-port=", "--lmcache-controller-reply-port="),
        *("--lmcache-controller-heartbeat-port=", "--lmcache-health-check-interval="),
        "--lmcache-worker-timeout=",
    ),
    *_none(
        "p",
        "warmset weighs every hit against the load, without a threshold",
        *("--kv-aware-threshold=", "--prefix-min-match-length="),
    ),
)

_LIMITS = (
    _to("gsv", "--max-concurrent-requests=", "model_limits", "concurrency"),
    _to("gsv", "--queue-size=", "limits.hold_requests", "concurrency", default="100"),
    _to("gsv", "--queue-timeout-secs=", "limits.hold_s", "concurrency", default="60"),
    *_none(
        "gsv",
        "give keys a requests_per_s in api_keys_file (docs/reference/keys.md)",
        "--rate-limit-tokens-per-second=",
    ),
    *_none(
        "s",
        "give a worker max_requests, or set limits.worker_requests",
        *("--prefill-max-inflight-requests-per-worker=", "--prefill-queue-size="),
        "--prefill-queue-timeout-secs=",
    ),
    *_none("s", "limits.hold_s bounds every wait", "--pd-admission-wait-secs="),
    *_none(
        "s",
        "the policy prices queues and KV memory in use; the wrapper `thresholds` spares workers "
        "beyond their max_requests or max_kv_fraction",
        *("--worker-overload-waiting-requests=", "--worker-overload-token-usage="),
        *("--worker-overload-protection", "--disable-worker-overload-protection"),
    ),
    *_none(
        "s", "requests wait at the router instead, limits.hold_s long", "--worker-overload-shed"
    ),
    *_none(
        "s",
        "priority and weight stand in api_keys_file (docs/reference/keys.md)",
        *("--priority-scheduler-enabled", "--priority-scheduler-default-max-class="),
        *("--priority-scheduler-config=", "--priority-scheduler-tenant-metric-top-n="),
    ),
    *_none(
        "s",
        "requests_per_s and tokens_per_s stand in api_keys_file (docs/reference/keys.md)",
        *("--tenant-rate-limit-enabled", "--tenant-rate-limit-config="),
    ),
)

_FAILURES = (
    _to("gsv", "--retry-max-retries=", "retries.attempts", default="5"),
    _to("p", "--max-instance-failover-reroute-attempts=", "retries.attempts", "one_more"),
    _fixed("gsv", "--disable-retries", "retries.attempts", "1"),
    _to("gsv", "--retry-initial-backoff-ms=", "retries.backoff_s", "ms", default="50"),
    _to("gsv", "--retry-max-backoff-ms=", "retries.backoff_max_s", "ms", default="30000"),
    *_none("gsv", "the wait doubles each time", "--retry-backoff-multiplier="),
    *_none("gsv", "the wait is drawn between 0 and its bound", "--retry-jitter-factor="),
    _to("gsv", "--cb-failure-threshold=", "ejection.failures", default="10"),
    _to("gsv", "--cb-timeout-duration-secs=", "ejection.recover_s", default="60"),
    *_none("gsv", "one good answer brings a worker back", "--cb-success-threshold="),
    *_none(
        "gsv",
        "failures in a row count without a window; ejection.window_s is that of ejection.rate",
        "--cb-window-duration-secs=",
    ),
    *_none(
        "gsv",
        "failing workers are always ejected; raise ejection.failures and ejection.rate",
        "--disable-circuit-breaker",
    ),
    _to("gsv", "--health-failure-threshold=", "health.probes", default="3"),
    _to("gsv", "--health-check-timeout-secs=", "timeouts.probe_s", default="5"),
    _to("gsv", "--health-check-interval-secs=", "intervals.health_s", default="60"),
    _to("p", "--static-backend-health-check-interval=", "intervals.health_s"),
    _to("p", "--static-backend-health-check-timeout-seconds=", "timeouts.probe_s"),
    _to("p", "--backend-health-check-timeout-seconds=", "timeouts.probe_s"),
    *_none("p", "workers are always probed, without a prompt", "--static-backend-health-checks"),
    *_none("gsv", "one good probe brings a worker back", "--health-success-threshold="),
    *_none("gsv", "each kind of engine has its own path", "--health-check-endpoint="),
    *_none("gs", "workers are always probed", "--disable-health-check"),
    *_none(
        "s",
        "health.silent_s is the silence after which a worker is down; a source of discovery "
        "removes it",
        *("--remove-unhealthy-workers", "--no-remove-unhealthy-workers"),
        *("--worker-auto-recovery", "--no-worker-auto-recovery", "--worker-stale-secs="),
    ),
    *_none(
        "s",
        "timeouts.stall_s is the silence of all of a worker's streams that calls for a probe",
        *("--worker-stall-secs=", "--worker-wedge-secs="),
    ),
    *_none("s", "load is reported every intervals.load_report_s", "--load-monitor-interval="),
    *_none("s", "load is always read", "--disable-load-monitoring"),
    *_none("p", "load is reported every intervals.load_report_s", "--engine-stats-interval="),
)

_TOKENS = (
    _to("gs", "--model-path=", "tokenizer", "folder"),
    _also("s", "--model=", "--model-path"),
    _to("gs", "--tokenizer-path=", "tokenizer", "folder"),
    *_none("gs", "put it into the tokenizer's folder as chat_template.jinja", "--chat-template="),
    *_none("s", "leave `tokenizer` out", "--disable-tokenizer-autoload"),
    *_none(
        "gs",
        "ids of known beginnings are always kept; limits.token_memo_bytes bounds them",
        *("--tokenizer-cache-enable-l0", "--tokenizer-cache-l0-max-entries="),
        *("--tokenizer-cache-enable-l1", "--tokenizer-cache-l1-max-memory="),
    ),
    *_none(
        "s",
        "ids of known beginnings are always kept; limits.token_memo_bytes bounds them",
        "--tokenizer-cache-l0-max-memory=",
    ),
    *_none(
        "gs",
        "answers pass as the engine wrote them; give the parser to the engine",
        *("--reasoning-parser=", "--tool-call-parser="),
    ),
    *_none("s", "answers pass as the engine wrote them", "--parser="),
    *_none(
        "s",
        "images go to the engine as they came",
        *("--multimodal-tensor-transport=", "--multimodal-shm-min-bytes="),
        *("--multimodal-max-inflight-bytes=", "--mm-per-request-image-limit="),
        *("--mm-processing=", "--mm-pixel-cache-mb=", "--mm-pixel-rdma"),
        *("--mm-allowed-media-domains=", "--mm-allow-private-media-hosts"),
        *("--rdma-listen-ip=", "--rdma-slot-ttl-s=", "--log-mm-timing"),
    ),
    _to("s", "--model-alias=", "names.aliases", "aliases"),
    _to("p", "--static-aliases=", "names.aliases", "aliases"),
)

_ACCESS = (
    _to("gsv", "--api-key=", "api_keys_file", "keys"),
    _to("s", "--tenant-api-key=", "api_keys_file", "keys"),
    _to("gs", "--control-plane-api-keys=*", "admin_keys_file", "keys"),
    *_none(
        "gs",
        "the access log and the router's own log say who did what",
        "--control-plane-audit-enabled",
    ),
    *_none(
        "gs",
        "the router reads no JWT; let a proxy check it, or give API keys",
        *("--jwt-issuer=", "--jwt-audience=", "--jwt-jwks-uri=", "--jwt-role-mapping=*"),
    ),
    _to("s", "--tenant-header-name=", "tenant_header", "header"),
    *_none(
        "s",
        "name the proxies whose tenant header is believed in trusted_peers, as CIDRs",
        "--trust-tenant-header",
    ),
)

_LOGS = (
    _to("gsvp", "--log-level=", "log_level", "level"),
    _to("p", "--log-format=", "log_format"),
    _fixed("s", "--log-json", "log_format", "json"),
    *_none("gsv", "the log goes to standard error; access_log names a file", "--log-dir="),
    *_none("gsv", "the request's id is x-request-id", "--request-id-headers=*"),
    _to("gs", "--otlp-traces-endpoint=", "tracing.endpoint", "otlp"),
    _to("gs", "--enable-trace", "tracing.endpoint", "otlp"),
    _to("p", "--otel-endpoint=", "tracing.endpoint", "otlp"),
    _to("p", "--otel-secure", "tracing.endpoint", "otlp"),
    _to("p", "--otel-service-name=", "tracing.service_name"),
    *_none("p", "`warmroute top` and /metrics show them", "--log-stats", "--log-stats-interval="),
    *_none("p", "Prometheus chooses the window", "--request-stats-window="),
    *_none(
        "p",
        "the router reports to no Sentry; tracing.endpoint takes spans",
        *("--sentry-dsn=", "--sentry-traces-sample-rate="),
        "--sentry-profile-session-sample-rate=",
    ),
    *_none("s", "the router writes no heap profiles", "--jemalloc-prof-dir="),
)

_STORES = "the router stores no conversations; the engine, or a service before the router, does"
_MESH = "replicas share state by Redis: give `state` (docs/replicas.md)"
_OTHERS = (
    *_none("gs", "the router calls no tools; clients do", "--mcp-config-path="),
    *_none(
        "gs",
        _STORES,
        *("--history-backend=", "--oracle-wallet-path=", "--oracle-tns-alias="),
        *("--oracle-connect-descriptor=", "--oracle-username=", "--oracle-password="),
        *("--oracle-pool-min=", "--oracle-pool-max=", "--oracle-pool-timeout-secs="),
        *("--postgres-db-url=", "--postgres-pool-max="),
        *("--redis-url=", "--redis-pool-max=", "--redis-retention-days="),
    ),
    *_none(
        "s",
        _STORES,
        *("--history-memory-max-responses=", "--history-memory-max-items="),
        *("--history-memory-retention-secs=", "--oracle-external-auth"),
        *("--postgres-op-timeout-secs=", "--redis-op-timeout-secs=", "--schema-config="),
        *("--storage-hook-wasm-path=", "--storage-context-headers=*"),
        "--max-background-responses=",
    ),
    *_none("s", "the router runs no plug-ins in WASM", "--enable-wasm"),
    *_none(
        "v",
        "the router runs no plug-ins in WASM",
        *("--wasm-middleware=", "--wasm-middleware-sha256=", "--wasm-middleware-route="),
    ),
    *_none(
        "s",
        "ask the engines themselves: the router passes no calls that control them",
        *("--enable-rl", "--rl-control-timeout-secs=", "--rl-fanout-concurrency="),
    ),
    *_none(
        "s",
        _MESH,
        *("--enable-mesh", "--mesh-server-name=", "--mesh-host=", "--mesh-advertise-host="),
        *("--mesh-port=", "--mesh-peer-urls=*", "--mesh-tls-ca-cert=", "--mesh-tls-cert="),
        *("--mesh-tls-key=", "--router-selector=*"),
    ),
    *_none("p", "the router keeps no files and runs no batches", "--enable-batch-api"),
    *_none(
        "p",
        "the router keeps no files and runs no batches",
        *("--file-storage-class=", "--file-storage-path=", "--batch-processor="),
    ),
    *_none("p", "bodies pass as they came", "--request-rewriter=", "--callbacks="),
    *_none(
        "p",
        "no answer comes from a semantic cache, and no prompt is searched for personal data",
        *("--feature-gates=", "--semantic-cache-model=", "--semantic-cache-dir="),
        "--semantic-cache-threshold=",
    ),
    *_none("p", "it prints their version and ends", "--version"),
)

FLAGS = (
    *(*_LISTENING, *_WORKERS, *_DISCOVERY, *_POLICY, *_LIMITS),
    *(*_FAILURES, *_TOKENS, *_ACCESS, *_LOGS, *_OTHERS),
)


def flags_of(peer: PeerRouter) -> dict[str, PeerFlag]:
    """Return the flags of one other router, by name."""
    return {flag.name: flag for flag in FLAGS if peer.letter in flag.peers}
