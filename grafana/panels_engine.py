"""Panels of engines' own metrics: rows for all kinds of engines, and rows for warmroute-engine."""

from __future__ import annotations

from grafana import engine_metrics as metrics
from grafana.drawing import Panel, Row, firing_alerts, rate, selected, stat, top
from grafana.limits import limit

ENGINE = 'instance=~"$engine"'
OURS = "warmroute-engine only: "
REASONS = (
    *("kv_blocks", "token_budget", "max_batch_size", "priority", "prefix_in_flight"),
    *("reserve_policy", "tenant_share", "queue_delay", "kv_transfer"),
)
PHASES = ("schedule", "compute", "complete", "answer")


def _of(metric: str, matchers: str = "") -> str:
    return selected(metric, matchers, ENGINE)


def _rate(metric: str, by: str = "") -> str:
    return rate(metric, by=by, of=ENGINE)


def _ratio(part: str, whole: str, by: str = "") -> str:
    return f"{_rate(part, by)} / {_rate(whole, by)}"


def _sum(names: metrics.Names, by: str = "") -> str:
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}({metrics.gauges(names, ENGINE)})"


def _rates(names: metrics.Names, by: str = "") -> str:
    return metrics.rates(names, ENGINE, by)


_STEPS = "warmroute_engine_steps_total"
_TOKENS = "warmroute_engine_step_tokens_total"
_BUDGET = f"avg({_of('warmroute_engine_step_budget_tokens')})"
_KIND = 'kind="{}"'


def _requests(kind: str) -> str:
    return f"sum({_of('warmroute_engine_requests', _KIND.format(kind))})"


WELL = Row(
    "Is it well?",
    (
        *firing_alerts('alertname=~"WarmrouteEngine.*"'),
        stat(
            "Engines answer",
            "Whether each chosen engine answers Prometheus.",
            "short",
            f'min(up{{job="engine", {ENGINE}}})',
            limit("WarmrouteEngineDown", "== "),
            says=("all", "not all"),
        ),
        stat(
            "Engines",
            "Chosen engines that report their requests.",
            "short",
            f"count({_sum(metrics.RUNNING, 'instance')})",
        ),
        stat(
            "Running requests",
            "Requests in the engines' batches now.",
            "short",
            _sum(metrics.RUNNING),
        ),
        stat(
            "Longest queue",
            "Waiting requests of the engine with the longest queue.",
            "short",
            f"max({_sum(metrics.WAITING, 'instance')})",
            limit("WarmrouteEngineNotBatching", "[5m]) > "),
        ),
        stat(
            "KV in use",
            "Share of KV memory that requests hold, the mean of all engines.",
            "percentunit",
            f"avg({metrics.gauges(metrics.KV_USAGE, ENGINE)})",
        ),
        stat(
            "Hit ratio",
            "Share of prompt tokens that engines found in their prefix caches.",
            "percentunit",
            metrics.ratio(metrics.HIT_TOKENS, metrics.LOOKED_UP_TOKENS, ENGINE),
        ),
        stat(
            "Tokens given",
            "Generated tokens per second.",
            "suffix: tok/s",
            _rates(metrics.ANSWER_TOKENS),
        ),
        stat(
            "First token, p99",
            "Time from a request's arrival at the engine to its first token, at the slowest "
            "engine.",
            "s",
            metrics.worst_quantiles(metrics.FIRST_TOKEN, ENGINE)[2][0],
        ),
        stat(
            "Between tokens, p99",
            "Time between the tokens of an answer, at the slowest engine.",
            "s",
            metrics.worst_quantiles(metrics.BETWEEN_TOKENS, ENGINE)[2][0],
        ),
        stat(
            "Preempted",
            "Requests per second that engines removed from the batch for lack of KV memory.",
            "suffix: per s",
            # SGLang exports its counter only after the first preemption.
            f"{_rates(metrics.PREEMPTED)} or 0 * sum({_of('sglang:num_retracted_reqs')})",
        ),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Running and waiting requests",
            "Requests of all engines. Running: requests in the engines' batches. Waiting: "
            "requests that the engines have not begun to compute.",
            "short",
            ((_sum(metrics.RUNNING), "running"), (_sum(metrics.WAITING), "waiting")),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Longest queues",
            "Waiting requests of the engines with the longest queues.",
            "short",
            top(_sum(metrics.WAITING, "instance"), "{{instance}}"),
            alert="WarmrouteEngineNotBatching",
            limits=(limit("WarmrouteEngineNotBatching", "[5m]) > "),),
        ),
        Panel(
            "Largest batches",
            "Running requests of the engines with the largest batches.",
            "short",
            top(_sum(metrics.RUNNING, "instance"), "{{instance}}"),
        ),
        Panel(
            "Answers",
            "Answered requests per second of the busiest engines.",
            "reqps",
            top(_rates(metrics.ANSWERS, "instance"), "{{instance}}"),
        ),
        Panel(
            "Tokens",
            "Tokens of prompts, including cached tokens, and tokens of answers.",
            "suffix: tok/s",
            ((_rates(metrics.PROMPT_TOKENS), "prompt"), (_rates(metrics.ANSWER_TOKENS), "answer")),
        ),
        Panel(
            "Refused, failed, preempted",
            "Refused: requests that the engine refused. Failed: requests that ended with an error "
            "or were aborted. Preempted: requests removed from the batch for lack of KV memory. "
            "Some engines export a counter only after its first event.",
            "suffix: per s",
            (
                (_rates(metrics.REFUSED), "refused"),
                (_rates(metrics.FAILED), "failed"),
                (_rates(metrics.PREEMPTED), "preempted"),
            ),
        ),
    ),
)

