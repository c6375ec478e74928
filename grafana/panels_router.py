"""Panels of a router's decisions, expected and reported hits, latency, models and sessions."""

from __future__ import annotations

from grafana.drawing import (
    ROUTER,
    Panel,
    Row,
    firing_alerts,
    per_worker,
    quantiles,
    rate,
    selected,
    share,
    stat,
)
from grafana.limits import limit, missing

EXPECTED_RATIO = share("warmroute_expected_hit_tokens_total", "warmroute_prompt_tokens_total")
REPORTED_RATIO = share(
    "warmroute_reported_hit_tokens_total", "warmroute_reported_prompt_tokens_total"
)
REPLIES_BY_WORKER = rate("warmroute_replies_total", by="worker")
_IS_READY = 'state="ready"'
READY = f"sum({selected('warmroute_worker_state', _IS_READY)})"
# The divisor is the number of ready workers, not of workers that answered: a worker that was never
# chosen has no series, and without it the worst hot spot would look perfectly even.
BUSIEST_TO_MEAN = f"max({REPLIES_BY_WORKER}) / (sum({REPLIES_BY_WORKER}) / {READY})"
# The alert on hot spots compares this ratio. An idle pool gives 0 / 0, so the panel shows no value.
BUSIEST_NOW = (
    f"sum(instance:warmroute_worker_requests:max5m{{{ROUTER}}}) "
    f"/ sum(instance:warmroute_worker_requests:mean5m{{{ROUTER}}})"
)

REFUSED = (
    f"sum(instance:warmroute_shed_requests:rate5m{{{ROUTER}}}) / "
    f"(sum(instance:warmroute_good_answers:rate5m{{{ROUTER}}}) "
    f"+ sum(instance:warmroute_bad_answers:rate5m{{{ROUTER}}}))"
)

WELL = Row(
    "Is it well?",
    (
        *firing_alerts('alertname=~"Warmroute.*", instance=~"$router|"'),
        stat(
            "Workers ready",
            "Workers that get new requests. At 0, requests for known models wait, and the router "
            "refuses all other requests.",
            "short",
            f"{READY} or vector(0)",
            missing("WarmrouteNoWorker"),
        ),
        stat(
            "Refused",
            "Share of requests that the router refused for lack of capacity, over five minutes.",
            "percentunit",
            REFUSED,
            limit("WarmrouteSaturated", "rate5m > "),
        ),
        stat(
            "Longest wait",
            "Longest wait so far of a request that the router holds now.",
            "s",
            selected("warmroute_held_oldest_seconds"),
            limit("WarmrouteSaturated", "[2m]) > "),
        ),
        stat(
            "Router errors",
            "Requests per second that failed because of a defect in the router or its policy.",
            "reqps",
            f"sum(instance:warmroute_own_errors:rate5m{{{ROUTER}}})",
            limit("WarmrouteOurErrors", "> "),
        ),
        stat(
            "First token, p99",
            "99 % of streamed answers began within this time after the request arrived.",
            "s",
            quantiles("warmroute_time_to_first_token_seconds")[2][0],
        ),
        stat(
            "In flight",
            "Requests that the router has accepted and not finished, including held requests.",
            "short",
            selected("warmroute_inflight_requests"),
        ),
        stat(
            "Hit ratio",
            "Share of prompt tokens that workers found in their caches, as the workers report it.",
            "percentunit",
            REPORTED_RATIO,
        ),
        stat(
            "Missing hits",
            "Expected hit ratio minus reported hit ratio, over 15 minutes.",
            "percentunit",
            f"sum(instance:warmroute_expected_hits:ratio15m{{{ROUTER}}}) "
            f"- sum(instance:warmroute_reported_hits:ratio15m{{{ROUTER}}})",
            limit("WarmrouteHitsBelowExpected", "> "),
        ),
        stat(
            "Busiest / mean",
            "Requests of the busiest worker divided by the mean of all ready workers, over five "
            "minutes. At 1 the load is even. If the value equals the number of workers, one worker "
            "gets all requests, which is a hot spot.",
            "short",
            BUSIEST_NOW,
            limit("WarmrouteHotSpot", "count, "),
        ),
        stat(
            "Policy",
            "Suspended: the policy keeps failing, and the fallback policy decides.",
            "short",
            selected("warmroute_policy_suspended"),
            limit("WarmroutePolicySuspended", "== "),
            says=("suspended", "active"),
        ),
    ),
)

