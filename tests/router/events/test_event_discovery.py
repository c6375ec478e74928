"""Tests of engines' answers about their event endpoints: vLLM's and SGLang's, valid and invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.wire.events import WireError
from router.events.sources import RankedSources, ZmqSource, kv_event_sources, server_info_sources

HOST = "10.0.0.5"


def vllm(answer: object) -> RankedSources:
    return kv_event_sources(json.dumps(answer).encode(), HOST)


def sglang(**announced: Any) -> RankedSources:
    known = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": ""}
    body = {"page_size": 16, "kv_events": known | announced}
    return server_info_sources(json.dumps(body).encode(), HOST)


def test_vllm_reports_the_event_sources_of_each_rank() -> None:
    shared = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 10000}
    answer = {
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5600", "topic": "kv"},
        "1": {"endpoint": "tcp://10.9.9.9:40001", "replay_endpoint": None},
    }
    found = vllm({rank: shared | config for rank, config in answer.items()})
    assert found == RankedSources(
        {
            0: ZmqSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5600", topic="kv"),
            1: ZmqSource("tcp://10.9.9.9:40001"),
        },
        ranks=2,
    )


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"0": None},
        {"0": {"endpoint": "tcp://*:5557", "publisher": "null"}},
        {"0": {"endpoint": "tcp://*:5557", "enable_kv_cache_events": False}},
    ],
)
def test_vllm_without_a_publisher_has_no_events(answer: object) -> None:
    assert vllm(answer) == RankedSources({})


def test_a_rank_with_an_unreachable_endpoint_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    found = vllm({"0": {"endpoint": "inproc://kv"}, "1": {"endpoint": "tcp://*:5558"}})
    assert found.by_rank.keys() == {1}
    assert found.ranks == 2
    assert "inproc://kv" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "truncated"),
        (b"\xff\xff", "malformed|invalid"),
        (b"[" * 100_000, "kv_event_sources"),
        (b"[]", "Expected `object`"),
        (b'{"0": {}}', "endpoint"),
        (b'{"0": {"endpoint": 5}}', "Expected `str`"),
        (b'{"x": {"endpoint": "tcp://*:1"}}', "rank 'x'; allowed: 0..4095"),
        (b'{"-1": null}', "rank '-1'"),
        (b'{"4096": null}', "rank '4096'"),
        ('{"²": null}'.encode(), "rank"),
        (json.dumps({"0": {"endpoint": "tcp://" + "h" * 2_000}}).encode(), "length"),
    ],
)
def test_an_invalid_answer_of_vllm_gives_the_reason(body: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        kv_event_sources(body, HOST)


def test_sglang_counts_ports_up_from_rank_0() -> None:
    found = sglang(dp_size=2, block_size=64, topic="kv", replay_endpoint_port_base=5600)
    assert found == RankedSources(
        {
            0: ZmqSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5600", topic="kv"),
            1: ZmqSource("tcp://10.0.0.5:5558", "tcp://10.0.0.5:5601", topic="kv"),
        },
        ranks=2,
        block_size=64,
    )


@pytest.mark.parametrize(
    ("named", "live"),
    [
        ("0.0.0.0", "tcp://10.0.0.5:5557"),
        ("::", "tcp://10.0.0.5:5557"),
        ("", "tcp://10.0.0.5:5557"),
        ("10.9.9.9", "tcp://10.9.9.9:5557"),
        ("fd00::9", "tcp://[fd00::9]:5557"),
        ("[fd00::9]", "tcp://[fd00::9]:5557"),
    ],
)
def test_sglangs_wildcard_is_replaced_by_the_workers_host(named: str, live: str) -> None:
    assert sglang(endpoint_host=named).by_rank == {0: ZmqSource(live)}


@pytest.mark.parametrize("body", [b"{}", b'{"kv_events": null}', b'{"page_size": 1}'])
def test_an_sglang_without_event_fields_has_no_events(body: bytes) -> None:
    assert server_info_sources(body, HOST) == RankedSources({})


def test_an_sglang_with_the_null_publisher_still_reports_its_ranks() -> None:
    assert sglang(publisher="null", dp_size=4) == RankedSources({}, ranks=4)


@pytest.mark.parametrize(
    ("announced", "words"),
    [
        ({"endpoint_port_base": 0}, "endpoint_port_base"),
        ({"endpoint_port_base": "5557"}, "endpoint_port_base"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": 5_000}, "dp_size"),
        ({"dp_size": 2, "endpoint_port_base": 65_535}, "no port 65536"),
        ({"block_size": 0}, "block_size"),
        ({"endpoint_host": None}, "endpoint_host"),
        ({"replay_endpoint_port_base": 70_000}, "replay_endpoint_port_base"),
    ],
)
def test_an_invalid_answer_of_sglang_gives_the_reason(
    announced: dict[str, Any], words: str
) -> None:
    with pytest.raises(WireError, match=words):
        sglang(**announced)
