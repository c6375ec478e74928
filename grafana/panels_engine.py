"""Engines by their own account: vLLM's names where it has one, ours where it has none."""

from __future__ import annotations

from grafana.drawing import Panel, Row, firing_alerts, quantiles, rate, selected, stat, top
from grafana.limits import limit

ENGINE = 'instance=~"$engine"'
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


_STEPS = "warmroute_engine_steps_total"
_TOKENS = "warmroute_engine_step_tokens_total"
_BUDGET = f"avg({_of('warmroute_engine_step_budget_tokens')})"
_HITS = _ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_KIND = 'kind="{}"'


def _requests(kind: str) -> str:
    return f"sum({_of('warmroute_engine_requests', _KIND.format(kind))})"


WELL = Row(
    "Is it well?",
    (
        *firing_alerts('alertname=~"WarmrouteEngine.*"'),
        stat(
            "Engines",
            "Engines that are chosen above and answer Prometheus.",
            "short",
            f"count({_of('vllm:num_requests_running')})",
        ),
        stat(
            "Engines answer",
            "Whether each engine that is chosen above answers Prometheus.",
            "short",
            f'min(up{{job="engine", {ENGINE}}})',
            limit("WarmrouteEngineDown", "== "),
            says=("all", "not all"),
        ),
        stat(
            "KV in use",
            "Share of KV blocks held by requests, the mean of all engines.",
            "percentunit",
            f"avg({_of('vllm:kv_cache_usage_perc')})",
        ),
        stat(
            "Tokens given",
            "Tokens of answers per second.",
            "suffix: tok/s",
            _rate("vllm:generation_tokens_total"),
        ),
        stat(
            "Hit ratio",
            "Share of prompt tokens that were found in the prefix cache.",
            "percentunit",
            _HITS,
        ),
        stat(
            "Step time",
            "Mean time of a step.",
            "s",
            _ratio("warmroute_engine_busy_seconds_total", _STEPS),
        ),
        stat(
            "Late steps",
            "Share of steps that took longer than modelled. Above 2 % the machine is too busy for "
            "a timed worker's speed.",
            "percentunit",
            _ratio("warmroute_engine_overrun_steps_total", _STEPS),
        ),
    ),
)

BATCH = Row(
    "Steps and batches",
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
    "Who waits and why",
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
            "Longest queues",
            "Requests not admitted yet, the engines with most of them.",
            "short",
            top(_of("vllm:num_requests_waiting"), "{{instance}}"),
            alert="WarmrouteEngineNotBatching",
            limits=(limit("WarmrouteEngineNotBatching", "[5m]) > "),),
        ),
        Panel(
            "Refused, cut, preempted",
            "refused: requests turned away, by reason. slow: streams cut because they were not "
            "read. no HTTP: what could not be read. preempted: put out of the batch for room.",
            "suffix: per s",
            (
                (_rate("warmroute_engine_refused_total", "reason"), "refused: {{reason}}"),
                (_rate("warmroute_engine_slow_clients_total"), "slow"),
                (_rate("warmroute_engine_unread_requests_total"), "no HTTP"),
                (_rate("vllm:num_preemptions_total"), "preempted"),
            ),
        ),
    ),
)

CACHE = Row(
    "KV cache",
    (
        Panel(
            "KV usage",
            "Share of an engine's KV blocks held by requests, the fullest engines.",
            "percentunit",
            top(_of("vllm:kv_cache_usage_perc"), "{{instance}}"),
            maximum=1.0,
        ),
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
            "Prefix hits, the worst engines",
            "Share of prompt tokens that an engine found in its cache.",
            "percentunit",
            (
                (
                    "bottomk($top, "
                    + _ratio(
                        "vllm:prefix_cache_hits_total",
                        "vllm:prefix_cache_queries_total",
                        "instance",
                    )
                    + ")",
                    "{{instance}}",
                ),
            ),
            maximum=1.0,
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
)

TRANSFERS = Row(
    "KV of other workers, KV for them",
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

SPEED = Row(
    "What its clients get",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the engine to its first token.",
            "s",
            quantiles("vllm:time_to_first_token_seconds", ENGINE),
        ),
        Panel(
            "Between tokens",
            "Time between tokens of an answer.",
            "s",
            quantiles("vllm:inter_token_latency_seconds", ENGINE),
        ),
        Panel(
            "Whole request",
            "From a request's arrival at the engine to its last token.",
            "s",
            quantiles("vllm:e2e_request_latency_seconds", ENGINE),
        ),
        Panel(
            "Tokens and ends",
            "Tokens of prompts and of answers, per second, and requests by how they ended.",
            "suffix: per s",
            (
                (_rate("vllm:prompt_tokens_total"), "prompt"),
                (_rate("vllm:generation_tokens_total"), "answer"),
                (_rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
            ),
        ),
    ),
    width=6,
)
