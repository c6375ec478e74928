"""Panels that show latency against targets, the error budget, and errors and refusals of requests.

An answer is good if it is complete, and the error budget counts answers that are not good. Slow
answers count as good, because the reader chooses the targets; separate panels show slow answers.
"""

from __future__ import annotations

from grafana.drawing import Panel, Row, firing_alerts, quantiles, rate, selected, stat, top
from grafana.limits import limit

ROUTERS = 'instance=~"$routers"'
# Codes of refusals by the party (client, worker or router) that must change something.
OF_CLIENTS = "model_not_found|context_length_exceeded|deadline_exceeded|rate_limit_exceeded"
OF_WORKERS = "worker_error|retry_budget_exhausted"
OF_ROUTER = "policy_failed"
_TRIES = 'error!~"|client|deadline_exceeded"'


def _rate(metric: str, matchers: str = "", by: str = "") -> str:
    return rate(metric, matchers, by, ROUTERS)


def _grown(metric: str, matchers: str = "") -> str:
    """Return a query for the growth of a counter in the time range shown."""
    return f"sum(increase({selected(metric, matchers, ROUTERS)}[$__range]))"


def _none(expr: str) -> str:
    """Return the query with the value 0 instead of no series."""
    return f"({expr} or vector(0))"


def _within(metric: str, bound: str) -> str:
    """Return a query for the share of streamed answers within the bound of a histogram bucket."""
    le = f'le="{bound}"'
    return f"{_rate(f'{metric}_bucket', le)} / {_rate(f'{metric}_count')}"


_GOOD = _rate("warmroute_request_seconds_count")
# Attempts that failed and were not retried, so that the client saw the failure.
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
            "Whether each chosen router answers Prometheus.",
            "short",
            f'min(up{{job="warmroute", {ROUTERS}}})',
            limit("WarmrouteRouterDown", "== "),
            says=("all answer", "not all answer"),
        ),
        stat(
            "Burn rate now",
            "Share of failed requests in the last five minutes, divided by the share that the "
            "objective allows. At 14.4 a month's error budget lasts two days.",
            "short",
            f"{_recorded('bad_answers')} / ({_recorded('bad_answers')} "
            f"+ {_recorded('good_answers')}) / (1 - $objective)",
            limit("WarmrouteBudgetBurn", "> ", "warning"),
            limit("WarmrouteBudgetBurn", "> ", "critical"),
        ),
        stat(
            "Refused",
            "Share of requests that the router refused for lack of capacity, over five minutes.",
            "percentunit",
            f"{_recorded('shed_requests')} / "
            f"({_recorded('bad_answers')} + {_recorded('good_answers')})",
            limit("WarmrouteSaturated", "rate5m > "),
        ),
        stat(
            "Longest wait",
            "Longest wait so far of a request that a router holds now.",
            "s",
            f"max({selected('warmroute_held_oldest_seconds', of=ROUTERS)})",
            limit("WarmrouteSaturated", "[2m]) > "),
        ),
        stat(
            "Router errors",
            "Requests per second that failed because of a defect in a router or its policy.",
            "reqps",
            _recorded("own_errors"),
            limit("WarmrouteOurErrors", "> "),
        ),
        stat(
            "Good answers",
            "Complete answers per second, including slow answers.",
            "reqps",
            _GOOD,
            alert="WarmrouteCollapse",
        ),
        stat(
            "Answered",
            "Share of requests with a complete answer. Requests that failed because of a client's "
            "mistake do not count.",
            "percentunit",
            f"{_GOOD} / ({_GOOD} + {_BAD})",
            alert="WarmrouteBudgetBurn",
        ),
        stat(
            "First token in time",
            "Share of streamed answers whose first token came within the target chosen above.",
            "percentunit",
            _TTFT,
        ),
        stat(
            "Tokens in time",
            "Share of streamed answers whose mean time between tokens was within the target "
            "chosen above.",
            "percentunit",
            _TPOT,
        ),
        stat(
            "Error budget left",
            "Share of the errors allowed by the objective that is left in the time range shown. "
            "Below 0 the objective is missed.",
            "percentunit",
            _BUDGET_LEFT,
            alert="WarmrouteBudgetBurn",
        ),
        Panel(
            "Firing alerts",
            "Alerts of this repository's rules that fire now. The value is the number of series "
            "with the alert, for example one for each worker. The runbook, docs/operations.md, "
            "has an entry for each alert.",
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
            "Time from a request's arrival at the router to the first byte of its streamed answer.",
            "s",
            quantiles("warmroute_time_to_first_token_seconds", ROUTERS),
        ),
        Panel(
            "Time per output token",
            "Mean time between the events of a streamed answer; each answer counts once.",
            "s",
            quantiles("warmroute_inter_token_seconds", ROUTERS),
        ),
        Panel(
            "Answers within targets",
            "Share of streamed answers within each target, and within both targets. The share for "
            "both is a lower bound.",
            "percentunit",
            ((_TTFT, "first token"), (_TPOT, "between tokens"), (_GOODPUT, "both")),
            maximum=1.0,
        ),
        Panel(
            "Goodput, lower bound",
            "Streamed answers per second within both targets. The number is a lower bound, "
            "because it assumes that no answer missed both targets.",
            "reqps",
            ((f"{_GOODPUT} * {_STREAMED}", "goodput"),),
            8,
        ),
        Panel(
            "Time to first token, distribution",
            "Streamed answers per second by time to first token.",
            "s",
            ((_rate("warmroute_time_to_first_token_seconds_bucket", by="le"), "{{le}}"),),
            8,
            "heatmap",
        ),
        Panel(
            "Time per output token, distribution",
            "Streamed answers per second by mean time between the events of the answer.",
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
            "client: invalid, too large or late requests, and clients that disconnect. worker: "
            "attempts that failed at a worker and were not retried. capacity: requests refused "
            "for lack of capacity. router: defects of the router or its policy.",
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
            "Requests that the router refused, by error code.",
            "reqps",
            ((_rate("warmroute_rejections_total", by="code"), "{{code}}"),),
            names=("no_worker_available", "hold_queue_full", "hold_timeout", "router_full"),
            alert="WarmrouteSaturated",
        ),
        Panel(
            "Failed attempts by kind",
            "Attempts that failed at a worker, including attempts that were retried. Panel Failed "
            "answers by kind of the router dashboard explains the kinds.",
            "reqps",
            ((_rate("warmroute_replies_total", _TRIES, "error"), "{{error}}"),),
            alert="WarmrouteWorkerEjected",
        ),
    ),
    width=6,
)


