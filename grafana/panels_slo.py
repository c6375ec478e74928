"""Panels of what clients get against targets, and of what goes wrong on the way to the workers.

A request is good when it was answered in whole; what is left of the error budget is counted from
that. Answers that were too slow are good here, and shown by themselves: the targets are a choice.
"""

from __future__ import annotations

from grafana.drawing import Panel, Row, firing_alerts, quantiles, rate, selected, stat, top
from grafana.limits import limit

ROUTERS = 'instance=~"$routers"'
# Codes of refusals by who would have to change something.
OF_CLIENTS = "model_not_found|context_length_exceeded|deadline_exceeded|rate_limit_exceeded"
OF_WORKERS = "worker_error|retry_budget_exhausted"
OF_ROUTER = "policy_failed"
_TRIES = 'error!~"|client|deadline_exceeded"'


def _rate(metric: str, matchers: str = "", by: str = "") -> str:
    return rate(metric, matchers, by, ROUTERS)


def _grown(metric: str, matchers: str = "") -> str:
    """How much a counter has grown in the time shown."""
    return f"sum(increase({selected(metric, matchers, ROUTERS)}[$__range]))"


def _none(expr: str) -> str:
    """0 where a counter has no series yet."""
    return f"({expr} or vector(0))"


def _within(metric: str, bound: str) -> str:
    """The share of streamed answers in the bucket of a target."""
    le = f'le="{bound}"'
    return f"{_rate(f'{metric}_bucket', le)} / {_rate(f'{metric}_count')}"


_GOOD = _rate("warmroute_request_seconds_count")
# Tries that failed and were not made good by another one: the client saw these.
_LOST = (
    f"clamp_min({_none(_rate('warmroute_replies_total', _TRIES))} "
    f"- {_none(_rate('warmroute_retries_total'))}, 0)"
)
_REFUSED = f'code!~"{OF_CLIENTS}|{OF_WORKERS}|{OF_ROUTER}"'
_SHED = _none(_rate("warmroute_rejections_total", _REFUSED))
_DEFECTS = _none(_rate("warmroute_internal_errors_total"))
_POLICY = _none(_rate("warmroute_rejections_total", f'code=~"{OF_ROUTER}"'))
_BAD = f"({_LOST} + {_SHED} + {_DEFECTS} + {_POLICY})"
_TTFT = _within("warmroute_time_to_first_token_seconds", "$ttft")
_TPOT = _within("warmroute_inter_token_seconds", "$tpot")
_GOODPUT = f"clamp_min({_TTFT} + {_TPOT} - 1, 0)"
_STREAMED = _rate("warmroute_time_to_first_token_seconds_count")


def _bad_grown() -> str:
    lost = (
        f"clamp_min({_none(_grown('warmroute_replies_total', _TRIES))} "
        f"- {_none(_grown('warmroute_retries_total'))}, 0)"
    )
    code = f'code!~"{OF_CLIENTS}|{OF_WORKERS}"'
    shed = _none(_grown("warmroute_rejections_total", code))
    return f"({lost} + {shed} + {_none(_grown('warmroute_internal_errors_total'))})"


_GOOD_GROWN = _grown("warmroute_request_seconds_count")
_BUDGET_LEFT = f"1 - {_bad_grown()} / ({_bad_grown()} + {_GOOD_GROWN}) / (1 - $objective)"


def _recorded(name: str) -> str:
    return f"sum(instance:warmroute_{name}:rate5m{{{ROUTERS}}})"


