"""Tests of the event endpoints of ranks, and of endpoints to which ZMQ can connect or which it can
bind.
"""

from __future__ import annotations

import pytest

from router.events.sources import (
    NO_OTHERS,
    PollSource,
    ZmqSource,
    at_rank,
    event_hosts,
    reachable,
    usable,
)


def test_rank_0_has_the_unchanged_source() -> None:
    source = ZmqSource("ipc:///tmp/a", "tcp://h:5558", "http://h/kv_snapshot", "t")
    assert at_rank(source, 0) == source


@pytest.mark.parametrize(
    ("endpoint", "ranked"),
    [
        ("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5560"),
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::1]:5557", "tcp://[::1]:5560"),
        ("inproc://cache", "inproc://cache_dp3"),
        ("ipc:///run/kv", "ipc:///run/kv_dp3"),
    ],
)
def test_ranks_count_up_ports_or_append_to_names(endpoint: str, ranked: str) -> None:
    source = ZmqSource(endpoint, endpoint, "http://h/kv_snapshot", "topic", bind=True)
    assert at_rank(source, 3) == ZmqSource(
        ranked, ranked, "http://h/kv_snapshot", "topic", bind=True
    )


def test_a_polled_source_filters_by_its_rank() -> None:
    source = PollSource("http://h/kv_cache_events")
    assert at_rank(source, 2) == PollSource("http://h/kv_cache_events", rank=2)


@pytest.mark.parametrize(
    ("source", "rank", "words"),
    [
        (ZmqSource("tcp://h:5557"), -1, "allowed: 0"),
        (PollSource("http://h"), 4_096, "allowed: 0"),
        (ZmqSource("tcp://h:65535"), 1, "no port 65536"),
        (ZmqSource("tcp://h:5557", "tcp://h:65000"), 900, "no port 65900"),
        (ZmqSource("tcp://h"), 1, "no tcp://host:port"),
        (ZmqSource("tcp://h:x"), 1, "no tcp://host:port"),
        (ZmqSource("tcp://h:²"), 1, "no tcp://host:port"),
        (ZmqSource("pgm://h:5557"), 1, "no tcp://host:port"),
    ],
)
def test_ranks_without_a_valid_endpoint_are_refused(
    source: ZmqSource | PollSource, rank: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        at_rank(source, rank)


def test_only_endpoints_that_can_be_connected_to_or_bound_are_usable() -> None:
    for endpoint in ("tcp://h:1", "tcp://[::1]:65535", "ipc:///run/kv"):
        assert usable(endpoint)
        assert usable(endpoint, bind=True)
    assert not usable("tcp://*:5557")
    assert usable("tcp://*:5557", bind=True)
    for endpoint in ("", "tcp://h", "tcp://h:0", "tcp://h:65536", "udp://h:1", "tcp://h:1/x"):
        assert not usable(endpoint)
        assert not usable(endpoint, bind=True)


@pytest.mark.parametrize("bound", ["*", "0.0.0.0", "[::]", "::"])
def test_a_wildcard_endpoint_is_reached_at_the_workers_host(bound: str) -> None:
    assert reachable(f"tcp://{bound}:5557", "10.0.0.5") == "tcp://10.0.0.5:5557"
    assert reachable(f"tcp://{bound}:5557", "fd00::1") == "tcp://[fd00::1]:5557"


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.9:5557", "ipc:///run/kv", "tcp://[::1]:5557"])
def test_endpoints_without_a_wildcard_stay_unchanged(endpoint: str) -> None:
    assert reachable(endpoint, "10.0.0.5") == endpoint


@pytest.mark.parametrize(
    ("allowed", "endpoint", "whether"),
    [
        ((), "tcp://10.0.0.5:5557", True),
        ((), "tcp://ENGINE:5557", True),
        ((), "tcp://[fd00::5]:5557", True),
        ((), "tcp://10.0.0.6:5557", False),
        ((), "tcp://other:5557", False),
        ((), "ipc:///run/docker.sock", False),
        (("10.0.0.0/24",), "tcp://10.0.0.6:5557", True),
        (("10.0.0.0/24",), "tcp://10.0.1.6:5557", False),
        (("fd00::/16",), "tcp://[fd00::6]:5557", True),
        (("10.0.0.6",), "tcp://10.0.0.6:5557", True),
        (("Other.local", "10.0.0.0/8"), "tcp://other.LOCAL:5557", True),
        (("engine-2",), "tcp://engine-2:5557", True),
        (("other.local",), "tcp://another.local:5557", False),
        (("ipc",), "ipc:///run/kv", True),
        (("ipc",), "tcp://10.0.0.6:5557", False),
        (("*",), "tcp://10.0.0.6:5557", True),
        (("*",), "ipc:///run/kv", False),
        (("*", "ipc"), "bind:tcp://*:5557", False),
    ],
)
def test_event_endpoints_may_use_the_engines_host_and_allowed_hosts(
    allowed: tuple[str, ...], endpoint: str, whether: bool
) -> None:
    own = {"10.0.0.5", "engine", "fd00::5"}
    assert event_hosts(allowed).allow(endpoint, own) == whether
    assert NO_OTHERS.allow(endpoint, own) <= whether


@pytest.mark.parametrize("host", ["", "a b", "tcp://h:1", "h:5557", "10.0.0.1/8", "1.2.3", "-h"])
def test_an_invalid_event_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is no host; allowed: NAME, ADDRESS, CIDR, ipc"):
        event_hosts((host,))
