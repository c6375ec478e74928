"""Engines by their own account: rows for all kinds of engines, and rows for ours alone."""

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
            "Whether each engine that is chosen above answers Prometheus.",
            "short",
            f'min(up{{job="engine", {ENGINE}}})',
            limit("WarmrouteEngineDown", "== "),
            says=("all", "not all"),
        ),
        stat(
            "Engines",
            "Engines that are chosen above and tell of their requests.",
            "short",
            f"count({_sum(metrics.RUNNING, 'instance')})",
        ),
        stat(
            "In the batch",
            "Requests that engines compute now.",
            "short",
            _sum(metrics.RUNNING),
        ),
        stat(
            "Longest queue",
            "Requests that the engine with most of them has not begun to compute.",
            "short",
            f"max({_sum(metrics.WAITING, 'instance')})",
            limit("WarmrouteEngineNotBatching", "[5m]) > "),
        ),
        stat(
            "KV in use",
            "Share of KV memory held by requests, the mean of all engines.",
            "percentunit",
            f"avg({metrics.gauges(metrics.KV_USAGE, ENGINE)})",
        ),
        stat(
            "Hit ratio",
            "Share of prompt tokens that were found in the prefix cache.",
            "percentunit",
            metrics.ratio(metrics.HIT_TOKENS, metrics.LOOKED_UP_TOKENS, ENGINE),
        ),
        stat(
            "Tokens given",
            "Tokens of answers per second.",
            "suffix: tok/s",
            _rates(metrics.ANSWER_TOKENS),
        ),
        stat(
            "First token, p99",
            "Of the slowest engine, from a request's arrival there to its first token.",
            "s",
            metrics.worst_quantiles(metrics.FIRST_TOKEN, ENGINE)[2][0],
        ),
        stat(
            "Between tokens, p99",
            "Of the slowest engine, time between tokens of an answer.",
            "s",
            metrics.worst_quantiles(metrics.BETWEEN_TOKENS, ENGINE)[2][0],
        ),
        stat(
            "Preempted",
            "Requests put out of the batch for lack of KV memory, per second.",
            "suffix: per s",
            # SGLang's counter begins with its first one.
            f"{_rates(metrics.PREEMPTED)} or 0 * sum({_of('sglang:num_retracted_reqs')})",
        ),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "In the batch and waiting",
            "Requests of all engines: computed now, and not begun yet.",
            "short",
            ((_sum(metrics.RUNNING), "in the batch"), (_sum(metrics.WAITING), "waiting")),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Longest queues",
            "Requests not begun yet, the engines with most of them.",
            "short",
            top(_sum(metrics.WAITING, "instance"), "{{instance}}"),
            alert="WarmrouteEngineNotBatching",
            limits=(limit("WarmrouteEngineNotBatching", "[5m]) > "),),
        ),
        Panel(
            "Largest batches",
            "Requests that are computed now, the engines with most of them.",
            "short",
            top(_sum(metrics.RUNNING, "instance"), "{{instance}}"),
        ),
        Panel(
            "Answers",
            "Answered requests per second, the engines with most of them.",
            "reqps",
            top(_rates(metrics.ANSWERS, "instance"), "{{instance}}"),
        ),
        Panel(
            "Tokens",
            "Tokens of prompts and of answers, cached ones included.",
            "suffix: tok/s",
            ((_rates(metrics.PROMPT_TOKENS), "prompt"), (_rates(metrics.ANSWER_TOKENS), "answer")),
        ),
        Panel(
            "Refused, failed, preempted",
            "Refused: requests turned away by the engine. Failed: ended by an error, or aborted. "
            "Preempted: put out of the batch for room. An engine may tell of one only after it "
            "has happened.",
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
            "Share of an engine's KV memory held by requests, the fullest engines.",
            "percentunit",
            top(f"max by (instance) ({metrics.gauges(metrics.KV_USAGE, ENGINE)})", "{{instance}}"),
            maximum=1.0,
        ),
        Panel(
            "Prefix hits, the worst engines",
            "Share of prompt tokens that an engine found in its cache.",
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
            "Prompt tokens that engines looked up in their prefix caches, and those they found.",
            "suffix: tok/s",
            (
                (_rates(metrics.LOOKED_UP_TOKENS), "looked up"),
                (_rates(metrics.HIT_TOKENS), "found"),
            ),
        ),
    ),
)