def _burn(range_: str) -> str:
    """Return a query for the burn rate: failed requests divided by those the objective allows."""
    return f"({_BAD} / ({_BAD} + {_GOOD}))".replace("$__rate_interval", range_) + (
        " / (1 - $objective)"
    )


BUDGET = Row(
    "Error budget",
    (
        Panel(
            "Burn rate",
            "Share of failed requests, divided by the share that the objective allows. At 1 the "
            "error budget lasts exactly its period; at 14.4 a month's budget lasts two days.",
            "short",
            ((_burn("5m"), "5 minutes"), (_burn("1h"), "1 hour"), (_burn("6h"), "6 hours")),
            alert="WarmrouteBudgetBurn",
            limits=(
                limit("WarmrouteBudgetBurn", "> ", "warning"),
                limit("WarmrouteBudgetBurn", "> ", "critical"),
            ),
        ),
        Panel(
            "Error budget left over time",
            "Share of the errors allowed by the objective that is left, in the time range that "
            "ends at each point.",
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
            "Requests in flight and held",
            "In flight: requests that the router has accepted and not finished. Held: requests in "
            "flight that wait at the router because no worker should take them now.",
            "short",
            (
                (selected("warmroute_inflight_requests"), "in flight"),
                (selected("warmroute_held_requests"), "held"),
            ),
        ),
        Panel(
            "Holds and rejections by code",
            "Holds: requests that began to wait at the router. Others: rejections by error code: "
            "no_worker_available, hold_queue_full, hold_timeout, displaced, router_full (503), "
            "worker_error (502), model_not_found (404), context_length_exceeded (400), "
            "policy_failed (500).",
            "reqps",
            (
                (rate("warmroute_holds_total"), "holds"),
                (rate("warmroute_rejections_total", by="code"), "{{code}}"),
            ),
            names=("holds", *REJECTIONS),
        ),
        Panel(
            "Client errors by status",
            "Requests refused for a mistake of the client, before the router chose a worker, by "
            "HTTP status.",
            "reqps",
            ((rate("warmroute_client_errors_total", by="status"), "status {{status}}"),),
        ),
        Panel(
            "Policy and templates",
            "Faults of the policy's code, by kind: raised (an exception), nan (a cost that is no "
            "number), shape (costs of a wrong shape), slow, terms (faulty terms). After a fault "
            "the fallback policy decides, and the log has the details. Suspended: 1 while only "
            "the fallback policy decides. Template refusals: prompts that the tokenizer or chat "
            "template refused, so the router matches them as text. Attribution: requests whose "
            "Claude Code attribution line changed within the session, after which some engines "
            "reuse no cache.",
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

CLIENT_PORT = Row(
    "Client port",
    (
        Panel(
            "Refusals at the client port by reason",
            "Requests and connections that the HTTP server refused or closed: invalid HTTP, too "
            "large or late requests, and connections beyond the limits. These requests reach no "
            "worker.",
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
            "Open connections of clients; server.connections limits them.",
            "short",
            ((selected("warmroute_server_connections"), "open"),),
        ),
        Panel(
            "Requests still arriving",
            "Memory of requests that have not arrived completely; server.arriving_bytes limits it.",
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
            "Requests that each tenant began, including refused requests. The 50 busiest tenants "
            "are named; (others) stands for all other tenants.",
            "reqps",
            ((rate("warmroute_tenant_requests_total", by="tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Refusals by tenant and reason",
            "rate_limit_exceeded: the tenant has reached a limit of its key. model_not_allowed, "
            "priority_not_allowed: the key does not allow the model or the priority. Other "
            "reasons are those of panel Holds and rejections by code.",
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
            "Tokens of answered requests: tokens of prompts (including cached tokens) and of "
            "answers.",
            "suffix: tok/s",
            ((rate("warmroute_tenant_tokens_total", by="tenant, of"), "{{tenant}}: {{of}}"),),
        ),
        Panel(
            "Held requests by tenant and by priority",
            "Requests that wait at the router. Lower priority numbers are sent first; tenants of "
            "equal priority take turns.",
            "short",
            (
                (selected("warmroute_held_by_tenant"), "tenant {{tenant}}"),
                (selected("warmroute_held_by_priority"), "priority {{priority}}"),
            ),
        ),
        Panel(
            "Oldest and predicted wait",
            "Oldest: longest wait so far of a request that the router holds now. Predicted: wait "
            "of a request that arrives now, from the queued and held prompt tokens and the pool's "
            "prefill speed; Retry-After has this value.",
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
            "Prompt tokens not computed yet",
            "Sent: prompt tokens of requests at workers that have no first token yet, or no "
            "answer yet if the answer is not streamed. Held: prompt tokens of requests that wait "
            "at the router.",
            "suffix: tok",
            ((selected("warmroute_queued_prompt_tokens"), "{{where}}"),),
        ),
    ),
)

WORKERS = Row(
    "Failures of workers",
    (
        Panel(
            "Retries and ejections",
            "Retries: requests sent to another worker after a failure before the first byte. "
            "Retries refused: failed requests that were not retried, because the retry budget was "
            "used up. Ejections: failures that ejected a worker. Ejections withheld: failures "
            "that did not eject a worker, because too many workers of the pool were ejected "
            "already.",
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
            "no_answer: failures of the worker. busy: all connections to the worker were in use. "
            "client: the client stopped reading. The panel shows the workers with the most failed "
            "answers.",
            "reqps",
            top(
                rate("warmroute_replies_total", 'error!="", worker=~"$worker"', "worker, error"),
                "worker {{worker}}: {{error}}",
            ),
        ),
        Panel(
            "Failures blamed on workers",
            "Failures that count towards the ejection of a worker, by cause. The panel shows the "
            "workers with the most failures.",
            "suffix: per s",
            top(
                rate("warmroute_worker_failures_total", 'worker=~"$worker"', "worker, cause"),
                "worker {{worker}}: {{cause}}",
            ),
        ),
        Panel(
            "Workers reserved for overtaken requests",
            "Times that the router reserved a worker for a request that had waited for long and "
            "that other requests had overtaken. Frequent reservations mean that some requests are "
            "large for the workers.",
            "suffix: per s",
            ((rate("warmroute_reserved_workers_total"), "reserved"),),
            12,
        ),
        Panel(
            "Answers by relay path",
            "native: the native relay thread carried the answer. python: Python code carried the "
            "answer, for the reason shown. Many python answers over plain HTTP mean that the "
            "native thread is not built or is turned off.",
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
            "Requests that a rule of names sent to a model or revision.",
            "suffix: per s",
            top(
                rate("warmroute_name_requests_total", by="rule, model, revision"),
                "{{rule}}: {{model}} {{revision}}",
            ),
        ),
        Panel(
            "Failed share by target",
            "Share of the requests for a target that failed at a worker, or that no worker took.",
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
            "Time from a request's arrival to the first byte of its streamed answer.",
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
    "Streams that lost their worker",
    (
        Panel(
            "Migrations by result",
            "moved: another worker continued the stream. closed: only the end of the stream was "
            "missing. unfit: the stream could not move. refused: no worker took the rest of the "
            "stream.",
            "suffix: per s",
            (
                (
                    rate("warmroute_migrations_total", by="result, reason"),
                    "{{result}}: {{reason}}",
                ),
            ),
        ),
        Panel(
            "Gap in moved streams",
            "Time from the last byte of the lost worker to the first event of the next worker.",
            "s",
            quantiles("warmroute_migration_gap_seconds"),
        ),
        Panel(
            "Streams that could not move",
            "Streams that could not have moved to another worker, by reason, including streams "
            "that kept their worker.",
            "suffix: per s",
            ((rate("warmroute_migration_unfit_total", by="reason"), "{{reason}}"),),
        ),
        Panel(
            "Tokens computed again",
            "Tokens of prompts and answers that workers are expected to compute again because of "
            "migrations.",
            "suffix: tok/s",
            ((rate("warmroute_migration_recomputed_tokens_total"), "computed again"),),
            12,
        ),
        Panel(
            "Token ids kept",
            "Token ids that the router keeps for unfinished streams, of four bytes each; "
            "migration.tokens limits them.",
            "suffix: tok",
            ((selected("warmroute_migration_kept_tokens"), "kept"),),
            12,
        ),
    ),
)
