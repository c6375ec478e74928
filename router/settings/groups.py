"""Groups of keys, each with a heading, and the group that `--help` shows first.

`warmroute serve --help` shows `MAIN`; `warmroute serve --help-all` and `warmroute config --print`
show all groups, in the order of this file. A test finds a key or a section that is missing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from router.config.keys import keys_of
from router.settings.schema import Config


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """The configuration keys under one heading, with a sentence about them."""

    title: str
    about: str
    paths: tuple[str, ...]


# The flags that a new user needs. `warmroute serve --help` shows these and no others.
MAIN = (
    KeyGroup("workers", "", ("workers", "discovery", "tokenizer", "policy")),
    KeyGroup("ports", "", ("host", "port", "admin_host", "admin_port")),
    KeyGroup("access", "", ("api_keys_file", "admin_keys_file", "tls.cert", "tls.key")),
    KeyGroup("logs", "", ("log_level", "log_format", "access_log")),
)

# The keys outside sections.
_TOP = (
    KeyGroup(
        "ports",
        "Where the router listens for clients and for operators.",
        ("host", "port", "admin_host", "admin_port", "grpc_port", "reuse_port"),
    ),
    KeyGroup(
        "workers",
        "The engines behind the router, and how they join and leave.",
        (
            *("workers", "discovery", "event_hosts", "discovery_grace_s"),
            *("slow_start_s", "drain_s"),
        ),
    ),
    KeyGroup(
        "policy",
        "The rule that chooses a worker for each request.",
        (
            *("policy", "policy_fallback", "policy_slow_ms", "policy_hang_s"),
            *("disaggregation", "disaggregation_tpot_ms", "seed"),
        ),
    ),
    KeyGroup(
        "tokens",
        "How the router gets the token ids of prompts, which must equal the engines' ids.",
        (
            *("tokenizer", "tokenizer_mode", "harmony_date", "chat_content_format"),
            *("chat_template_kwargs", "chat_drops_unused_tools", "render", "renderers"),
            "forward_token_ids",
        ),
    ),
    KeyGroup(
        "headers",
        "Request headers that the router reads.",
        ("session_header", "tenant_header", "deadline_header", "trusted_peers"),
    ),
    KeyGroup(
        "access",
        "Who may use the client port and the admin port.",
        ("api_keys_file", "admin_keys_file", "admin_open", "admin_allowed_hosts"),
    ),
    KeyGroup(
        "requests",
        "How the router treats requests.",
        (
            *("drain_refuses", "unknown_paths", "model_limits", "triton_inputs", "triton_admin"),
            *("explain", "explain_every", "relay"),
        ),
    ),
    KeyGroup(
        "logs",
        "The router's own log, and files that record requests.",
        (
            *("log_level", "log_format", "access_log", "access_log_bytes", "request_log"),
            *("request_log_bytes", "record", "record_facts", "record_facts_bytes"),
        ),
    ),
    KeyGroup(
        "restarts and replicas",
        "State that outlives a restart, and state that several routers share.",
        ("kv_state", "hot_restart", "state"),
    ),
)

# One sentence for each section.
_SECTIONS = {
    "limits": "Limits of requests and memory. A request beyond a limit gets 400, 413, 429 or 503.",
    "timeouts": "How long the router waits, in seconds, before it gives up.",
    "intervals": "How often the router does its regular work, in seconds.",
    "ejection": "When the router sends a failing worker no more requests, and for how long.",
    "health": "How the router decides by probes whether a worker is alive.",
    "migration": "Whether another worker continues a streamed answer whose worker is lost.",
    "names": "Model names that clients may use in place of the engines' names.",
    "server": "Bounds of the HTTP server on the client port and the admin port.",
    "tls": "TLS of the client port.",
    "admin_tls": "TLS of the admin port.",
    "workers_tls": "TLS towards workers whose URL begins with https://.",
    "picker": "The endpoint picker, which chooses workers for Envoy and gateways (ext_proc).",
    "picker_tls": "TLS of the endpoint picker's port.",
    "recording": "The size and number of the files in the folder `record`.",
    "retries": "When the router sends a failed request to another worker.",
    "roles": "Whether the router switches workers between prefill and decode.",
    "identity": "How the router finds the session that a request belongs to.",
    "waiting": "Requests that wait for the first worker of their model (scale to zero).",
    "tenants": "How tenants are kept apart.",
    "replicas": "Several routers in front of the same workers, joined by the key `state`.",
    "tracing": "OpenTelemetry spans.",
}


@cache
def groups() -> tuple[KeyGroup, ...]:
    """Return all configuration keys in groups: those outside sections first, then one group for
    each section.
    """
    sections = tuple(
        KeyGroup(
            name, about, tuple(path for path in keys_of(Config) if path.startswith(f"{name}."))
        )
        for name, about in _SECTIONS.items()
    )
    return (*_TOP, *sections)