DECISIONS = Row(
    "Decisions and expected hits",
    (
        Panel(
            "Decisions by policy and reason",
            "policy: the policy chose the worker by cost. only_worker: no other worker could take "
            "the request. retry: another worker failed before. held: the request waited at the "
            "router before. fallback: the policy failed, and the fallback policy chose the "
            "worker.",
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
            "Prompt tokens, expected hits and reported hits",
            "Expected hits: tokens that the router expected in the chosen worker's cache. "
            "Reported hits: tokens that the worker found in its cache, from answers that report "
            "cached tokens.",
            "suffix: tokens/s",
            (
                (rate("warmroute_prompt_tokens_total"), "prompt"),
                (rate("warmroute_expected_hit_tokens_total"), "expected hits"),
                (rate("warmroute_reported_hit_tokens_total"), "reported hits"),
                (rate("warmroute_reported_prompt_tokens_total"), "prompts with a report"),
            ),
        ),
        Panel(
            "Hit ratio, expected and reported",
            "If both ratios are close, the router knows the workers' caches well. If the expected "
            "ratio is far above the reported ratio, KV events are missing, or the router matches "
            "prompts approximately.",
            "percentunit",
            ((EXPECTED_RATIO, "expected hits"), (REPORTED_RATIO, "reported hits")),
            maximum=1.0,
        ),
    ),
)

# Seconds that each worker needs for its queued prefill.
QUEUE_S = (
    f"{selected('warmroute_worker_queued_prefill_tokens')} / on (instance, worker) "
    f"{selected('warmroute_worker_prefill_tokens_per_second')}"
)
_SPEED = f"avg({selected('warmroute_worker_prefill_tokens_per_second')})"
_REQUESTS = selected("warmroute_worker_requests")

IMBALANCE = Row(
    "Cost of uneven load",
    (
        Panel(
            "Busiest over mean",
            "Answers: rate of answers of the busiest worker divided by the mean of all ready "
            "workers. In flight: the same ratio for unfinished requests. 1: the load is even.",
            "short",
            (
                (BUSIEST_TO_MEAN, "answers"),
                (f"max({_REQUESTS}) / avg({_REQUESTS})", "in flight"),
            ),
            alert="WarmrouteHotSpot",
            limits=(limit("WarmrouteHotSpot", "count, "),),
        ),
        Panel(
            "Queued prefill: fullest worker and mean",
            "Time that a worker needs to compute its queued prompt tokens at its measured speed. "
            "The gap between fullest and mean is the extra wait of a request on the fullest "
            "worker.",
            "s",
            ((f"max({QUEUE_S})", "fullest"), (f"avg({QUEUE_S})", "mean")),
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Prefill time saved by hits",
            "Seconds of prefill per second that cached tokens save on all workers, by expected "
            "and by reported hits. The cost of uneven load must stay below this time.",
            "suffix: s/s",
            (
                (f"{rate('warmroute_expected_hit_tokens_total')} / {_SPEED}", "expected hits"),
                (f"{rate('warmroute_reported_hit_tokens_total')} / {_SPEED}", "reported hits"),
            ),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "Time from a request's arrival at the router to the first byte of its streamed answer.",
            "s",
            quantiles("warmroute_time_to_first_token_seconds"),
        ),
        Panel(
            "Between tokens",
            "Mean time between the events of a streamed answer; each answer counts once.",
            "s",
            quantiles("warmroute_inter_token_seconds"),
        ),
        Panel(
            "Whole request",
            "Time from a request's arrival to the last byte of its answer, streamed or not.",
            "s",
            quantiles("warmroute_request_seconds"),
        ),
    ),
)


