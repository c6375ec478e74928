"""Tests of workers discovered from EndpointSlices, with an API server's events in order and out of
order.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.discovery import kubernetes_watch
from router.discovery.kubernetes_source import KubernetesSource, Slice, slices_of, workers_of
from router.discovery.kubernetes_watch import MISSING, Objects, TooOldError, WatchError
from router.discovery.source import KubernetesSpec, parse_source
from router.fleet.sources import Report
from tests.router.discovery.kubernetes_server import (
    ApiServer,
    api_server,
    bookmark,
    endpoint,
    endpoint_slice,
    event,
    hosts,
    terminating,
    too_old,
)


def spec(text: str = "kubernetes:llm/vllm") -> KubernetesSpec:
    parsed = parse_source(text)
    assert isinstance(parsed, KubernetesSpec)
    return parsed


def slices_in(data: bytes) -> Objects[Slice]:
    resource = slices_of(spec())
    listed = resource.decode_list(data)
    return Objects(resource, listed.metadata.resource_version, listed.items or ())


def serving_hosts(report: Report) -> list[str]:
    assert report.workers is not None, report.trouble
    return hosts(one.spec.url for one in report.workers if not one.stopping)


def stopping_hosts(report: Report) -> list[str]:
    assert report.workers is not None
    return hosts(one.spec.url for one in report.workers if one.stopping)


def report_of(*slices: dict[str, Any], text: str = "kubernetes:llm/vllm") -> Report:
    by_name = {one["metadata"]["name"]: msgspec.convert(one, Slice) for one in slices}
    return workers_of(by_name, spec(text))


def test_endpoint_conditions_decide_which_workers_serve_and_which_stop() -> None:
    report = report_of(
        endpoint_slice(
            "a",
            1,
            endpoint("10.0.0.1"),
            endpoint("10.0.0.2", ready=False, serving=False),
            terminating("10.0.0.3"),
            endpoint("10.0.0.4", ready=None, serving=None, terminating=None),
            {"addresses": ["10.0.0.5"]},
            endpoint("10.0.0.6", ready=False, serving=False, terminating=True),
        )
    )
    assert serving_hosts(report) == ["10.0.0.1:8000", "10.0.0.4:8000", "10.0.0.5:8000"]
    assert stopping_hosts(report) == ["10.0.0.3:8000", "10.0.0.6:8000"]


def test_for_an_address_in_two_slices_the_best_condition_counts() -> None:
    for first, second in (("a", "b"), ("b", "a")):
        report = report_of(
            endpoint_slice(first, 1, terminating("10.0.0.1"), endpoint("10.0.0.2")),
            endpoint_slice(second, 1, endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)),
        )
        assert serving_hosts(report) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert stopping_hosts(report) == []


def test_ports_are_selected_by_name() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "metrics", "port": 9, "protocol": "TCP"}]
    one = endpoint_slice("a", 1, endpoint("10.0.0.1"), ports=ports)
    assert serving_hosts(report_of(one, text="kubernetes:llm/vllm:http")) == ["10.0.0.1:80"]
    assert report_of(one).refused == (
        "slice 'a': wanted: one of these behind the service: SERVICE:PORTNAME; "
        "its TCP ports: 'http', 'metrics'",
    )
    assert "wanted: 'nope'" in report_of(one, text="kubernetes:llm/vllm:nope").refused[0]
    udp = endpoint_slice("a", 1, endpoint("10.0.0.1"), ports=[{"port": 53, "protocol": "UDP"}])
    assert serving_hosts(report_of(udp)) == []


def test_ipv4_and_ipv6_addresses_are_taken_and_others_refused() -> None:
    six = endpoint_slice("six", 1, endpoint("fd00::1"), kind="IPv6")
    report = report_of(
        six, endpoint_slice("four", 1, endpoint("10.0.0.1")), endpoint_slice("empty", 1)
    )
    assert serving_hosts(report) == ["10.0.0.1:8000", "[fd00::1]:8000"]
    report = report_of(six, endpoint_slice("x", 1, endpoint("a.b"), kind="FQDN"))
    assert report.refused == ("slice 'x': addresses of type 'FQDN'; known: IPv4, IPv6",)
    report = report_of(endpoint_slice("x", 1, endpoint("10.0.0.1 evil"), endpoint("10.0.0.2")))
    assert serving_hosts(report) == ["10.0.0.2:8000"]
    assert "10.0.0.1 evil" in report.refused[0]


def test_https_workers_have_the_services_name_as_server_name() -> None:
    report = report_of(
        endpoint_slice("a", 1, endpoint("10.0.0.1")), text="kubernetes:llm/vllm,scheme=https"
    )
    assert report.workers is not None
    assert report.workers[0].spec.server_name == "vllm.llm.svc"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_an_invalid_list_or_event_is_refused(data: bytes) -> None:
    with pytest.raises(WatchError):
        slices_in(data)
    with pytest.raises(WatchError):
        slices_in(b'{"metadata":{}}').apply(data)


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"metadata":{},"items":[{"endpoints":3}]}', b'{"items":[]}', b"null"],
)
def test_an_invalid_list_is_refused(data: bytes) -> None:
    with pytest.raises(WatchError):
        slices_in(data)


_ADDRESSES = [f"10.0.0.{n}" for n in range(4)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]),
            st.sampled_from("abc"),
            st.lists(st.sampled_from(_ADDRESSES), max_size=3),
        ),
        max_size=30,
    )
)
def test_events_lead_to_the_same_slices_as_a_fresh_list(history) -> None:
    slices = slices_in(b'{"metadata":{"resourceVersion":"1"}}')
    truth: dict[str, dict[str, Any]] = {}
    for version, (kind, name, addresses) in enumerate(history, 2):
        one = endpoint_slice(name, version, *map(endpoint, addresses))
        if kind == "BOOKMARK":
            assert not slices.apply(bookmark(version))
        else:
            assert slices.apply(event(kind, one))
            truth.pop(name, None)
            if kind != "DELETED":
                truth[name] = one
        assert slices.version == str(version)
    assert set(serving_hosts(workers_of(slices.by_name, spec()))) == set(
        serving_hosts(report_of(*truth.values()))
    )


def test_an_expired_version_is_distinguished_from_other_errors() -> None:
    slices = slices_in(b'{"metadata":{}}')
    with pytest.raises(TooOldError):
        slices.apply(too_old())
    with pytest.raises(WatchError, match="500 Internal"):
        slices.apply(event("ERROR", {"code": 500, "reason": "Internal"}))


@asynccontextmanager
async def followed_service(server: ApiServer) -> AsyncIterator[AsyncIterator[Report]]:
    """Yield the reports of a source at that server; each must come within ten seconds."""
    from kubernetes_asyncio.client import ApiClient, Configuration

    async def connect() -> ApiClient:
        return ApiClient(Configuration(host=server.url))

    reports = KubernetesSource(spec(), connect).reports()

    async def told() -> AsyncIterator[Report]:
        while True:
            yield await asyncio.wait_for(anext(reports), 10.0)

    try:
        yield told()
    finally:
        await reports.aclose()  # type: ignore[attr-defined]


async def test_workers_of_a_service_are_added_stopped_and_removed() -> None:
    async with api_server() as server, followed_service(server) as told:
        server.set_next_list(10, endpoint_slice("a", 9, endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        assert serving_hosts(await anext(told)) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        watch = server.watch(0)
        one = endpoint_slice("a", 11, terminating("10.0.0.1"), endpoint("10.0.0.2"))
        watch.send(event("MODIFIED", one))
        report = await anext(told)
        assert (serving_hosts(report), stopping_hosts(report)) == (
            ["10.0.0.2:8000"],
            ["10.0.0.1:8000"],
        )
        watch.send(event("ADDED", endpoint_slice("b", 12, endpoint("10.0.0.3"))), bookmark(40))
        assert serving_hosts(await anext(told)) == ["10.0.0.2:8000", "10.0.0.3:8000"]
        watch.end()  # by the server's timeout: begun anew from the bookmark, without a list
        server.watch(1).send(event("DELETED", endpoint_slice("a", 41)))
        assert serving_hosts(await anext(told)) == ["10.0.0.3:8000"]
        assert server.watched == ["10", "40"]
        assert len(server.asked) == 3
        assert server.asked[1]["allowWatchBookmarks"] in ("true", "True")


async def test_an_expired_version_means_a_new_list() -> None:
    async with api_server() as server, followed_service(server) as told:
        server.set_next_list(10, endpoint_slice("a", 9, endpoint("10.0.0.1")))
        assert serving_hosts(await anext(told)) == ["10.0.0.1:8000"]
        server.lists.clear()
        server.set_next_list(90, endpoint_slice("b", 80, endpoint("10.0.0.2")))
        server.watch(0).send(too_old())
        assert serving_hosts(await anext(told)) == ["10.0.0.2:8000"]
        server.watch(1).send(event("MODIFIED", endpoint_slice("b", 91)))
        assert serving_hosts(await anext(told)) == []
        assert server.watched == ["10", "90"]


@pytest.mark.parametrize("trouble", ["garbage", "error"])
async def test_an_error_in_a_watch_is_reported_and_a_new_list_follows(trouble: str) -> None:
    async with api_server() as server, followed_service(server) as told:
        server.set_next_list(10, endpoint_slice("a", 9, endpoint("10.0.0.1")))
        await anext(told)
        watch = server.watch(0)
        if trouble == "garbage":
            watch.send(b"<html>proxy</html>\n")
        else:
            watch.send(event("ERROR", {"code": 500, "reason": "InternalError"}))
        report = await anext(told)
        assert report.workers is None
        assert report.trouble.startswith("Kubernetes API: ")
        server.lists.clear()
        server.set_next_list(20, endpoint_slice("a", 19, endpoint("10.0.0.9")))
        assert serving_hosts(await anext(told)) == ["10.0.0.9:8000"]


async def test_a_broken_watch_resumes_at_its_last_version() -> None:
    async with api_server() as server, followed_service(server) as told:
        server.set_next_list(10, endpoint_slice("a", 9, endpoint("10.0.0.1")))
        await anext(told)
        server.watch(0).send(bookmark(30))
        server.watch(0).break_off()
        assert (await anext(told)).workers is None
        assert serving_hosts(await anext(told)) == ["10.0.0.1:8000"]
        server.watch(1).send(event("ADDED", endpoint_slice("b", 31, endpoint("10.0.0.2"))))
        assert serving_hosts(await anext(told)) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert server.watched == ["10", "30"]
        assert len(server.asked) == 3


async def test_missing_rights_and_a_failing_api_server_are_reported() -> None:
    async with api_server() as server, followed_service(server) as told:
        server.status = 403
        assert "may not list and watch endpointslices" in (await anext(told)).trouble
        server.status = 503
        assert (await anext(told)).trouble == "Kubernetes API: it answers 503"
        server.status, server.lists = 200, type(server.lists)([b"[]"])
        assert "no list of endpointslices" in (await anext(told)).trouble
        server.set_next_list(3, endpoint_slice("a", 2, endpoint("10.0.0.1")))
        report = await anext(told)
        while report.workers is None:
            report = await anext(told)
        assert serving_hosts(report) == ["10.0.0.1:8000"]


async def test_a_slow_or_too_long_list_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "_ANSWER_S", 0.05)
    monkeypatch.setattr(kubernetes_watch, "_MAX_LIST_BYTES", 1_000)
    async with api_server() as server, followed_service(server) as told:
        server.lists.append(b"x" * 2_000)
        assert "a list of more than 1000 bytes" in (await anext(told)).trouble
    reader = await asyncio.start_server(lambda r, w: asyncio.Event().wait(), "127.0.0.1", 0)
    slow = ApiServer(f"http://127.0.0.1:{reader.sockets[0].getsockname()[1]}")
    async with followed_service(slow) as told:
        assert (await anext(told)).trouble == "Kubernetes API: TimeoutError"
    reader.close()


async def test_an_event_above_the_size_limit_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "_MAX_LINE_BYTES", 500)
    async with api_server() as server, followed_service(server) as told:
        server.set_next_list(10, endpoint_slice("a", 9, endpoint("10.0.0.1")))
        await anext(told)
        server.watch(0).send(json.dumps({"x": "y" * 2_000}).encode())
        assert "an event of more than 500 bytes" in (await anext(told)).trouble


async def test_without_the_library_the_error_has_the_line_that_installs_it(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kubernetes_asyncio")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    reports = KubernetesSource(spec()).reports()
    report = await anext(reports)
    assert report == Report(None, f"Kubernetes API: {MISSING}")
    await reports.aclose()  # type: ignore[attr-defined]


async def test_without_a_cluster_the_source_reports_an_error(monkeypatch, tmp_path) -> None:
    from kubernetes_asyncio.config import kube_config

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    reports = KubernetesSource(spec()).reports()
    report = await anext(reports)
    assert report.workers is None
    assert report.trouble.startswith("Kubernetes API: ConfigException")
    await reports.aclose()  # type: ignore[attr-defined]
