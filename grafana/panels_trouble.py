"""What goes wrong on the way to the workers: queue, refusals, failures."""

from __future__ import annotations

from grafana.panel import Panel, Row, quantiles, rate, selected, top

REJECTIONS = (
    "no_worker_available",
    "hold_queue_full",
    "hold_timeout",
    "displaced",
    "router_full",
    "worker_error",
    "model_not_found",
    "context_length_exceeded",
    "policy_failed",
)
POLICY_FAULTS = ("raised", "nan", "shape", "slow", "terms")


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
            "hold_queue_full, hold_timeout, displaced, router_full (503), worker_error (502), "
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
            "Faults of the policy's own code, by kind: raised, nan, shape (its answer), slow, "
            "terms; the log says which, the fallback decides. Suspended: 1 while it is not asked. "
            "Template refusals: prompts that the tokenizer refused, routed by their text.",
            "suffix: per s",
            (
                (rate("warmroute_policy_faults_total", by="kind"), "{{kind}}"),
                (selected("warmroute_policy_suspended"), "suspended"),
                (rate("warmroute_template_refusals_total"), "template refusals"),
            ),
            6,
            names=(*POLICY_FAULTS, "suspended", "template refusals"),
        ),
    ),
)

DOOR = Row(
    "At the door",
    (
        Panel(
            "Turned away by port and reason",
            "Requests that are no clean HTTP, too large or late, and connections beyond the "
            "limits. No worker sees any of these.",
            "reqps",
            (
                (
                    rate("warmroute_door_refusals_total", by="port, reason"),
                    "{{port}}: {{reason}}",
                ),
            ),
        ),
        Panel(
            "Clients' connections",
            "Open ones by port, against door.connections.",
            "short",
            ((selected("warmroute_door_connections"), "{{port}}"),),
        ),
        Panel(
            "Requests still arriving",
            "Memory of heads and bodies that are not whole, against door.arriving_bytes.",
            "bytes",
            ((selected("warmroute_door_arriving_bytes"), "{{port}}"),),
        ),
    ),
)

TENANTS = Row(
    "Tenants and turns",
    (
        Panel(
            "Requests by tenant",
            "Begun, refused ones included: the 50 busiest tenants by name, (others) for the rest.",
            "reqps",
            ((rate("warmroute_tenant_requests_total", by="tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Refusals by tenant and reason",
            "rate_limit_exceeded: the tenant is at a limit of its key. model_not_allowed, "
            "priority_not_allowed: its key is not for that. Others: as all rejections.",
            "reqps",
            (
                (
                    rate("warmroute_tenant_refusals_total", by="tenant, reason"),
                    "{{tenant}}: {{reason}}",
                ),
            ),
        ),
        Panel(
            "Tokens by tenant",
            "Of answered requests: of the prompts, cached ones included, and of the answers.",
            "suffix: tok/s",
            ((rate("warmroute_tenant_tokens_total", by="tenant, of"), "{{tenant}}: {{of}}"),),
        ),
        Panel(
            "Waiting, by tenant and by priority",
            "Requests held at the router; lower priorities go first, tenants of one take turns.",
            "short",
            (
                (selected("warmroute_held_by_tenant"), "tenant {{tenant}}"),
                (selected("warmroute_held_by_priority"), "priority {{priority}}"),
            ),
        ),
        Panel(
            "Oldest and predicted wait",
            "Oldest: how long the first of those held has waited. Predicted: what is queued and "
            "held, at the rate at which the pool computes prompts; what Retry-After tells.",
            "s",
            (
                (selected("warmroute_held_oldest_seconds"), "oldest"),
                (selected("warmroute_predicted_wait_seconds"), "predicted"),
            ),
            names=("oldest", "predicted"),
        ),
        Panel(
            "Prompt tokens to be computed",
            "Sent: to workers, before the first token (or the end, of answers that do not "
            "stream). Held: of requests waiting at the router.",
            "suffix: tok",
            ((selected("warmroute_queued_prompt_tokens"), "{{where}}"),),
        ),
    ),
)

WORKERS = Row(
    "Workers and their failures",
    (
        Panel(
            "Retries and ejections",
            "Retries: requests sent to another worker after one failed before its first byte; "
            "refused: the budget for these was spent. Ejections: workers put aside; withheld: too "
            "many of the pool were already.",
            "suffix: per s",
            (
                (rate("warmroute_retries_total"), "retries"),
                (rate("warmroute_retries_refused_total"), "retries refused"),
                (rate("warmroute_ejections_total"), "ejections"),
                (rate("warmroute_ejections_withheld_total"), "ejections withheld"),
            ),
        ),
        Panel(
            "Failed answers by kind",
            "connect, early_close, timeout_first_byte, timeout_between, garbage, status_5xx: the "
            "worker's fault. busy: all connections to it in use. client: it stopped reading. The "
            "workers with most of them.",
            "reqps",
            top(
                rate("warmroute_replies_total", 'error!="", worker=~"$worker"', "worker, error"),
                "worker {{worker}}: {{error}}",
            ),
        ),
        Panel(
            "Failures blamed on workers",
            "What counts towards putting a worker aside, by cause; the workers with most of it.",
            "suffix: per s",
            top(
                rate("warmroute_worker_failures_total", 'worker=~"$worker"', "worker, cause"),
                "worker {{worker}}: {{cause}}",
            ),
        ),
        Panel(
            "Workers kept for one that was passed",
            "Times that a worker took nothing new until a request fitted that had waited for long "
            "and been passed by others. Often: some requests are large for the workers.",
            "suffix: per s",
            ((rate("warmroute_kept_workers_total"), "kept"),),
            12,
        ),
        Panel(
            "Replies by what carried them",
            "native: the relay's thread. python: all others, each with its reason; much of it on "
            "plain HTTP: the thread was not built or is off.",
            "reqps",
            ((rate("warmroute_relayed_requests_total", by="path, why"), "{{path}} {{why}}"),),
            12,
        ),
    ),
)

STREAMS = Row(
    "Streams whose worker is lost",
    (
        Panel(
            "What became of them",
            "moved: another worker went on. closed: all was said. unfit: could not go on. refused: "
            "no worker took it.",
            "suffix: per s",
            (
                (
                    rate("warmroute_migrations_total", by="result, reason"),
                    "{{result}}: {{reason}}",
                ),
            ),
        ),
        Panel(
            "Silence of those that moved",
            "From the last byte of the lost worker to the first event of the next one.",
            "s",
            quantiles("warmroute_migration_gap_seconds"),
        ),
        Panel(
            "Streams that could not move",
            "By reason, whether or not their worker was lost.",
            "suffix: per s",
            ((rate("warmroute_migration_unfit_total", by="reason"), "{{reason}}"),),
        ),
        Panel(
            "Tokens computed again",
            "Of prompts and answers, to go on elsewhere, as expected.",
            "suffix: tok/s",
            ((rate("warmroute_migration_recomputed_tokens_total"), "computed again"),),
            12,
        ),
        Panel(
            "Token ids kept",
            "Of streams under way, four bytes each; migration.tokens bounds them.",
            "suffix: tok",
            ((selected("warmroute_migration_kept_tokens"), "kept"),),
            12,
        ),
    ),
)