MODELS = Row(
    "Models",
    (
        Panel(
            "Waiting and running requests by model",
            "Waiting: requests that wait at the router, for a first worker or for room at "
            "workers. Running: unfinished requests at workers. Autoscalers start the first worker "
            "when requests wait, and stop the last worker when both numbers are 0.",
            "suffix: requests",
            (
                (selected("warmroute_waiting_requests"), "{{model}}: waiting"),
                (selected("warmroute_running_requests"), "{{model}}: running"),
            ),
        ),
        Panel(
            "Ready workers by model",
            "Workers that answer. At 0, requests for a known model wait at the router for a first "
            "worker.",
            "suffix: workers",
            ((selected("warmroute_ready_workers"), "{{model}}"),),
            alert="WarmrouteNoFirstWorker",
        ),
        Panel(
            "Incoming requests by model",
            "Requests that arrived for a known model, including refused requests.",
            "reqps",
            ((rate("warmroute_incoming_requests_total", by="model"), "{{model}}"),),
        ),
        Panel(
            "Ends of waits for a first worker",
            "served: a worker started in time. late: no worker started in time. refused: too many "
            "requests waited, or the router stopped. displaced: more important requests took the "
            "place. left: the client disconnected.",
            "reqps",
            ((rate("warmroute_first_worker_waits_total", by="end"), "{{end}}"),),
            names=("served", "late", "refused", "displaced", "left"),
        ),
        Panel(
            "Size of requests that wait for a first worker",
            "Size of the bodies of requests that wait for a first worker; waiting.bytes limits it.",
            "bytes",
            ((selected("warmroute_first_worker_waiting_bytes"), "bodies"),),
        ),
    ),
)


_WAITED = rate("warmroute_held_seconds_sum", by="standing")
_ENDED = rate("warmroute_held_seconds_count", by="standing")
_P99 = rate("warmroute_held_seconds_bucket", by="le")

SESSIONS = Row(
    "Sessions",
    (
        Panel(
            "Tracked sessions",
            "Active: sessions with an unfinished request. Idle: sessions that will probably "
            "continue. Both are 0 if the policy does not use sessions.",
            "suffix: sessions",
            ((selected("warmroute_sessions"), "{{state}}"),),
            names=("active", "idle"),
        ),
        Panel(
            "Held requests by standing of their session",
            "New: the request is the first of its session. Cold: the session lost its cache. "
            "Warm: the session's cache is still there. Cold requests are sent before new "
            "requests.",
            "suffix: requests",
            ((selected("warmroute_held_sessions"), "{{standing}}"),),
            names=("new", "cold", "warm"),
        ),
        Panel(
            "Wait at the router",
            "Time that a held request waited at the router, from its arrival to the end of the "
            "wait: mean by standing of the session, and p99 of all held requests. The time to "
            "first token includes this wait.",
            "s",
            (
                (f"{_WAITED} / {_ENDED}", "{{standing}}"),
                (f"histogram_quantile(0.99, {_P99})", "p99"),
            ),
            names=("new", "cold", "warm"),
        ),
        Panel(
            "Working set",
            "KV tokens that the worker's sessions will want again, weighted by their probability "
            "to return. If the working set exceeds the worker's KV memory, the worker evicts "
            "caches before sessions use them again.",
            "suffix: tokens",
            per_worker("warmroute_worker_working_set_tokens"),
        ),
        Panel(
            "Time to compute the working set again",
            "Prefill time that the worker needs to compute the private tokens of its working set "
            "again.",
            "s",
            per_worker("warmroute_worker_working_set_seconds"),
        ),
        Panel(
            "Forgotten sessions and blocks",
            "Forgotten: sessions that the router dropped at limits.sessions before they ended. "
            "Forgotten blocks: blocks of prompts that the router dropped at "
            "limits.session_blocks. If a rate stays above 0, raise its limit.",
            "suffix: per s",
            (
                (rate("warmroute_forgotten_sessions_total"), "forgotten"),
                (rate("warmroute_evicted_session_blocks_total"), "forgotten blocks"),
            ),
        ),
        Panel(
            "Shared prefixes (trunks)",
            "Shared: trunks that the router tracks; the prompts of many sessions begin with a "
            "trunk. Hot: trunks that more than one worker should hold. Replaced: trunks that the "
            "router dropped for another trunk, per second.",
            "suffix: heads",
            (
                (selected("warmroute_trunks"), "shared"),
                (selected("warmroute_hot_trunks"), "hot"),
                (rate("warmroute_replaced_trunks_total"), "replaced"),
            ),
        ),
        Panel(
            "Copies of the trunks most in demand",
            "Trunks by rank in demand. Copies: workers that hold the trunk. Wanted: workers that "
            "should hold the trunk. Demand: seconds of work per second that requests with the "
            "trunk bring.",
            "short",
            (
                (selected("warmroute_trunk_copies"), "copies, rank {{rank}}"),
                (selected("warmroute_trunk_wanted_copies"), "wanted, rank {{rank}}"),
                (selected("warmroute_trunk_demand"), "demand, rank {{rank}}"),
            ),
        ),
    ),
    width=6,
)

