"""Tests of workers discovered from an InferencePool and its pods, with all kinds of interruptions
of the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.discovery import kubernetes_watch
from router.discovery.kubernetes_source import (
    InferencePool,
    InferencePoolSource,
    Pod,
    PoolTerms,
    objectives_of,
    pods_of,
    pools_of,
    priorities_in,
    terms_of,
    workers_in,
)
from router.discovery.kubernetes_watch import Objects, TooOldError, WatchError
from router.engines.spec import WorkerSpec
from router.fleet.sources import Report
from tests.router.discovery.kubernetes_api import KubernetesApi, pod, pool
from tests.router.discovery.kubernetes_server import hosts
from tests.router.discovery.pool_following import (
    MINE,
    FollowedPool,
    followed_pool,
    serving_hosts,
    spec,
)

OTHERS = {"app": "sglang"}


def terms(*ports: int) -> PoolTerms:
    return PoolTerms("app=vllm", ports or (8000,))


def report_of(*pods: dict[str, Any], of: PoolTerms | None = None, text: str = "") -> Report:
    by_name = {one["metadata"]["name"]: msgspec.convert(one, Pod) for one in pods}
    return workers_in(by_name, of or terms(), spec(f"inferencepool:llm/chat{text}"))[0]


def stopping_hosts(report: Report) -> list[str]:
    assert report.workers is not None, report.trouble
    return hosts(one.spec.url for one in report.workers if one.stopping)


def only_worker(report: Report) -> WorkerSpec:
    assert report.workers is not None
    (one,) = report.workers
    return one.spec


def test_a_pod_is_a_worker_from_its_readiness_to_its_deletion() -> None:
    report = report_of(
        pod("ready", "10.0.0.1", MINE),
        pod("starting", "10.0.0.2", MINE, ready=False),
        pod("pending", None, MINE),
        pod("leaving", "10.0.0.4", MINE, deleted=True),
        pod("leaving too", "10.0.0.5", MINE, ready=False, deleted=True),
        {"metadata": {"name": "bare"}, "status": {"podIP": "10.0.0.6"}},
        {"metadata": {"name": "null"}, "status": {"podIP": None, "conditions": None}},
        pod("six", "fd00::1", MINE),
    )
    assert serving_hosts(report) == ["10.0.0.1:8000", "[fd00::1]:8000"]
    assert stopping_hosts(report) == ["10.0.0.4:8000", "10.0.0.5:8000"]


def test_each_target_port_is_a_worker_unless_a_pod_limits_its_active_ports() -> None:
    new, old = "llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"
    report = report_of(
        pod("a", "10.0.0.1", MINE),
        pod("b", "10.0.0.2", MINE, notes={old: "8001, 9999,x"}),
        pod("c", "10.0.0.3", MINE, notes={new: "8000", old: "8001"}),
        pod("d", "10.0.0.4", MINE, notes={new: ""}),
        of=terms(8000, 8001),
    )
    assert serving_hosts(report) == [
        "10.0.0.1:8000",
        "10.0.0.1:8001",
        "10.0.0.2:8001",
        "10.0.0.3:8000",
    ]


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("prefill-decode", "both"),
        ("both", "both"),
        ("encode-prefill", "prefill"),
    ],
)
def test_the_role_comes_from_the_llm_d_label(label: str, role: str) -> None:
    assert (
        only_worker(report_of(pod("a", "10.0.0.1", MINE | {"llm-d.ai/role": label}))).role == role
    )


def test_a_pod_annotation_sets_options_and_event_ports_count_up_by_port() -> None:
    note = {"warmroute.io/worker": "kind=vllm,weight=2,events=tcp://*:5557,replay=tcp://*:5657"}
    one = report_of(pod("a", "10.0.0.1", MINE, notes=note), of=terms(8000, 8001), text=",weight=3")
    first, second = one.workers or ()
    assert (first.spec.kind, first.spec.weight, first.spec.rank) == ("vllm", 2.0, None)
    assert (first.spec.events, first.spec.replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")
    assert (second.spec.events, second.spec.replay) == (
        "tcp://10.0.0.1:5558",
        "tcp://10.0.0.1:5658",
    )
    six = only_worker(report_of(pod("a", "fd00::1", MINE, notes=note)))
    assert (six.url, six.events) == ("http://[fd00::1]:8000", "tcp://[fd00::1]:5557")


@pytest.mark.parametrize(
    ("note", "says"),
    [
        ("wieght=2", "did you mean weight?"),
        ("weight=1000", "weight is 1000; allowed: 0.01..100"),
        ("events=tcp://10.0.0.9:5557", "events is at its own pod"),
        ("events=bind:tcp://*:5557", "events is at its own pod"),
        ("events=ipc://x", "events is at its own pod"),
        ("metrics=http://10.0.0.9/", "has metrics; allowed:"),
        ("insecure=true", "insecure are for https"),
        ("url=http://10.0.0.9", "url is given twice"),
        ("nonsense", "is not key=value"),
        ("x" * 5_000, "longer than 4096 characters"),
    ],
)
def test_a_pod_with_an_invalid_annotation_is_left_out_and_reported(note, says) -> None:
    bad = pod("bad", "10.0.0.1", MINE, notes={"warmroute.io/worker": note})
    report = report_of(bad, pod("good", "10.0.0.2", MINE))
    assert serving_hosts(report) == ["10.0.0.2:8000"]
    (refused,) = report.refused
    assert refused.startswith("pod 'bad': ")
    assert says in refused


def test_an_unknown_role_and_an_invalid_address_are_reported() -> None:
    report = report_of(
        pod("a", "10.0.0.1", MINE | {"llm-d.ai/role": "encode"}), pod("b", "evil,x=1", MINE)
    )
    assert serving_hosts(report) == []
    assert "llm-d.ai/role is 'encode'" in report.refused[0]
    assert "pod 'b'" in report.refused[1]


@pytest.mark.parametrize(
    ("labels", "ports", "says"),
    [
        ({}, [8000], "matchLabels"),
        ({"a": "x,b=y"}, [8000], "matchLabels"),
        ({"a b": "x"}, [8000], "matchLabels"),
        ({f"k{n}": "x" for n in range(65)}, [8000], "matchLabels"),
        (MINE, [], "1 to 8 different"),
        (MINE, [8000, 8000], "1 to 8 different"),
        (MINE, list(range(1, 10)), "1 to 8 different"),
        (MINE, [0], "1..65535"),
        (MINE, [70_000], "1..65535"),
    ],
)
def test_a_pool_that_breaks_the_api_rules_is_refused(labels, ports, says) -> None:
    with pytest.raises(WatchError, match=says):
        terms_of(msgspec.convert(pool("chat", labels, *ports), InferencePool))


def test_a_pool_becomes_a_selector_and_ports() -> None:
    labels = {"llm-d.ai/model": "a.b-c_D", "app": "vllm", "empty": ""}
    read = terms_of(msgspec.convert(pool("chat", labels, 8000, 8001), InferencePool))
    assert read == PoolTerms("app=vllm,empty=,llm-d.ai/model=a.b-c_D", (8000, 8001))


def test_more_pods_than_the_limit_are_refused(monkeypatch) -> None:
    few = pods_of(spec(), terms())
    few = type(few)(few.kind, few.path, few.name, 2, few.selectors)
    pods = [msgspec.convert(pod(f"p{n}", f"10.0.0.{n}", MINE), Pod) for n in range(3)]
    with pytest.raises(WatchError, match="more than 2 pods"):
        Objects(few, "1", pods)


_KEYS = st.sampled_from(
    [
        *("metadata", "name", "labels", "annotations", "resourceVersion", "deletionTimestamp"),
        *("status", "podIP", "conditions", "type", "spec", "selector", "matchLabels"),
        *("targetPorts", "number", "items", "llm-d.ai/role", "llm-d.ai/active-ports"),
        *("warmroute.io/worker", "continue", "object", "code", "poolRef", "priority"),
    ]
)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 70_000)
    | st.sampled_from(["", "Ready", "True", "10.0.0.1", "fd00::1", "a b", "8000,x", "kind=vllm"])
    | st.text(max_size=5)
)
_TREES = st.recursive(
    _LEAVES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(_KEYS, below, max_size=4),
    max_leaves=20,
)


@given(st.binary(max_size=100) | _TREES.map(json.dumps).map(str.encode))
def test_an_invalid_answer_raises_only_watch_errors(data: bytes) -> None:
    """Garbage from the API server is refused: any answer raises nothing other than WatchError and
    TooOldError.
    """
    pools, pods = pools_of(spec()), pods_of(spec(), terms())
    objectives = objectives_of(spec())
    with contextlib.suppress(WatchError):
        items = objectives.decode_list(data).items or ()
        priorities_in(Objects(objectives, "1", items).by_name, spec())
    with contextlib.suppress(WatchError):
        read = Objects(pools, "1", pools.decode_list(data).items or ())
        for one in read.by_name.values():
            with contextlib.suppress(WatchError):
                terms_of(one)
    with contextlib.suppress(WatchError):
        workers_in(Objects(pods, "1", pods.decode_list(data).items or ()).by_name, terms(), spec())
    for kind in (b"ADDED", b"DELETED", b"BOOKMARK", b"ERROR"):
        line = b'{"type":"%s","object":%s}' % (kind, data)
        held: Objects[Pod] = Objects(pods, "1", ())
        with contextlib.suppress(WatchError, TooOldError):
            held.apply(line)
            workers_in(held.by_name, terms(8000, 8001), spec())


def test_only_the_fields_in_use_are_kept_of_a_pod() -> None:
    notes = {"warmroute.io/worker": "x" * 200_000, "llm-d.ai/active-ports": "8" * 200_000}
    one = pod("a", "10.0.0.1", MINE, notes=notes | {"other": "y" * 200_000})
    (kept,) = (
        pods_of(spec(), terms())
        .decode_list(json.dumps({"metadata": {}, "items": [one]}).encode())
        .items
        or ()
    )
    assert len(repr(kept)) < 10_000


async def test_changes_of_a_pool_and_its_pods_are_followed() -> None:
    async with followed_pool() as (api, one):
        report = await one.until(lambda r: bool(r.trouble))
        assert report == Report((), "no InferencePool llm/chat")
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await api.put("pods", pod("x", "10.0.0.8", OTHERS))
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("inferencepools", pool("other", OTHERS, 9000))
        await one.until_serving("10.0.0.1")
        await api.put("pods", pod("b", "10.0.0.2", MINE, ready=False))
        await api.put("pods", pod("b", "10.0.0.2", MINE))
        await one.until_serving("10.0.0.1", "10.0.0.2")
        await api.put("inferencepools", pool("chat", MINE, 8000, 8001))  # more ports
        await one.until_serving("10.0.0.1", "10.0.0.1:8001", "10.0.0.2", "10.0.0.2:8001")
        await api.put("inferencepools", pool("chat", OTHERS, 8000))  # other pods
        await one.until_serving("10.0.0.8")
        await api.delete("inferencepools", "chat")
        report = await one.until(lambda r: r.trouble == "no InferencePool llm/chat")
        assert serving_hosts(report) == []
        assert one.trusted_workers() == [], "a pool that was deleted is no outage"
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await one.until_serving("10.0.0.1", "10.0.0.2")
        assert api.lists("inferencepools") == 1


async def test_a_deleted_pod_is_removed_at_once_even_the_last_one() -> None:
    async with followed_pool() as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await api.put("pods", pod("b", "10.0.0.2", MINE))
        await one.until_serving("10.0.0.1", "10.0.0.2")
        await api.put("pods", pod("a", "10.0.0.1", MINE, deleted=True))
        assert stopping_hosts(await one.until_serving("10.0.0.2")) == ["10.0.0.1:8000"]
        await api.delete("pods", "a")
        await one.until(lambda r: not stopping_hosts(r))
        await api.delete("pods", "b")  # at once, without a grace period
        await one.until_serving()
        assert one.trusted_workers() == []
        # One that is not ready may be cut off from its node only: its probes decide.
        await api.put("pods", pod("c", "10.0.0.3", MINE))
        await one.until_serving("10.0.0.3")
        await api.put("pods", pod("c", "10.0.0.3", MINE, ready=False))
        await one.until_serving()
        assert one.trusted_workers() == ["10.0.0.3:8000"]
        await api.delete("pods", "c")
        await one.until(lambda _: one.trusted_workers() == [])


async def test_events_that_change_no_worker_are_not_reported() -> None:
    async with followed_pool() as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until_serving("10.0.0.1")
        told = len(one.reports)
        for turn in range(20):
            notes = {"example.com/turn": str(turn)}
            await api.put("pods", pod("a", "10.0.0.1", MINE, notes=notes))
            await api.put("pods", pod("late", None, MINE, ready=False))
        await api.put("pods", pod("b", "10.0.0.2", MINE))
        await one.until_serving("10.0.0.1", "10.0.0.2")
        assert len(one.reports) == told + 1


async def test_a_long_list_comes_in_pages_and_restarts_if_a_page_has_expired(monkeypatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "_PAGE", 3)
    async with followed_pool() as (api, one):
        for n in range(10):
            await api.put("pods", pod(f"p{n}", f"10.0.0.{n}", MINE))
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await one.until_serving(*(f"10.0.0.{n}" for n in range(10)))
        pages = [q.get("continue") for k, q in api.asked if k == "pods" and "watch" not in q]
        assert len(pages) == 4
        assert pages[0] is None


async def test_a_watch_that_ended_or_broke_resumes_at_its_last_version() -> None:
    async with followed_pool() as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until_serving("10.0.0.1")
        for n, harm in enumerate(["bookmark", "end", "break", "bookmark", "break"], 2):
            await api.until_watched("pods")
            await api.send_to_watches(harm)  # type: ignore[arg-type]
            await api.put("pods", pod(f"p{n}", f"10.0.0.{n}", MINE))
            await one.until_serving(*(f"10.0.0.{k}" for k in range(1, n + 1)))
        assert api.lists("pods") == 1
        assert len(api.watched("pods")) > 3


@pytest.mark.parametrize("harm", ["expire", "garbage", "compact"])
async def test_an_expired_version_or_an_invalid_answer_means_a_new_list(harm) -> None:
    async with followed_pool() as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until_serving("10.0.0.1")
        await api.until_watched("pods")
        if harm == "compact":  # while nobody watches: what happened meanwhile is not told
            await api.stop()
            await api.delete("pods", "a")
            await api.put("pods", pod("b", "10.0.0.2", MINE))
            await api.compact()
            await api.start()
        else:
            await api.send_to_watches(harm)
            await api.delete("pods", "a")
            await api.put("pods", pod("b", "10.0.0.2", MINE))
        await one.until_serving("10.0.0.2")
        assert one.trusted_workers() == ["10.0.0.2:8000"], (
            "the list shows that the other one was deleted"
        )
        assert api.lists("pods") == 2


@pytest.mark.parametrize(
    ("illness", "says"),
    [
        ("refuses", "it answers 503"),
        ("garbage", "no list of inferencepools"),
        ("forbidden", "403: the account may not list and watch inferencepools"),
        ("unknown", "404: it knows no inferencepools of inference.networking.k8s.io/v1"),
    ],
)
async def test_an_api_error_is_reported_and_the_request_repeated(illness, says) -> None:
    async with followed_pool() as (api, one):
        api.illness = illness
        report = await one.until(lambda r: bool(r.trouble))
        assert report.workers is None
        assert says in report.trouble
        api.illness = ""
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until_serving("10.0.0.1")


async def test_a_hanging_api_request_times_out_and_the_workers_stay(monkeypatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "_ANSWER_S", 0.05)
    async with followed_pool() as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until_serving("10.0.0.1")
        await api.until_watched("pods")
        api.illness = "hangs"
        await api.send_to_watches("end")
        report = await one.until(lambda r: bool(r.trouble))
        assert report.workers is None
        assert one.trusted_workers() == ["10.0.0.1:8000"]
        api.illness = ""
        await api.put("pods", pod("b", "10.0.0.2", MINE))
        await one.until_serving("10.0.0.1", "10.0.0.2")
        assert api.lists("pods") == 1


async def test_pauses_between_attempts_grow_and_are_random(monkeypatch) -> None:
    paused: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        await real(0)

    async def nobody() -> Any:
        raise OSError("refused")

    monkeypatch.setattr(kubernetes_watch.asyncio, "sleep", sleep)
    draws = itertools.cycle([0.0, 1.0])
    source = InferencePoolSource(spec(), nobody, lambda: next(draws))
    reports = source.reports()
    assert (await anext(reports)).trouble == "Kubernetes API: refused"
    while len(paused) < 8:
        await real(0)
    await reports.aclose()  # type: ignore[attr-defined]
    assert paused[:8] == [0.1, 0.4, 0.4, 1.6, 1.6, 5.0, 2.5, 5.0]


_NAMES = st.sampled_from("abcd")
_STEPS = st.one_of(
    st.tuples(
        st.just("pod"),
        _NAMES,
        st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", None]),
        st.sampled_from([MINE, OTHERS]),
        st.sampled_from(["ready", "ready", "unready", "leaving"]),
        st.sampled_from([None, "8001"]),
    ),
    st.tuples(st.just("delete"), _NAMES),
    st.tuples(st.just("pool"), st.sampled_from([MINE, OTHERS]), st.sampled_from([1, 2])),
    st.tuples(st.just("no pool")),
    st.tuples(st.sampled_from(["compact", "down", "settle"])),
    st.tuples(st.just("say"), st.sampled_from(["bookmark", "end", "break", "garbage", "expire"])),
)


async def _apply_step(api: KubernetesApi, one: FollowedPool, step: tuple[Any, ...]) -> None:
    match step:
        case ("pod", name, address, labels, state, active):
            notes = None if active is None else {"llm-d.ai/active-ports": active}
            how = {"ready": state != "unready", "deleted": state == "leaving", "notes": notes}
            await api.put("pods", pod(name, address, labels, **how))
        case ("delete", name):
            await api.delete("pods", name)
        case ("pool", labels, ports):
            await api.put("inferencepools", pool("chat", labels, *range(8000, 8000 + ports)))
        case ("no pool",):
            await api.delete("inferencepools", "chat")
        case ("compact",):
            await api.compact()
        case ("down",):
            await api.stop()
            await api.start()
        case ("say", what):
            await api.send_to_watches(what)
        case ("settle",):
            await _check_settled(api, one)


def _expected_workers(api: KubernetesApi) -> tuple[set[str], set[str], set[str]]:
    """Return the workers that are ready, not ready, and stopping, by a plain reading of all
    objects.
    """
    ready: set[str] = set()
    unready: set[str] = set()
    leaving: set[str] = set()
    chat = api.objects("inferencepools").get("chat")
    for one in api.objects("pods").values() if chat else ():
        assert chat is not None
        meta, status = one["metadata"], one["status"]
        chosen = chat["spec"]["selector"]["matchLabels"].items() <= meta["labels"].items()
        if not chosen or "podIP" not in status:
            continue
        active = meta.get("annotations", {}).get("llm-d.ai/active-ports")
        for port in (str(p["number"]) for p in chat["spec"]["targetPorts"]):
            if active not in (None, port):
                continue
            where = f"{status['podIP']}:{port}"
            if "deletionTimestamp" in meta:
                leaving.add(where)
            elif {"type": "Ready", "status": "True", "reason": "x"} in status["conditions"]:
                ready.add(where)
            else:
                unready.add(where)
    return ready, unready, leaving


async def _check_settled(api: KubernetesApi, one: FollowedPool) -> None:
    """Wait until the source reports the API server's state; then check that the trusted workers
    follow from it.
    """
    ready, unready, leaving = _expected_workers(api)
    there = "chat" in api.objects("inferencepools")
    said = "" if there else "no InferencePool llm/chat"

    def reached(report: Report) -> bool:
        return (
            report.workers is not None
            and report.trouble == said
            and set(serving_hosts(report)) == ready
            and set(stopping_hosts(report)) == leaving - ready
        )

    await one.until(reached, f"{ready} {leaving}")
    believed = set(one.trusted_workers())
    assert ready <= believed <= ready | (unready - leaving), "who was deleted gets nothing more"


@given(st.lists(_STEPS, max_size=14))
def test_after_any_history_the_workers_equal_those_of_the_api_server(history) -> None:
    async def play() -> None:
        async with followed_pool() as (api, one):
            for step in [("pool", MINE, 1), *history, ("settle",)]:
                await _apply_step(api, one, step)

    asyncio.run(play())