CACHE = Row(
    "KV cache",
    (
        Panel(
            "KV usage",
            "Share of the engine's KV memory that requests hold, of the fullest engines.",
            "percentunit",
            top(f"max by (instance) ({metrics.gauges(metrics.KV_USAGE, ENGINE)})", "{{instance}}"),
            maximum=1.0,
        ),
        Panel(
            "Prefix hits, the worst engines",
            "Share of prompt tokens that the engine found in its prefix cache, of the engines "
            "with the lowest share.",
            "percentunit",
            (
                (
                    "bottomk($top, "
                    + metrics.ratio(
                        metrics.HIT_TOKENS, metrics.LOOKED_UP_TOKENS, ENGINE, "instance"
                    )
                    + ")",
                    "{{instance}}",
                ),
            ),
            maximum=1.0,
        ),
        Panel(
            "Prompt tokens and those found",
            "Looked up: prompt tokens that engines looked up in their prefix caches. Found: "
            "prompt tokens that engines found in their prefix caches.",
            "suffix: tok/s",
            (
                (_rates(metrics.LOOKED_UP_TOKENS), "looked up"),
                (_rates(metrics.HIT_TOKENS), "found"),
            ),
        ),
    ),
)

SPEED = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "Time from a request's arrival at the engine to its first token, at the slowest "
            "engine.",
            "s",
            metrics.worst_quantiles(metrics.FIRST_TOKEN, ENGINE),
        ),
        Panel(
            "Between tokens",
            "Time between the tokens of an answer, at the slowest engine. TensorRT-LLM reports "
            "the mean of each answer.",
            "s",
            metrics.worst_quantiles(metrics.BETWEEN_TOKENS, ENGINE),
        ),
        Panel(
            "Whole request",
            "Time from a request's arrival at the engine to its last token, at the slowest engine.",
            "s",
            metrics.worst_quantiles(metrics.WHOLE, ENGINE),
        ),
        Panel(
            "Time to first token by engine, p99",
            "99 % of the engine's answers began within this time. The panel shows the slowest "
            "engines.",
            "s",
            top(metrics.quantile_of_each(0.99, metrics.FIRST_TOKEN, ENGINE), "{{instance}}"),
        ),
    ),
    width=6,
)

STEPS = Row(
    f"{OURS}steps and batches",
    (
        Panel(
            "Step time, slowest engines",
            "Mean time of the engine's steps.",
            "s",
            top(_ratio("warmroute_engine_busy_seconds_total", _STEPS, "instance"), "{{instance}}"),
        ),
        Panel(
            "Time by part of a step",
            "Seconds per second that all engines spend on each part of their steps: schedule, "
            "compute, complete, answer. If the sum exceeds the number of engines, steps overlap.",
            "suffix: s/s",
            ((_rate("warmroute_engine_step_phase_seconds_total", "phase"), "{{phase}}"),),
            names=PHASES,
            stacked=True,
        ),
        Panel(
            "Busy",
            "Share of time in which the engine computes a step. The panel shows the busiest "
            "engines.",
            "percentunit",
            top(_rate("warmroute_engine_busy_seconds_total", "instance"), "{{instance}}"),
        ),
        Panel(
            "Requests in batches",
            "Scheduled: requests in the engines' last steps. Active: running and waiting "
            "requests. Maximum: the largest batches that the engines allow.",
            "short",
            (
                (_requests("scheduled"), "scheduled"),
                (_requests("active"), "active"),
                (_requests("max"), "maximum"),
            ),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Tokens per step",
            "Mean number of tokens that a step computes, for prompts (prefill) and for answers "
            "(decode), and the number that a step may compute (budget).",
            "suffix: tok",
            (
                (
                    f"{_rate(_TOKENS, 'of')} / on () group_left () {_rate(_STEPS)}",
                    "{{of}}",
                ),
                (_BUDGET, "budget"),
            ),
            names=("prefill", "decode", "budget"),
        ),
        Panel(
            "Late steps and graphs",
            "Overrun: steps that took longer than modelled. Graph: steps by their use of a CUDA "
            "graph: hit, or the reason why the step used no graph. Padded rows: rows of graphs "
            "that belong to no request.",
            "suffix: per s",
            (
                (_rate("warmroute_engine_overrun_steps_total"), "overrun"),
                (_rate("warmroute_engine_graph_steps_total", "use"), "graph: {{use}}"),
                (_rate("warmroute_engine_graph_padded_rows_total"), "padded rows"),
            ),
        ),
    ),
)