WELL = Row(
    "Is it well?",
    (
        *firing_alerts(),
        stat(
            "Routers",
            "Whether each router that is chosen above answers Prometheus.",
            "short",
            f'min(up{{job="warmroute", {ROUTERS}}})',
            limit("WarmrouteRouterDown", "== "),
            says=("all answer", "not all answer"),
        ),
        stat(
            "Burn rate now",
            "Errors of the last five minutes against what the objective allows. 14.4 uses up a "
            "month's budget in two days.",
            "short",
            f"{_recorded('bad_answers')} / ({_recorded('bad_answers')} "
            f"+ {_recorded('good_answers')}) / (1 - $objective)",
            limit("WarmrouteBudgetBurn", "> ", "warning"),
            limit("WarmrouteBudgetBurn", "> ", "critical"),
        ),
        stat(
            "Refused",
            "Share of requests that nothing could take, over five minutes.",
            "percentunit",
            f"{_recorded('shed_requests')} / "
            f"({_recorded('bad_answers')} + {_recorded('good_answers')})",
            limit("WarmrouteSaturated", "rate5m > "),
        ),
        stat(
            "Longest wait",
            "How long the first of the requests held at a router has waited.",
            "s",
            f"max({selected('warmroute_held_oldest_seconds', of=ROUTERS)})",
            limit("WarmrouteSaturated", "[2m]) > "),
        ),
        stat(
            "Errors of our own",
            "Requests per second that failed by a defect of a router or of its policy.",
            "reqps",
            _recorded("own_errors"),
            limit("WarmrouteOurErrors", "> "),
        ),
        stat(
            "Good answers",
            "Answers in whole per second, slow ones included.",
            "reqps",
            _GOOD,
            alert="WarmrouteCollapse",
        ),
        stat(
            "Answered",
            "Share of requests answered in whole, of all but those that failed by the client's "
            "own fault.",
            "percentunit",
            f"{_GOOD} / ({_GOOD} + {_BAD})",
            alert="WarmrouteBudgetBurn",
        ),
        stat(
            "First token in time",
            "Share of streamed answers whose first token came within the target above.",
            "percentunit",
            _TTFT,
        ),
        stat(
            "Tokens in time",
            "Share of streamed answers whose mean gap between tokens was within the target above.",
            "percentunit",
            _TPOT,
        ),
        stat(
            "Budget left",
            "Of the errors that the objective allows in the time shown. Below 0: it is missed.",
            "percentunit",
            _BUDGET_LEFT,
            alert="WarmrouteBudgetBurn",
        ),
        Panel(
            "What fires",
            "The alerts of this repository's rules that fire now, and of how many workers. The "
            "runbook, docs/operations.md, has an entry for each.",
            "short",
            (
                (
                    "count by (severity, alertname, instance) "
                    '(ALERTS{alertname=~"Warmroute.*", alertstate="firing"})',
                    "{{alertname}}",
                ),
            ),
            24,
            kind="table",
        ),
    ),
)

LATENCIES = Row(
    "Latency and targets",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the router to the first byte of its streamed answer.",
            "s",
            quantiles("warmroute_time_to_first_token_seconds", ROUTERS),
        ),
        Panel(
            "Time per output token",
            "Mean gap between the events of a streamed answer, one value an answer.",
            "s",
            quantiles("warmroute_inter_token_seconds", ROUTERS),
        ),
        Panel(
            "Share in time",
            "Streamed answers within each target, and within both (at least so many).",
            "percentunit",
            ((_TTFT, "first token"), (_TPOT, "between tokens"), (_GOODPUT, "both")),
            maximum=1.0,
        ),
        Panel(
            "Goodput, at least",
            "Streamed answers per second that met both targets: all that missed one are taken to "
            "have missed one only.",
            "reqps",
            ((f"{_GOODPUT} * {_STREAMED}", "goodput"),),
            8,
        ),
        Panel(
            "First tokens by time",
            "How many streamed answers began after which time, per second.",
            "s",
            ((_rate("warmroute_time_to_first_token_seconds_bucket", by="le"), "{{le}}"),),
            8,
            "heatmap",
        ),
        Panel(
            "Gaps between tokens by time",
            "How many streamed answers had which mean gap, per second.",
            "s",
            ((_rate("warmroute_inter_token_seconds_bucket", by="le"), "{{le}}"),),
            8,
            "heatmap",
        ),
    ),
)

_CLIENT_CODES = f'code=~"{OF_CLIENTS}"'

BLAME = Row(
    "Errors by blame",
    (
        Panel(
            "Errors by blame",
            "client: bad, too large or late requests, clients that leave. worker: failed tries "
            "that no other worker made good. capacity: refused because nothing could take it. "
            "router: a defect of the router or of its policy.",
            "reqps",
            (
                (
                    f"{_none(_rate('warmroute_client_errors_total'))} + "
                    f"{_none(_rate('warmroute_rejections_total', _CLIENT_CODES))}",
                    "client",
                ),
                (_LOST, "worker"),
                (_SHED, "capacity"),
                (f"{_DEFECTS} + {_POLICY}", "router"),
            ),
            12,
            stacked=True,
            alert="WarmrouteOurErrors",
        ),
        Panel(
            "Refusals by code",
            "Requests turned away by the router.",
            "reqps",
            ((_rate("warmroute_rejections_total", by="code"), "{{code}}"),),
            names=("no_worker_available", "hold_queue_full", "hold_timeout", "router_full"),
            alert="WarmrouteSaturated",
        ),
        Panel(
            "Tries that failed, by kind",
            "Before other workers were tried; see the router's dashboard for each kind.",
            "reqps",
            ((_rate("warmroute_replies_total", _TRIES, "error"), "{{error}}"),),
            alert="WarmrouteWorkerEjected",
        ),
    ),
    width=6,
)


