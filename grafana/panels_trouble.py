"""The dashboard's second half: queue, refusals, failures, KV events, index."""

from __future__ import annotations

from grafana.panels import Panel, Row, per_worker, rate, selected

REJECTIONS = (
    "no_worker_available",
    "hold_queue_full",
    "hold_timeout",
    "router_full",
    "worker_error",
    "model_not_found",
    "context_length_exceeded",
    "policy_failed",
)
STATES = ("ready", "joining", "draining", "ejected", "down")
FLOW = ("batches", "stored_blocks", "removed_blocks")
SYNC = ("gaps", "replays", "snapshots", "failed_syncs", "failed_polls", "restarts", "clears")
LOST = (
    *("malformed_frames", "skipped_events", "dropped_batches", "dropped_frames"),
    *("overflows", "orphans", "duplicates"),
)


def kv_events(kinds: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Events of these kinds, of all workers together."""
    kind = f'kind=~"{"|".join(kinds)}"'
    return ((rate("warmroute_kv_events_total", kind, "kind"), "{{kind}}"),)


QUEUE = Row(
    "Queue and refusals",
    (
        Panel(
            "Waiting and running",
            "In flight: accepted and unfinished. Held: of these, waiting at the router because "
            "no worker should take them now.",
            "short",
            (
                (selected("warmroute_inflight_requests"), "in flight"),
                (selected("warmroute_held_requests"), "held"),
            ),
            6,
        ),
        Panel(
            "Holds and rejections by code",
            "Holds: requests that began to wait at the router. Codes: no_worker_available, "
            "hold_queue_full, hold_timeout, router_full (503), worker_error (502), "
            "model_not_found (404), context_length_exceeded (400), policy_failed (500).",
            "reqps",
            (
                (rate("warmroute_holds_total"), "holds"),
                (rate("warmroute_rejections_total", by="code"), "{{code}}"),
            ),
            6,
            names=("holds", *REJECTIONS),
        ),
        Panel(
            "Client errors by status",
            "Requests refused as the client's own fault, before any worker was chosen.",
            "reqps",
            ((rate("warmroute_client_errors_total", by="status"), "status {{status}}"),),
            6,
        ),
        Panel(
            "Policy and templates",
            "Policy failures: errors in the policy's own code, the log says which. Template "
            "refusals: prompts that the tokenizer or chat template refused, routed by their text.",
            "suffix: per s",
            (
                (rate("warmroute_policy_failures_total"), "policy failures"),
                (rate("warmroute_template_refusals_total"), "template refusals"),
            ),
            6,
        ),
    ),
)

WORKERS = Row(
    "Workers and their failures",
    (
        Panel(
            "Workers by state",
            "joining: not recognized yet. draining: nothing new. ejected: aside for a while after "
            "failures in a row. down: fails its health probes.",
            "short",
            ((f"sum by (state) ({selected('warmroute_worker_state')})", "{{state}}"),),
            names=STATES,
            stacked=True,
        ),
        Panel(
            "Retries and ejections",
            "Retries: requests sent to another worker after one failed before its first byte. "
            "Ejections: workers put aside.",
            "suffix: per s",
            (
                (rate("warmroute_retries_total"), "retries"),
                (rate("warmroute_ejections_total"), "ejections"),
            ),
        ),
        Panel(
            "Failed answers by kind",
            "connect, early_close, timeout_first_byte, timeout_between, garbage, status_5xx: the "
            "worker's fault. busy: all connections to it in use. client: it stopped reading.",
            "reqps",
            (
                (
                    rate("warmroute_replies_total", 'error!=""', "worker, error"),
                    "worker {{worker}}: {{error}}",
                ),
            ),
        ),
    ),
)

KV = Row(
    "What the router knows of the caches",
    (
        Panel(
            "KV state",
            "Known: no KV event of the worker is missing. Unknown: its hits are a lower bound. A "
            "worker without KV events stays unknown.",
            "short",
            per_worker("warmroute_worker_kv_known"),
            kind="state-timeline",
        ),
        Panel(
            "Gaps and how they were closed",
            "A gap is followed by a replay or a snapshot; failed_syncs: neither could be had. "
            "failed_polls: a worker that is asked for its events did not answer. "
            "restarts: the worker's stream began anew. clears: its cache was reset.",
            "suffix: per s",
            kv_events(SYNC),
            names=SYNC,
        ),
        Panel(
            "Events that told nothing",
            "malformed_frames: bytes that are no event. skipped_events: of no use here. "
            "dropped_batches, dropped_frames, overflows: beyond a bound. orphans: blocks that "
            "waited for their parent. duplicates: known already, harmless.",
            "suffix: per s",
            kv_events(LOST),
            names=LOST,
        ),
        Panel(
            "Events that wait",
            "Batches that wait for missing ones before them, and stored blocks whose parent never "
            "came. Both are near 0 when all is known.",
            "short",
            (
                (f"sum({selected('warmroute_worker_kv_backlog_batches')})", "waiting"),
                (f"sum({selected('warmroute_worker_kv_parked_blocks')})", "parked"),
            ),
        ),
        Panel(
            "Age of events",
            "How old the latest KV events were when they came: the worker's time stamp against "
            "the router's clock. Negative: the clocks differ.",
            "s",
            per_worker("warmroute_worker_event_lag_seconds"),
        ),
        Panel(
            "Event flow",
            "Batches of KV events, and the blocks that workers stored and evicted.",
            "suffix: per s",
            kv_events(FLOW),
            6,
            names=FLOW,
        ),
        Panel(
            "Index, blocks",
            "Distinct blocks in the prefix index. Its bound is limits.index_entries.",
            "suffix: blocks",
            ((selected("warmroute_index_blocks"), "blocks"),),
            6,
        ),
        Panel(
            "Index, memory",
            "Memory of the prefix index.",
            "bytes",
            ((selected("warmroute_index_bytes"), "bytes"),),
            6,
        ),
        Panel(
            "Index, evictions",
            "Blocks forgotten because the index is full. Above 0 for long: raise "
            "limits.index_entries.",
            "suffix: blocks/s",
            ((rate("warmroute_index_evicted_blocks_total"), "evicted"),),
            6,
        ),
    ),
)