WAITING = Row(
    f"{OURS}waiting requests",
    (
        Panel(
            "Waiting requests by reason",
            "Request-steps (one request that waits for one step) per second, by reason. "
            "kv_blocks: the cache is full. token_budget, max_batch_size: the step is full. "
            "kv_transfer: the prompt's KV has not arrived from the prefill worker. priority, "
            "prefix_in_flight, reserve_policy, tenant_share, queue_delay: the request waits on "
            "purpose.",
            "suffix: per s",
            ((_rate("warmroute_engine_not_scheduled_total", "reason"), "{{reason}}"),),
            names=REASONS,
            stacked=True,
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Refused requests and cut streams",
            "Refused: requests that the engine refused, by reason. Slow clients: streams cut "
            "because the client did not read them. Invalid HTTP: requests that the engine could "
            "not read.",
            "suffix: per s",
            (
                (_rate("warmroute_engine_refused_total", "reason"), "refused: {{reason}}"),
                (_rate("warmroute_engine_slow_clients_total"), "slow clients"),
                (_rate("warmroute_engine_unread_requests_total"), "invalid HTTP"),
            ),
        ),
    ),
    width=12,
)

BLOCKS = Row(
    f"{OURS}blocks and shared prefixes",
    (
        Panel(
            "Cached and pinned blocks",
            "Blocks of all engines: blocks in the prefix cache, blocks that pins keep, and blocks "
            "in host memory.",
            "suffix: blocks",
            (
                (f"sum({_of('warmroute_engine_cached_blocks')})", "cached"),
                (f"sum({_of('warmroute_engine_pinned_blocks')})", "pinned"),
                (f"sum({_of('warmroute_engine_host_blocks')})", "in host memory"),
            ),
        ),
        Panel(
            "Blocks evicted",
            "Cached blocks that engines evicted. A high rate with a low hit ratio means that the "
            "cache is too small for the sessions sent to the engine.",
            "suffix: blocks/s",
            ((_rate("warmroute_engine_evicted_blocks_total"), "evicted"),),
        ),
        Panel(
            "Shared prefixes in decode steps",
            "Runs of tokens whose KV a step reads once for several requests; 0 without the "
            "kernels.",
            "suffix: per s",
            ((_rate("warmroute_engine_shared_prefix_groups_total"), "shared prefixes"),),
        ),
        Panel(
            "KV reads saved by sharing",
            "Bytes of KV that engines did not read because requests of a step share their prefix.",
            "Bps",
            ((_rate("warmroute_engine_kv_bytes_saved_total"), "saved"),),
        ),
    ),
    width=6,
)

TRANSFERS = Row(
    "warmroute-engine and vLLM with NIXL: KV between workers",
    (
        Panel(
            "KV sent and received",
            "sent: KV sent to decode workers. received: KV received from prefill workers.",
            "Bps",
            ((_rate("warmroute_engine_kv_bytes_total", "direction"), "{{direction}}"),),
        ),
        Panel(
            "KV transfers under way",
            "Exports: prompts whose KV engines hold for other workers. Blocks: blocks of these "
            "prompts. Imports: requests whose KV has not arrived yet.",
            "short",
            (
                (f"sum({_of('warmroute_engine_kv_exports')})", "exports"),
                (f"sum({_of('warmroute_engine_kv_exported_blocks')})", "blocks"),
                (f"sum({_of('warmroute_engine_kv_imports')})", "imports"),
            ),
        ),
        Panel(
            "Ends of KV transfers",
            "read: received, or the reason why a prompt's KV did not arrive. export: read, late "
            "(the decode worker computed the prompt), expired (no worker read the KV) or "
            "too_many. refused: readers that an engine refused. Waiting for KV: time from "
            "reserving blocks until their KV has arrived.",
            "suffix: per s",
            (
                (_rate("warmroute_engine_kv_reads_total", "outcome"), "read: {{outcome}}"),
                (_rate("warmroute_engine_kv_exports_ended_total", "end"), "export: {{end}}"),
                (_rate("warmroute_engine_kv_readers_refused_total", "reason"), "refused"),
                (_rate("vllm:nixl_num_kv_expired_reqs_total"), "expired, by vLLM's metric"),
                (_rate("vllm:nixl_num_failed_transfers_total"), "failed, by vLLM's metric"),
                (_rate("warmroute_engine_kv_read_seconds_total"), "waiting for KV"),
            ),
        ),
    ),
)
