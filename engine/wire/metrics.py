"""Reads samples from Prometheus text, with vLLM's metric names, and a worker's load from them.

The format is 0.0.4; only the wanted samples are read. Names and meanings are those of vLLM
`v1/metrics/loggers.py`, 0.9 to 0.33. Counters carry `_total` in the text. The label `engine` is the
data-parallel rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from engine.wire.events import WireError

MAX_TEXT_BYTES = 8 << 20
MAX_RANKS = 4_096
MAX_VALUE = 1e18  # of a series: no count of anything is larger

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One sample of a metric."""

    name: str  # a counter's without `_total`
    labels: Mapping[str, str]
    value: float  # 0..MAX_VALUE
    line: int  # from 1


def samples(text: str, wanted: Collection[str]) -> Iterator[Sample]:
    """Yield the samples named in `wanted` (counters without `_total`), in order. Raises WireError
    with the line for a wanted sample that cannot be read, or whose value is negative, not a number
    or above MAX_VALUE.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise WireError(f"metrics of {len(text)} characters; at most {MAX_TEXT_BYTES}")
    beginnings = tuple(wanted)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.startswith(beginnings):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0].removesuffix("_total")
        if name in wanted:
            labels, value = _sample(line, number)
            yield Sample(name, labels, value, number)


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


def label_count(sample: Sample, name: str) -> int | None:
    """Return the label `name` as a count; None if it is absent or says None. Raises WireError."""
    text = sample.labels.get(name)
    if text is None or text == "None":
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise WireError(f"metrics line {sample.line}: {name}={text[:40]!r} is not a count")
    return int(text)


def label_rank(sample: Sample, name: str) -> int | None:
    """Return the label `name` as a data-parallel rank; None if it is absent. Raises WireError."""
    rank = label_count(sample, name)
    if rank is not None and rank >= MAX_RANKS:
        raise WireError(f"metrics line {sample.line}: rank {rank}; allowed: 0..{MAX_RANKS - 1}")
    return rank


RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
KV_USAGE_OLD = "vllm:gpu_cache_usage_perc"  # to vLLM 0.11
PREFIX_QUERIES = "vllm:prefix_cache_queries"  # tokens
PREFIX_HITS = "vllm:prefix_cache_hits"  # tokens
# Prompt tokens that the GPU's cache lacked, and those of them that a lower tier had.
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
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
# KV that other workers fetch: freed before it was fetched, and fetched after it was freed.
NIXL_EXPIRED = "vllm:nixl_num_kv_expired_reqs"
NIXL_LATE = "vllm:nixl_num_notifications_after_expiry"
NIXL_FAILED = "vllm:nixl_num_failed_transfers"  # of a worker that fetches
# Of an engine that serves LoRA adapters: which are in use, in labels with commas between names. The
# value is when that was so; series of before stay.
LORA_INFO = "vllm:lora_requests_info"
_IN_USE = ("running_lora_adapters", "waiting_lora_adapters")
SLEEP_STATE = "vllm:engine_sleep_state"  # label `sleep_state`; one of its series is 1, or none
# Answers by path and status, of vLLM's HTTP server. Its KV events report an emptied cache only with
# the engine's next step.
HTTP_REQUESTS = "http_requests"
# The start of the answering process, as clients of Prometheus report it; seconds since the epoch.
PROCESS_START = "process_start_time_seconds"
EMPTYING = ("/reset_prefix_cache", "/sleep", "/pause", "/release_kv_cache_memory")

_RANK = "engine"  # the label
_WANTED = (
    *(
        RUNNING,
        WAITING,
        KV_USAGE,
        KV_USAGE_OLD,
        CACHE_CONFIG,
        SLEEP_STATE,
        HTTP_REQUESTS,
        LORA_INFO,
    ),
    *(PREFIX_QUERIES, PREFIX_HITS, PREFIX_QUERIES_OLD, PREFIX_HITS_OLD),
    *(NIXL_EXPIRED, NIXL_LATE, NIXL_FAILED),
)


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of one engine process; a figure that its metrics do not have is None."""

    running: int  # requests in the batch
    waiting: int  # requests not admitted yet
    kv_usage: float | None = None  # 0..1 of the KV blocks in use
    block_size: int | None = None  # tokens a block
    num_gpu_blocks: int | None = None
    prefix_query_tokens: int | None = None  # since start
    prefix_hit_tokens: int | None = None  # since start
    model_name: str | None = None
    asleep: bool = False  # its weights are put away; it answers health probes all the same
    paused: bool = False  # sleeps at level 0: it has all it had
    emptied: int = 0  # times that a request which empties the cache succeeded
    kv_expired: int = 0  # requests whose KV was freed before another worker had fetched it
    # Of these, requests whose KV was fetched all the same: the answers may be wrong.
    kv_late: int = 0
    kv_failed: int = 0  # transfers that failed
    adapters: frozenset[str] | None = None  # LoRA adapters in use; None: it serves none
    caches_prefixes: bool = True  # False: it says that its prefix caching is off

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Number of tokens that the whole KV cache holds."""
        if self.block_size is None or self.num_gpu_blocks is None:
            return None
        return self.block_size * self.num_gpu_blocks


_START = re.compile(PROCESS_START + r"(?:\{[^\n]*\})?[ \t]+([0-9][0-9.eE+]{0,40})(?=\s|$)")


def process_start_s(text: str) -> float:
    """Return the start time of the process that a page of metrics describes, in seconds since the
    epoch. NaN if the page does not have it, or has several.
    """
    found = set()
    at = text.find(PROCESS_START)
    while at >= 0:
        if (at == 0 or text[at - 1] == "\n") and (match := _START.match(text, at)):
            with suppress(ValueError):
                found.add(float(match[1]))
        at = text.find(PROCESS_START, at + 1)
    return found.pop() if len(found) == 1 else math.nan


def parse_load(text: str) -> EngineLoad:
    """Return the load in Prometheus text, summed over ranks. Raises WireError with the bad line."""
    return _load_of(list(samples(text, _WANTED)))


def parse_loads(text: str) -> dict[int, EngineLoad]:
    """Return the load of each rank, at least one. A series without a rank counts for every rank.
    Raises WireError for bad text, or if a rank lacks its number of requests.
    """
    by_rank: dict[int, list[Sample]] = {}
    of_all: list[Sample] = []
    for sample in samples(text, _WANTED):
        rank = label_rank(sample, _RANK)
        (of_all if rank is None else by_rank.setdefault(rank, [])).append(sample)
    return {rank: _load_of([*own, *of_all]) for rank, own in (by_rank or {0: []}).items()}


def _load_of(found: Iterable[Sample]) -> EngineLoad:
    values: dict[str, list[float]] = {}
    model_name: str | None = None
    block_size: int | None = None
    blocks = 0
    caches_prefixes = True
    states: dict[str, bool] = {}
    emptied = 0
    lora: Sample | None = None
    for sample in found:
        if sample.name == CACHE_CONFIG:
            block_size = label_count(sample, "block_size") or block_size
            blocks += label_count(sample, "num_gpu_blocks") or 0
            caches_prefixes &= sample.labels.get("enable_prefix_caching") != "False"
        elif sample.name == SLEEP_STATE:
            state = sample.labels.get("sleep_state", "")
            states[state] = states.get(state, False) or sample.value == 1
        elif sample.name == LORA_INFO:
            lora = sample if lora is None or sample.value >= lora.value else lora
        elif sample.name == HTTP_REQUESTS:
            done = sample.labels.get("status", "").startswith("2")
            emptied += int(sample.value) if done and sample.labels.get("handler") in EMPTYING else 0
        else:
            values.setdefault(sample.name, []).append(sample.value)
            model_name = model_name or sample.labels.get("model_name")
    if RUNNING not in values or WAITING not in values:
        raise WireError(f"metrics without {RUNNING} and {WAITING}: not a vLLM-like engine")
    usage = values.get(KV_USAGE) or values.get(KV_USAGE_OLD)
    return EngineLoad(
        running=int(sum(values[RUNNING])),
        waiting=int(sum(values[WAITING])),
        kv_usage=sum(usage) / len(usage) if usage else None,
        block_size=block_size,
        num_gpu_blocks=blocks or None,
        prefix_query_tokens=_total(values, PREFIX_QUERIES, PREFIX_QUERIES_OLD),
        prefix_hit_tokens=_total(values, PREFIX_HITS, PREFIX_HITS_OLD),
        model_name=model_name,
        asleep=not states.get("awake") and any(states.values()),
        paused=states.get("awake") is False and not any(states.values()),
        emptied=emptied,
        kv_expired=_total(values, NIXL_EXPIRED) or 0,
        kv_late=_total(values, NIXL_LATE) or 0,
        kv_failed=_total(values, NIXL_FAILED) or 0,
        adapters=None if lora is None else _adapters_in(lora),
        caches_prefixes=caches_prefixes,
    )


def _adapters_in(sample: Sample) -> frozenset[str]:
    named = ",".join(sample.labels.get(label, "") for label in _IN_USE)
    return frozenset(name for part in named.split(",") if (name := part.strip()))


def _total(values: dict[str, list[float]], name: str, old: str = "") -> int | None:
    series = values.get(name) or values.get(old)
    return None if series is None else int(sum(series))
