"""vLLM's metric names, and a small parser of the load figures a router wants from them.

Names and meanings: vLLM `v1/metrics/loggers.py`, 0.9 to 0.33. Counters carry `_total` in the
text. Series of several data-parallel ranks (label `engine`) are added up, fractions averaged.
"""

from __future__ import annotations

import re

import msgspec

from engine.wire.errors import WireError

MAX_TEXT_BYTES = 8 << 20
MAX_VALUE = 1e18  # of a series: no count of anything is larger

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
KV_USAGE_OLD = "vllm:gpu_cache_usage_perc"  # to vLLM 0.11
PREFIX_QUERIES = "vllm:prefix_cache_queries"  # tokens
PREFIX_HITS = "vllm:prefix_cache_hits"  # tokens
PREFIX_QUERIES_OLD = "vllm:gpu_prefix_cache_queries"
PREFIX_HITS_OLD = "vllm:gpu_prefix_cache_hits"
PROMPT_TOKENS = "vllm:prompt_tokens"
GENERATION_TOKENS = "vllm:generation_tokens"
PREEMPTIONS = "vllm:num_preemptions"
REQUEST_SUCCESS = "vllm:request_success"
TTFT = "vllm:time_to_first_token_seconds"
INTER_TOKEN = "vllm:inter_token_latency_seconds"
E2E = "vllm:e2e_request_latency_seconds"
CACHE_CONFIG = "vllm:cache_config_info"

_WANTED = {
    RUNNING: "running",
    WAITING: "waiting",
    KV_USAGE: "kv_usage",
    KV_USAGE_OLD: "kv_usage_old",
    PREFIX_QUERIES: "queries",
    PREFIX_HITS: "hits",
    PREFIX_QUERIES_OLD: "queries_old",
    PREFIX_HITS_OLD: "hits_old",
    CACHE_CONFIG: "config",
}
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class EngineLoad(msgspec.Struct, frozen=True):
    """Load figures of one engine process; None where its text does not say."""

    running: int  # requests in the batch
    waiting: int  # requests not admitted yet
    kv_usage: float | None = None  # 0..1 of the KV blocks in use
    block_size: int | None = None  # tokens a block
    num_gpu_blocks: int | None = None
    prefix_query_tokens: int | None = None  # since start
    prefix_hit_tokens: int | None = None  # since start
    model_name: str | None = None

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Tokens that the whole KV cache holds."""
        if self.block_size is None or self.num_gpu_blocks is None:
            return None
        return self.block_size * self.num_gpu_blocks


def parse_load(text: str) -> EngineLoad:
    """The load in a Prometheus exposition; raises WireError naming the bad line."""
    if len(text) > MAX_TEXT_BYTES:
        raise WireError(f"metrics of {len(text)} characters; at most {MAX_TEXT_BYTES}")
    values: dict[str, list[float]] = {}
    model_name: str | None = None
    block_size: int | None = None
    blocks: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith("vllm:"):
            continue
        key = _WANTED.get(_base_name(line))
        if key is None:
            continue
        labels, value = _sample(line, number)
        if key == "config":
            block_size = _config_int(labels, "block_size", number) or block_size
            blocks.append(_config_int(labels, "num_gpu_blocks", number) or 0)
        else:
            values.setdefault(key, []).append(value)
            model_name = model_name or labels.get("model_name")
    if "running" not in values or "waiting" not in values:
        raise WireError(f"metrics without {RUNNING} and {WAITING}: not a vLLM-like engine")
    usage = values.get("kv_usage") or values.get("kv_usage_old")
    return EngineLoad(
        running=int(sum(values["running"])),
        waiting=int(sum(values["waiting"])),
        kv_usage=sum(usage) / len(usage) if usage else None,
        block_size=block_size,
        num_gpu_blocks=sum(blocks) or None,
        prefix_query_tokens=_total(values, "queries"),
        prefix_hit_tokens=_total(values, "hits"),
        model_name=model_name,
    )


def _base_name(line: str) -> str:
    """The metric's name without labels and without a counter's suffix."""
    return line.split("{", 1)[0].split(" ", 1)[0].removesuffix("_total")


def _sample(line: str, number: int) -> tuple[dict[str, str], float]:
    labels: dict[str, str] = {}
    rest = line.partition(" ")[2]
    if "{" in line:
        inside, brace, rest = line.partition("{")[2].rpartition("}")
        if not brace:
            raise WireError(f"metrics line {number}: labels are not closed")
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(inside)}
    try:
        value = float(rest.split()[0])
    except (IndexError, ValueError) as error:
        raise WireError(f"metrics line {number}: no number after the name") from error
    if not 0 <= value <= MAX_VALUE:
        raise WireError(f"metrics line {number}: {value} is not a load")
    return labels, value


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)


def _config_int(labels: dict[str, str], name: str, number: int) -> int | None:
    text = labels.get(name)
    if text is None or text == "None":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise WireError(f"metrics line {number}: {name}={text[:40]!r} is not a count")
    return int(text)


def _total(values: dict[str, list[float]], key: str) -> int | None:
    series = values.get(key) or values.get(key + "_old")
    return None if series is None else int(sum(series))