def _burn(range_: str) -> str:
    """How many times faster than the objective allows errors come."""
    return f"({_BAD} / ({_BAD} + {_GOOD}))".replace("$__rate_interval", range_) + (
        " / (1 - $objective)"
    )


BUDGET = Row(
    "Error budget",
    (
        Panel(
            "Burn rate",
            "Errors against what the objective allows: 1 uses up the budget just in its time, "
            "14.4 uses a month's in two days.",
            "short",
            ((_burn("5m"), "5 minutes"), (_burn("1h"), "1 hour"), (_burn("6h"), "6 hours")),
            alert="WarmrouteBudgetBurn",
            limits=(
                limit("WarmrouteBudgetBurn", "> ", "warning"),
                limit("WarmrouteBudgetBurn", "> ", "critical"),
            ),
        ),
        Panel(
            "Budget left over time",
            "Of the errors that the objective allows, by the end of each time shown.",
            "percentunit",
            ((_BUDGET_LEFT, "left"),),
            alert="WarmrouteBudgetBurn",
        ),
    ),
    width=12,
)


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
            names=("holds", *REJECTIONS),
        ),
        Panel(
            "Client errors by status",
            "Requests refused as the client's own fault, before any worker was chosen.",
            "reqps",
            ((rate("warmroute_client_errors_total", by="status"), "status {{status}}"),),
        ),
        Panel(
            "Policy and templates",
            "Faults of the policy's own code, by kind: raised, nan, shape (its answer), slow, "
            "terms; the log says which, the fallback decides. Suspended: 1 while it is not asked. "
            "Template refusals: prompts that the tokenizer refused, routed by their text. "
            "Attribution: lines of Claude Code that changed within a session, and end reuse.",
            "suffix: per s",
            (
                (rate("warmroute_policy_faults_total", by="kind"), "{{kind}}"),
                (selected("warmroute_policy_suspended"), "suspended"),
                (rate("warmroute_template_refusals_total"), "template refusals"),
                (rate("warmroute_attribution_lines_total", 'line="changed"'), "attribution"),
            ),
            names=(*POLICY_FAULTS, "suspended", "template refusals", "attribution"),
        ),
    ),
    width=6,
)

DOOR = Row(
    "Client port",
    (
        Panel(
            "Turned away by reason",
            "Requests that are no clean HTTP, too large or late, and connections beyond the "
            "limits. No worker sees any of these.",
            "reqps",
            (
                (
                    rate("warmroute_server_refusals_total", by="reason"),
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Clients' connections",
            "Open ones, against server.connections.",
            "short",
            ((selected("warmroute_server_connections"), "open"),),
        ),
        Panel(
            "Requests still arriving",
            "Memory of heads and bodies that are not whole, against server.arriving_bytes.",
            "bytes",
            ((selected("warmroute_server_arriving_bytes"), "arriving"),),
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
            alert="WarmrouteSaturated",
            limits=(limit("WarmrouteSaturated", "[2m]) > "),),
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
            "refused: the budget for these was spent. Ejections: workers ejected; withheld: too "
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
            "connect, early_close, timeout_first_byte, timeout_between, garbage, status_5xx, "
            "no_answer: the worker's fault. busy: all connections to it in use. client: it stopped "
            "reading. The workers with most of them.",
            "reqps",
            top(
                rate("warmroute_replies_total", 'error!="", worker=~"$worker"', "worker, error"),
                "worker {{worker}}: {{error}}",
            ),
        ),
        Panel(
            "Failures blamed on workers",
            "What counts towards ejecting a worker, by cause; the workers with most of it.",
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
            ((rate("warmroute_reserved_workers_total"), "kept"),),
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

NAMES = Row(
    "Names and canaries",
    (
        Panel(
            "Requests by target",
            "Those that a rule of names sent to a model or revision.",
            "suffix: per s",
            top(
                rate("warmroute_name_requests_total", by="rule, model, revision"),
                "{{rule}}: {{model}} {{revision}}",
            ),
        ),
        Panel(
            "Failed by target",
            "Share of these that a worker failed, or that no worker took.",
            "percentunit",
            top(
                rate("warmroute_name_requests_total", 'result="failed"', "rule, model, revision")
                + " / "
                + rate("warmroute_name_requests_total", by="rule, model, revision"),
                "{{rule}}: {{model}} {{revision}}",
            ),
        ),
        Panel(
            "Time to first token by target, p90",
            "From arrival to the first byte of a streamed answer.",
            "s",
            top(
                "histogram_quantile(0.9, "
                + rate(
                    "warmroute_name_time_to_first_token_seconds_bucket",
                    by="le, rule, model, revision",
                )
                + ")",
                "{{rule}}: {{model}} {{revision}}",
            ),
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