LEGS = Row(
    "Prefill here, decode there",
    (
        Panel(
            "Dispatches by leg",
            "both: one worker computes the whole request. prefill, decode: the two legs of a "
            "disaggregated request, at two workers.",
            "reqps",
            ((rate("warmroute_legs_total", by="leg"), "{{leg}}"),),
            6,
            names=("both", "prefill", "decode"),
        ),
        Panel(
            "Prefill leg",
            "Time of the prefill leg, from its dispatch to the end of its answer, including the "
            "wait in the worker's queue.",
            "s",
            quantiles("warmroute_prefill_leg_seconds"),
            6,
        ),
        Panel(
            "Speed of KV transfers",
            "Measured speed of KV transfers between workers; 200,000 before the first transfer.",
            "suffix: tokens/s",
            ((selected("warmroute_kv_transfer_tokens_per_second"), "measured"),),
            6,
        ),
        Panel(
            "Faults of KV transfers",
            "Requests whose KV did not safely reach another worker, as engines count them. "
            "expired: KV freed before a worker read it. late: KV read after it was freed, so the "
            "answer may be wrong. failed: KV not received; the decode worker computed the prompt, "
            "or failed the request.",
            "suffix: /s",
            ((rate("warmroute_worker_kv_transfer_faults_total", by="fault"), "{{fault}}"),),
            6,
            names=("expired", "late", "failed"),
            alert="WarmrouteLateKvReads",
        ),
        Panel(
            "Work by role",
            "Number of workers that a group's prompts (prefill) and answers (decode) keep busy, "
            "with roles.follow.",
            "suffix: workers",
            ((selected("warmroute_role_work"), "{{role}}, group {{group}}"),),
            12,
        ),
        Panel(
            "Changed and missing roles",
            "Changed: workers that changed their role, per second. Others: workers without a "
            "partner, because no ready worker of their group has the other role.",
            "suffix: workers",
            (
                (rate("warmroute_role_changes_total"), "changed"),
                (
                    selected("warmroute_pool_half_missing"),
                    "no {{missing}}, group {{group}}",
                ),
            ),
            12,
        ),
    ),
)

PICKER = Row(
    "Endpoint picker",
    (
        Panel(
            "Requests of gateways",
            "Requests about which gateways asked the endpoint picker, by end. placed: the picker "
            "named a worker. refused: the router refused the request. unasked: the gateway "
            "answered the request itself. left: the client disconnected. watched: the gateway "
            "wanted no answer. broken: a defect; see the log.",
            "reqps",
            ((rate("warmroute_picker_requests_total", by="end"), "{{end}}"),),
            names=("placed", "refused", "unasked", "left", "watched", "broken"),
            stacked=True,
        ),
        Panel(
            "Unfinished requests at gateways",
            "Requests about which a gateway asked the endpoint picker, and whose end the gateway "
            "has not reported. If the number grows while workers are idle, the gateway does not "
            "report ends: set response_trailer_mode: SEND.",
            "suffix: requests",
            ((selected("warmroute_picker_streams"), "open"),),
        ),
        Panel(
            "Requests not sent to the picked worker",
            "moved: the gateway sent the request to another worker, after a refused connection or "
            "because the gateway's cluster lacks the picked worker. stranger: the gateway sent "
            "the request to an address that is no worker.",
            "reqps",
            ((rate("warmroute_picker_elsewhere_total", by="to"), "{{to}}"),),
            names=("moved", "stranger"),
        ),
    ),
)
