"""Lists the configuration keys that a reload can change, those that it cannot change, and those
that were removed.
"""

from __future__ import annotations

from types import MappingProxyType

_BOUND = "the socket is bound at start; restart the router"
_SIZED = "sized at start; restart the router"
_BUILT = "read once at start; restart the router"
# Keys a reload cannot change, and why. Every other one takes effect with the next request.
FIXED = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("host", "port", "admin_host", "admin_port", "grpc_port", "reuse_port"),
                *("picker.host", "picker.port", "picker.health_port"),
            ),
            _BOUND,
        ),
        **dict.fromkeys(
            (
                "limits.workers",
                "limits.index_entries",
                "limits.index_bytes",
                "limits.speculative_entries",
                "limits.mirrored_blocks",
                "limits.sessions",
                "limits.session_blocks",
                "limits.token_memo_bytes",
            ),
            _SIZED,
        ),
        **dict.fromkeys(
            (
                *("tls.cert", "tls.key", "tls.client_ca", "server.head_bytes"),
                *("admin_tls.cert", "admin_tls.key", "admin_tls.client_ca"),
                *("workers_tls.ca", "workers_tls.cert", "workers_tls.key"),
                *("picker_tls.cert", "picker_tls.key", "picker_tls.client_ca"),
                *("relay", "seed", "unknown_paths"),
                *("disaggregation", "disaggregation_tpot_ms"),
                "policy_fallback",
                "policy_slow_ms",
                "policy_hang_s",
                "slow_start_s",
                *("tokenizer", "tokenizer_mode", "harmony_date"),
                "chat_content_format",
                "chat_template_kwargs",
                "chat_drops_unused_tools",
                "tenant_header",
                "trusted_peers",
                "api_keys_file",
                "admin_keys_file",
                "log_format",
                "request_log",
                "request_log_bytes",
                *("record", "recording.part_bytes", "recording.part_s", "recording.parts"),
                *("recording.total_bytes", "tracing.endpoint", "tracing.service_name"),
                "access_log",
                "access_log_bytes",
                "record_facts",
                "record_facts_bytes",
                "kv_state",
                "hot_restart",
                *("replicas.name", "replicas.fleet", "replicas.flush_s", "replicas.lease_s"),
                *("limits.body_bytes", "limits.tokenized_chars"),
                "limits.header_bytes",
                "limits.inflight_requests",
                *("limits.worker_requests", "limits.worker_queued_tokens"),
                "limits.hold_requests",
                "limits.queued_tokens",
                "limits.hold_s",
                "timeouts.keep_alive_s",
                "timeouts.shutdown_s",
                "timeouts.speculative_s",
                "timeouts.stall_s",
                *("ejection.failures", "ejection.rate", "ejection.requests", "ejection.window_s"),
                *("ejection.max_share", "ejection.recover_s", "ejection.breaks"),
                "health.panic_share",
                *("retries.attempts", "retries.backoff_s", "retries.backoff_max_s"),
                *("retries.budget_share", "retries.budget_per_s"),
                *("retries.busy_s", "retries.busy_max_s"),
                *("roles.follow", "roles.gain", "roles.settle_s", "roles.window_s"),
            ),
            _BUILT,
        ),
    }
)


# Keys of earlier versions, and the keys that replace them.
REMOVED = MappingProxyType(
    {
        "processes": "removed; run several routers that share the port (SO_REUSEPORT: "
        "`reuse_port: true`) and state (`state: redis://...`)",
        "takeover": "renamed; write `hot_restart`",
        "ramp_s": "renamed; write `slow_start_s`",
        **{
            f"door.{name}": f"renamed; write `server.{name}`"
            for name in (
                *("connections", "connections_per_address", "head_bytes", "arriving_bytes"),
                *("head_s", "body_s"),
            )
        },
        **{
            f"advise.{name}": "removed; run `warmroute advise LOG` by hand or by cron"
            for name in ("every_s", "budget_s", "memory_mb", "options")
        },
        "front": "removed; one server serves all paths of the client port",
        "intervals.gather_s": "removed; each event is passed on at once, as with 0, its default",
    }
)


# Keys that can change, but neither from nor to an empty value: the part that they belong to exists
# from the start, or never.
STANDING = MappingProxyType(
    {"state": "whether there is one is read once at start; restart the router"}
)