SPEED = Row(
    "How fast they answer",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the engine to its first token, at the slowest engine.",
            "s",
            metrics.worst_quantiles(metrics.FIRST_TOKEN, ENGINE),
        ),
        Panel(
            "Between tokens",
            "Time between tokens of an answer, at the slowest engine. Of TensorRT-LLM: the mean of "
            "each answer.",
            "s",
            metrics.worst_quantiles(metrics.BETWEEN_TOKENS, ENGINE),
        ),
        Panel(
            "Whole request",
            "From a request's arrival at the engine to its last token, at the slowest engine.",
            "s",
            metrics.worst_quantiles(metrics.WHOLE, ENGINE),
        ),
        Panel(
            "Time to first token by engine, p99",
            "99 of 100 answers of the engine began sooner, the slowest engines.",
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
            "Step time, the slowest engines",
            "Mean time of an engine's steps.",
            "s",
            top(_ratio("warmroute_engine_busy_seconds_total", _STEPS, "instance"), "{{instance}}"),
        ),
        Panel(
            "What a second is spent on",
            "Seconds per second of all engines by part of a step: scheduling, computing, "
            "completing, answering. The sum above the engines' number: steps overlap.",
            "suffix: s/s",
            ((_rate("warmroute_engine_step_phase_seconds_total", "phase"), "{{phase}}"),),
            names=PHASES,
            stacked=True,
        ),
        Panel(
            "Busy",
            "Share of time in which an engine computes a step, the busiest ones.",
            "percentunit",
            top(_rate("warmroute_engine_busy_seconds_total", "instance"), "{{instance}}"),
        ),
        Panel(
            "Requests in batches",
            "In the last step of all engines, running and waiting, and how many could be in steps.",
            "short",
            (
                (_requests("scheduled"), "in the batch"),
                (_requests("active"), "active"),
                (_requests("max"), "at most"),
            ),
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Tokens per step",
            "Computed in a step on average: of prompts, of answers, and what a step may compute.",
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
            "overrun: steps longer than modelled. Graphs: by use, where an engine has them: hit, "
            "or why a step was none of a graph; padded rows are computed for nobody.",
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
    f"{OURS}who waits and why",
    (
        Panel(
            "Waiting requests by reason",
            "Request-steps spent waiting per second: kv_blocks, the cache is full. token_budget, "
            "max_batch_size: the step is. priority, prefix_in_flight, reserve_policy, "
            "tenant_share, queue_delay: it waits on purpose. kv_transfer: for another worker's KV.",
            "suffix: per s",
            ((_rate("warmroute_engine_not_scheduled_total", "reason"), "{{reason}}"),),
            names=REASONS,
            stacked=True,
            alert="WarmrouteEngineNotBatching",
        ),
        Panel(
            "Refused, cut",
            "refused: requests turned away, by reason. slow: streams cut because they were not "
            "read. no HTTP: what could not be read.",
            "suffix: per s",
            (
                (_rate("warmroute_engine_refused_total", "reason"), "refused: {{reason}}"),
                (_rate("warmroute_engine_slow_clients_total"), "slow"),
                (_rate("warmroute_engine_unread_requests_total"), "no HTTP"),
            ),
        ),
    ),
    width=12,
)

BLOCKS = Row(
    f"{OURS}blocks and shared prefixes",
    (
        Panel(
            "Blocks kept",
            "Of all engines: in the prefix cache, and kept by pins.",
            "suffix: blocks",
            (
                (f"sum({_of('warmroute_engine_cached_blocks')})", "cached"),
                (f"sum({_of('warmroute_engine_pinned_blocks')})", "pinned"),
                (f"sum({_of('warmroute_engine_host_blocks')})", "in host memory"),
            ),
        ),
        Panel(
            "Blocks evicted",
            "Cached blocks that gave way to others. Much of it with a low hit ratio: the cache is "
            "too small for the sessions sent there.",
            "suffix: blocks/s",
            ((_rate("warmroute_engine_evicted_blocks_total"), "evicted"),),
        ),
        Panel(
            "Prefixes that decodes share",
            "Runs of tokens whose KV several requests of a step read once. 0 without the kernels.",
            "suffix: per s",
            ((_rate("warmroute_engine_shared_prefix_groups_total"), "shared prefixes"),),
        ),
        Panel(
            "KV reads saved by sharing",
            "Bytes of KV that were not read because requests of a step shared their prefix.",
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
            "KV moved",
            "Bytes of KV that left for workers that decode, and came from those that prefill.",
            "Bps",
            ((_rate("warmroute_engine_kv_bytes_total", "direction"), "{{direction}}"),),
        ),
        Panel(
            "Transfers at work",
            "exports: prompts held for others, in so many blocks. imports: requests whose KV has "
            "not come yet.",
            "short",
            (
                (f"sum({_of('warmroute_engine_kv_exports')})", "exports"),
                (f"sum({_of('warmroute_engine_kv_exported_blocks')})", "blocks"),
                (f"sum({_of('warmroute_engine_kv_imports')})", "imports"),
            ),
        ),
        Panel(
            "How transfers end",
            "reads: received, or why not. exports: read, late (its reader computed), expired "
            "(nobody came), too_many. refused: readers sent away. Time: from room to KV.",
            "suffix: per s",
            (
                (_rate("warmroute_engine_kv_reads_total", "outcome"), "read: {{outcome}}"),
                (_rate("warmroute_engine_kv_exports_ended_total", "end"), "export: {{end}}"),
                (_rate("warmroute_engine_kv_readers_refused_total", "reason"), "refused"),
                (_rate("vllm:nixl_num_kv_expired_reqs_total"), "expired, as vLLM's"),
                (_rate("vllm:nixl_num_failed_transfers_total"), "failed, as vLLM's"),
                (_rate("warmroute_engine_kv_read_seconds_total"), "waiting for KV"),
            ),
        ),
    ),
)
