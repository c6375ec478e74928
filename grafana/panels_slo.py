"""What clients get, against targets, and whose fault it is where they do not.

A request is good when it was answered in whole; what is left of the error budget is counted from
that. Answers that were too slow are good here, and shown by themselves: the targets are a choice.
"""

from __future__ import annotations

from grafana.panel import Panel, Row, quantiles, rate, selected

ROUTERS = 'instance=~"$router"'
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

GOODPUT = Row(
    "At a glance",
    (
        Panel(
            "Good answers",
            "Answers in whole per second, slow ones included.",
            "reqps",
            ((_GOOD, "good"),),
            4,
            "stat",
            alert="WarmrouteCollapse",
        ),
        Panel(
            "Answered",
            "Share of requests answered in whole, of all but those that failed by the client's "
            "own fault.",
            "percentunit",
            ((f"{_GOOD} / ({_GOOD} + {_BAD})", "answered"),),
            4,
            "stat",
            alert="WarmrouteBudgetBurn",
        ),
        Panel(
            "First token in time",
            "Share of streamed answers whose first token came within the target above.",
            "percentunit",
            ((_TTFT, "in time"),),
            4,
            "stat",
        ),
        Panel(
            "Tokens in time",
            "Share of streamed answers whose mean gap between tokens was within the target above.",
            "percentunit",
            ((_TPOT, "in time"),),
            4,
            "stat",
        ),
        Panel(
            "Goodput, at least",
            "Streamed answers per second that met both targets: all that missed one are taken to "
            "have missed one only.",
            "reqps",
            ((f"{_GOODPUT} * {_STREAMED}", "goodput"),),
            4,
            "stat",
        ),
        Panel(
            "Budget left",
            "Of the errors that the objective allows in the time shown. Below 0: it is missed.",
            "percentunit",
            ((_BUDGET_LEFT, "left"),),
            4,
            "stat",
            alert="WarmrouteBudgetBurn",
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
            "First tokens by time",
            "How many streamed answers began after which time, per second.",
            "s",
            ((_rate("warmroute_time_to_first_token_seconds_bucket", by="le"), "{{le}}"),),
            12,
            "heatmap",
        ),
        Panel(
            "Gaps between tokens by time",
            "How many streamed answers had which mean gap, per second.",
            "s",
            ((_rate("warmroute_inter_token_seconds_bucket", by="le"), "{{le}}"),),
            12,
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
            6,
            names=("no_worker_available", "hold_queue_full", "hold_timeout", "router_full"),
            alert="WarmrouteSaturated",
        ),
        Panel(
            "Tries that failed, by kind",
            "Before other workers were tried; see the router's dashboard for each kind.",
            "reqps",
            ((_rate("warmroute_replies_total", _TRIES, "error"), "{{error}}"),),
            6,
            alert="WarmrouteWorkerEjected",
        ),
    ),
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
            12,
            alert="WarmrouteBudgetBurn",
        ),
        Panel(
            "Budget left over time",
            "Of the errors that the objective allows, by the end of each time shown.",
            "percentunit",
            ((_BUDGET_LEFT, "left"),),
            12,
            alert="WarmrouteBudgetBurn",
        ),
    ),
)
