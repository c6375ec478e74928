"""Panels of what a router decides, what it expected, how fast answers are, and of sessions."""

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
# Divided by the workers that are ready, not by those that answered: a worker that was never
# chosen has no series, and the worst hot spot would look perfectly even.
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
            "Workers that are given new requests. 0: clients get 503.",
            "short",
            f"{READY} or vector(0)",
            missing("WarmrouteNoWorker"),
        ),
        stat(
            "Refused",
            "Share of requests that nothing could take, over five minutes.",
            "percentunit",
            REFUSED,
            limit("WarmrouteSaturated", "rate5m > "),
        ),
        stat(
            "Longest wait",
            "How long the first of the requests held at the router has waited.",
            "s",
            selected("warmroute_held_oldest_seconds"),
            limit("WarmrouteSaturated", "[2m]) > "),
        ),
        stat(
            "Errors of its own",
            "Requests per second that failed by a defect of the router or of its policy.",
            "reqps",
            f"sum(instance:warmroute_own_errors:rate5m{{{ROUTER}}})",
            limit("WarmrouteOurErrors", "> "),
        ),
        stat(
            "First token, p99",
            "99 of 100 streamed answers began sooner than this after the request arrived.",
            "s",
            quantiles("warmroute_time_to_first_token_seconds")[2][0],
        ),
        stat(
            "In flight",
            "Requests accepted and not finished, those held at the router included.",
            "short",
            selected("warmroute_inflight_requests"),
        ),
        stat(
            "Hit ratio",
            "Share of prompt tokens that workers found in their caches, by their own count.",
            "percentunit",
            REPORTED_RATIO,
        ),
        stat(
            "Hits missed",
            "Expected hit ratio less the reported one, over a quarter of an hour.",
            "percentunit",
            f"sum(instance:warmroute_expected_hits:ratio15m{{{ROUTER}}}) "
            f"- sum(instance:warmroute_reported_hits:ratio15m{{{ROUTER}}})",
            limit("WarmrouteHitsBelowExpected", "> "),
        ),
        stat(
            "Busiest / mean",
            "Requests of the busiest worker over the mean of all ready ones, over five minutes. 1 "
            "is even; the number of workers means that one does everything: a hot spot.",
            "short",
            BUSIEST_NOW,
            limit("WarmrouteHotSpot", "count, "),
        ),
        stat(
            "Policy",
            "Suspended: the policy keeps failing, and its fallback decides.",
            "short",
            selected("warmroute_policy_suspended"),
            limit("WarmroutePolicySuspended", "== "),
            says=("suspended", "decides"),
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

# Seconds of prefill that each worker has yet to do.
QUEUE_S = (
    f"{selected('warmroute_worker_queued_prefill_tokens')} / on (instance, worker) "
    f"{selected('warmroute_worker_prefill_tokens_per_second')}"
)
_SPEED = f"avg({selected('warmroute_worker_prefill_tokens_per_second')})"
_REQUESTS = selected("warmroute_worker_requests")

IMBALANCE = Row(
    "What uneven load costs",
    (
        Panel(
            "Busiest over mean",
            "Answers: of the busiest worker over the mean of all ready ones. In flight: the same "
            "of requests that are there now. 1 is even.",
            "short",
            (
                (BUSIEST_TO_MEAN, "answers"),
                (f"max({_REQUESTS}) / avg({_REQUESTS})", "in flight"),
            ),
            alert="WarmrouteHotSpot",
            limits=(limit("WarmrouteHotSpot", "count, "),),
        ),
        Panel(
            "Prefill queued: fullest worker and mean",
            "Seconds of prompts that wait to be computed, by the workers' measured speeds. The "
            "gap between both is what a request on the fullest worker waits for its place there.",
            "s",
            ((f"max({QUEUE_S})", "fullest"), (f"avg({QUEUE_S})", "mean")),
            alert="WarmrouteHotSpot",
        ),
        Panel(
            "Prefill that hits spare",
            "Seconds of computing per second, of all workers: what cached tokens would have cost, "
            "as expected and as reported. What imbalance costs must stay below that.",
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


MODELS = Row(
    "Models",
    (
        Panel(
            "Waiting and running, by model",
            "Waiting: at the router, for a first worker or for room. Running: sent to workers. "
            "Autoscalers start a first worker by the first, and end the last one by both.",
            "suffix: requests",
            (
                (selected("warmroute_waiting_requests"), "{{model}}: waiting"),
                (selected("warmroute_running_requests"), "{{model}}: running"),
            ),
        ),
        Panel(
            "Workers that answer, by model",
            "0: requests of a known model wait at the router until one is there.",
            "suffix: workers",
            ((selected("warmroute_ready_workers"), "{{model}}"),),
            alert="WarmrouteNoFirstWorker",
        ),
        Panel(
            "Requests that came, by model",
            "Of known models, refused ones included.",
            "reqps",
            ((rate("warmroute_incoming_requests_total", by="model"), "{{model}}"),),
        ),
        Panel(
            "Ends of waits for a first worker",
            "served: a worker came. late: none came in time. refused: too many waited, or the "
            "router stopped. displaced: by more urgent ones. left: by their clients.",
            "reqps",
            ((rate("warmroute_first_worker_waits_total", by="end"), "{{end}}"),),
            names=("served", "late", "refused", "displaced", "left"),
        ),
        Panel(
            "Bodies that wait for a first worker",
            "Of requests that wait; waiting.bytes bounds it.",
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
            "Sessions followed",
            "Active: a request is under way. Idle: expected back. All 0 where the policy does not "
            "ask about them.",
            "suffix: sessions",
            ((selected("warmroute_sessions"), "{{state}}"),),
            names=("active", "idle"),
        ),
        Panel(
            "Held, by the standing of their session",
            "New: its first request. Cold: its cache was lost. Warm: its cache is still there. "
            "Cold ones go before new ones.",
            "suffix: requests",
            ((selected("warmroute_held_sessions"), "{{standing}}"),),
            names=("new", "cold", "warm"),
        ),
        Panel(
            "Wait at the router",
            "Of requests that were held, from arrival to the end of the wait: mean by the standing "
            "of their session, and p99 of all. Their time to the first token includes it.",
            "s",
            (
                (f"{_WAITED} / {_ENDED}", "{{standing}}"),
                (f"histogram_quantile(0.99, {_P99})", "p99"),
            ),
            names=("new", "cold", "warm"),
        ),
        Panel(
            "Working set",
            "KV tokens that sessions at home on a worker will want again, each by its chance to "
            "return. More than its memory: caches are lost before they are used again.",
            "suffix: tokens",
            per_worker("warmroute_worker_working_set_tokens"),
        ),
        Panel(
            "Working set, to compute again",
            "Prefill time of a worker for all of its working set.",
            "s",
            per_worker("warmroute_worker_working_set_seconds"),
        ),
        Panel(
            "Bounds",
            "Sessions forgotten before they were over (limits.sessions), and blocks of prompts "
            "forgotten (limits.session_blocks). Above 0 for long: raise them.",
            "suffix: per s",
            (
                (rate("warmroute_forgotten_sessions_total"), "forgotten"),
                (rate("warmroute_evicted_session_blocks_total"), "forgotten blocks"),
            ),
        ),
        Panel(
            "Heads that prompts share",
            "Shared: heads kept, each begins many sessions' prompts. Hot: of these, so much in "
            "demand that more than one worker should hold it. Given way: to another, per s.",
            "suffix: heads",
            (
                (selected("warmroute_trunks"), "shared"),
                (selected("warmroute_hot_trunks"), "hot"),
                (rate("warmroute_replaced_trunks_total"), "given way"),
            ),
        ),
        Panel(
            "Copies of the heads most in demand",
            "By rank in demand: workers that hold the head, and workers that should. Demand: "
            "seconds of work per second that its prompts bring.",
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
            "Both: all of a request at one worker. Prefill and decode: the two legs of one whose "
            "prompt another worker computed.",
            "reqps",
            ((rate("warmroute_legs_total", by="leg"), "{{leg}}"),),
            6,
            names=("both", "prefill", "decode"),
        ),
        Panel(
            "First leg",
            "From its dispatch to the end of its answer: the prefill and its queue.",
            "s",
            quantiles("warmroute_prefill_leg_seconds"),
            6,
        ),
        Panel(
            "KV between workers",
            "How fast it goes, as learned from first tokens after a first leg. 200,000: none yet.",
            "suffix: tokens/s",
            ((selected("warmroute_kv_transfer_tokens_per_second"), "learned"),),
            6,
        ),
        Panel(
            "Faults of KV transfers",
            "By the engines. Expired: freed before it was fetched. Late: fetched after that, and "
            "the answer may be wrong. Failed: the worker that decodes computed it, or gave up.",
            "suffix: /s",
            ((rate("warmroute_worker_kv_transfer_faults_total", by="fault"), "{{fault}}"),),
            6,
            names=("expired", "late", "failed"),
            alert="WarmrouteLateKvReads",
        ),
        Panel(
            "Work of roles",
            "With roles.follow: how many workers a group's prompts and its answers keep busy.",
            "suffix: workers",
            ((selected("warmroute_role_work"), "{{role}}, group {{group}}"),),
            12,
        ),
        Panel(
            "Roles",
            "Changed: workers given another role, per s. Missing: workers whose role does nothing, "
            "because their group has nobody for the other half.",
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
            "Requests of data planes",
            "By what became of them. Refused: answered by the router. Unasked: the data plane "
            "answered by itself. Left: by the client. Broken: a defect, see the log.",
            "reqps",
            ((rate("warmroute_picker_requests_total", by="end"), "{{end}}"),),
            names=("placed", "refused", "unasked", "left", "watched", "broken"),
            stacked=True,
        ),
        Panel(
            "Requests open at data planes",
            "Asked about and not told the end of. Growing while nothing runs at the workers: the "
            "data plane does not tell of ends (response_trailer_mode: SEND).",
            "suffix: requests",
            ((selected("warmroute_picker_streams"), "open"),),
        ),
        Panel(
            "Sent elsewhere than told",
            "Moved: to another worker, after a refused connection or because its cluster lacks the "
            "one that was named. Stranger: to an address that is no worker.",
            "reqps",
            ((rate("warmroute_picker_elsewhere_total", by="to"), "{{to}}"),),
            names=("moved", "stranger"),
        ),
    ),
)
