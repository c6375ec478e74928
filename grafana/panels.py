"""What the dashboard shows: every panel with its queries, its unit and a sentence for people.

One router at a time (`$router`): worker ids belong to a router. Rates are over
`$__rate_interval`, which Grafana fits to the scrape interval and the zoom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "state-timeline"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are (PromQL, legend).

    `names`: what a label in the legend can be, where each value has a colour of its own.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8  # of 24 columns
    kind: Kind = "timeseries"
    names: tuple[str, ...] = ()
    stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def selected(metric: str, matchers: str = "") -> str:
    """The metric's series of the chosen router."""
    inside = 'instance="$router"' + (f", {matchers}" if matchers else "")
    return f"{metric}{{{inside}}}"


def rate(metric: str, matchers: str = "", by: str = "") -> str:
    """Its increase per second, summed up by some labels."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({selected(metric, matchers)}[$__rate_interval]))"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Median, p90 and p99 of a histogram."""
    buckets = rate(f"{metric}_bucket", by="le")
    return tuple(
        (f"histogram_quantile({q}, {buckets})", name)
        for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def per_worker(metric: str) -> tuple[tuple[str, str], ...]:
    """One series a worker."""
    return ((selected(metric), "worker {{worker}}"),)


def share(part: str, whole: str) -> str:
    """The rate of one counter over that of another."""
    return f"{rate(part)} / {rate(whole)}"


EXPECTED_RATIO = share("warmroute_expected_hit_tokens_total", "warmroute_prompt_tokens_total")
REPORTED_RATIO = share(
    "warmroute_reported_hit_tokens_total", "warmroute_reported_prompt_tokens_total"
)
REPLIES_BY_WORKER = rate("warmroute_replies_total", by="worker")
_IS_READY = 'state="ready"'
READY = f"sum({selected('warmroute_worker_state', _IS_READY)})"
# Divided by the workers that are ready, not by those that answered: a worker that was never
# chosen has no series, and the worst hot spot would look perfectly even.
BUSIEST_TO_MEAN = f"max({REPLIES_BY_WORKER}) / (sum({REPLIES_BY_WORKER}) / {READY})"

GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Dispatches",
            "Requests sent to workers per second, second tries included.",
            "reqps",
            ((rate("warmroute_decisions_total"), "dispatches"),),
            4,
            "stat",
        ),
        Panel(
            "Workers ready",
            "Workers that are given new requests. 0: clients get 503.",
            "short",
            ((f"{READY} or vector(0)", "ready"),),
            4,
            "stat",
        ),
        Panel(
            "Hit ratio",
            "Share of prompt tokens that workers found in their caches, by their own count.",
            "percentunit",
            ((REPORTED_RATIO, "reported"),),
            4,
            "stat",
        ),
        Panel(
            "Busiest / mean",
            "Answers of the busiest worker over the mean of all ready ones. 1 is even; the number "
            "of workers means that one does everything: a hot spot.",
            "short",
            ((BUSIEST_TO_MEAN, "busiest / mean"),),
            4,
            "stat",
        ),
        Panel(
            "First token, p99",
            "99 of 100 streamed answers began sooner than this after the request arrived.",
            "s",
            (quantiles("warmroute_time_to_first_token_seconds")[2],),
            4,
            "stat",
        ),
        Panel(
            "In flight",
            "Requests accepted and not finished, those held at the router included.",
            "short",
            ((selected("warmroute_inflight_requests"), "in flight"),),
            4,
            "stat",
        ),
    ),
)

DECISIONS = Row(
    "Decisions and what they expected",
    (
        Panel(
            "Decisions by policy and reason",
            "policy: chosen by cost. only_worker: no other could take it. retry: after another "
            "worker failed. held: after a wait at the router. fallback: the policy failed.",
            "reqps",
            (
                (
                    rate("warmroute_decisions_total", by="policy, reason"),
                    "{{policy}}: {{reason}}",
                ),
            ),
            names=(": policy", ": only_worker", ": retry", ": held", ": fallback"),
            stacked=True,
        ),
        Panel(
            "Prompt tokens: asked, expected cached, reported cached",
            "Expected: what the router believed to be cached on the worker it chose. Reported: "
            "what workers then said they found, of answers that say so.",
            "suffix: tokens/s",
            (
                (rate("warmroute_prompt_tokens_total"), "prompt"),
                (rate("warmroute_expected_hit_tokens_total"), "expected hits"),
                (rate("warmroute_reported_hit_tokens_total"), "reported hits"),
                (rate("warmroute_reported_prompt_tokens_total"), "prompt of those that report"),
            ),
        ),
        Panel(
            "Hit ratio, expected against reported",
            "Both near each other: the router's picture of the caches is right. Expected far "
            "above reported: KV events are missing or prompts are read approximately.",
            "percentunit",
            ((EXPECTED_RATIO, "expected hits"), (REPORTED_RATIO, "reported hits")),
            maximum=1.0,
        ),
    ),
)

LOAD = Row(
    "Load per worker",
    (
        Panel(
            "Requests",
            "Sent to the worker by this router and not finished. GET /workers on the admin port "
            "says which URL a worker's number means.",
            "short",
            per_worker("warmroute_worker_requests"),
        ),
        Panel(
            "Queued prefill",
            "Uncached prompt tokens that the worker has yet to compute. One worker far above the "
            "others: a hot spot.",
            "suffix: tokens",
            per_worker("warmroute_worker_queued_prefill_tokens"),
        ),
        Panel(
            "Share of requests",
            "Each worker's share of all answers; answers that failed count too.",
            "percentunit",
            (
                (
                    f"{REPLIES_BY_WORKER} / on () group_left () {rate('warmroute_replies_total')}",
                    "worker {{worker}}",
                ),
            ),
            stacked=True,
            maximum=1.0,
        ),
        Panel(
            "Context",
            "KV tokens of requests past their first token: what decoding reads in every step.",
            "suffix: tokens",
            per_worker("warmroute_worker_context_tokens"),
            6,
        ),
        Panel(
            "Blocks held",
            "Cached blocks that the worker's events told of.",
            "suffix: blocks",
            per_worker("warmroute_worker_resident_blocks"),
            6,
        ),
        Panel(
            "Prefill speed",
            "Prompt tokens a second, as measured on the worker's own answers.",
            "suffix: tokens/s",
            per_worker("warmroute_worker_prefill_tokens_per_second"),
            6,
        ),
        Panel(
            "Step time",
            "Time of one decode step, as measured on the worker's own streams.",
            "s",
            per_worker("warmroute_worker_step_seconds"),
            6,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the router to the first byte of its streamed answer.",
            "s",
            quantiles("warmroute_time_to_first_token_seconds"),
        ),
        Panel(
            "Between tokens",
            "Mean gap between the events of a streamed answer, one value an answer.",
            "s",
            quantiles("warmroute_inter_token_seconds"),
        ),
        Panel(
            "Whole request",
            "From a request's arrival to the last byte of its answer, streamed or not.",
            "s",
            quantiles("warmroute_request_seconds"),
        ),
    ),
)
