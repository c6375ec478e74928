"""What goes wrong on the way to the workers: queue, refusals, failures."""

from __future__ import annotations

from grafana.panels import Panel, Row, rate, selected

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
