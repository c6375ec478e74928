"""Tests of reading load figures from Prometheus text, and of the seeds of block hash chains."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.events import WireError
from engine.wire.metrics import EngineLoad, parse_load, parse_loads
from kvkernels import chain_seed

TWO_RANKS = """\
# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m \\"q\\" {x}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0 1700000000000
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1e+06
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250000.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="50",engine="1"} 1.0
process_cpu_seconds_total nonsense
"""
LEAST = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"


def test_loads_of_ranks_are_added_up() -> None:
    load = parse_load(TWO_RANKS)
    assert load == EngineLoad(
        running=5,
        waiting=1,
        kv_usage=0.375,
        block_size=16,
        num_gpu_blocks=150,
        prefix_query_tokens=1_000_000,
        prefix_hit_tokens=250_000,
        model_name='m "q" {x}',
    )
    assert load.kv_capacity_tokens == 2400


def test_the_load_of_each_rank_is_read() -> None:
    loads = parse_loads(TWO_RANKS)
    assert sorted(loads) == [0, 1]
    assert (loads[0].running, loads[1].running) == (3, 2)
    assert (loads[0].kv_usage, loads[1].kv_usage) == (0.5, 0.25)
    assert (loads[0].kv_capacity_tokens, loads[1].kv_capacity_tokens) == (1600, 800)
    assert (loads[0].prefix_query_tokens, loads[1].prefix_query_tokens) == (1_000_000, None)


def test_a_series_without_a_rank_applies_to_every_rank() -> None:
    config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    requests = TWO_RANKS[: TWO_RANKS.index("vllm:kv_cache_usage")]
    loads = parse_loads(requests + config)
    assert [load.kv_capacity_tokens for load in loads.values()] == [1600, 1600]
    assert parse_loads(LEAST + config) == {0: parse_load(LEAST + config)}


def test_the_prefix_caching_setting_is_read() -> None:
    config = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="%s"} 1\n'
    assert not parse_load(LEAST + config % "False").caches_prefixes
    assert parse_load(LEAST + config % "True").caches_prefixes
    assert parse_load(LEAST).caches_prefixes


def test_the_sleep_state_is_read() -> None:
    state = 'vllm:engine_sleep_state{engine="0",sleep_state="%s"} %d\n'
    for awake in (1, 0):
        text = state % ("awake", awake) + state % ("weights_offloaded", 1 - awake)
        assert parse_load(LEAST + text).asleep is not bool(awake)


def test_adapters_in_use_are_those_of_the_latest_series() -> None:
    labels = 'max_lora="4",running_lora_adapters="%s",waiting_lora_adapters="%s"'
    series = f"vllm:lora_requests_info{{{labels}}} %s\n"
    old, new = series % ("a,b", "c", "1.7e+09"), series % ("b", " d,b,", "1.8e+09")
    for text in (old + new, new + old):
        assert parse_load(LEAST + text).adapters == {"b", "d"}
    assert parse_load(LEAST + series % ("", "", "1")).adapters == frozenset()
    assert parse_load(LEAST).adapters is None


def test_old_metric_names_are_read() -> None:
    load = parse_load(
        LEAST
        + "vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_queries_total 10\n"
        + "vllm:gpu_prefix_cache_hits_total 4\n"
    )
    assert (load.kv_usage, load.prefix_query_tokens, load.prefix_hit_tokens) == (0.5, 10, 4)


def test_missing_metrics_are_none() -> None:
    load = parse_load(LEAST)
    assert load == EngineLoad(running=1, waiting=2)
    assert load.kv_capacity_tokens is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a vLLM-like engine"),
        ("<html>busy</html>", "not a vLLM-like engine"),
        ("vllm:num_requests_running{x 1\n", "line 1"),
        ("vllm:num_requests_running\n", "line 1"),
        (LEAST + "vllm:kv_cache_usage_perc abc\n", "line 3"),
        (LEAST + "vllm:kv_cache_usage_perc NaN\n", "line 3"),
        (LEAST + "vllm:kv_cache_usage_perc -1\n", "line 3"),
        (LEAST + 'vllm:cache_config_info{block_size="-4"} 1\n', "line 3"),
    ],
)
def test_the_error_names_the_line_of_garbage(text: str, message: str) -> None:
    for parse in (parse_load, parse_loads):
        with pytest.raises(WireError, match=message):
            parse(text)


def test_an_invalid_rank_is_refused() -> None:
    with pytest.raises(WireError, match=r"line 1: rank 4096; allowed: 0\.\.4095"):
        parse_loads('vllm:num_requests_running{engine="4096"} 1\n')


@given(st.text(alphabet='vllm:num_requests_running{}="\\ 1.\n', max_size=120))
def test_random_text_raises_only_wire_errors(text: str) -> None:
    with contextlib.suppress(WireError):
        parse_load(LEAST + text)
    with contextlib.suppress(WireError):
        parse_loads(LEAST + text)


def test_chain_seeds_depend_on_adapter_and_salt() -> None:
    assert chain_seed("m") == 0
    assert chain_seed("m", "", "") == 0
    canonical = b"\x93\xa1m\xc0\xa6tenant"
    assert msgspec.msgpack.encode(["m", None, "tenant"]) == canonical
    assert chain_seed("m", None, "tenant") == xxhash.xxh3_64_intdigest(canonical)
    assert len({chain_seed("m", lora, salt) for lora in ("a", None) for salt in ("a", None)}) == 4
