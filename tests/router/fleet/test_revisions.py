"""Tests of a worker's revision: where it comes from, the name of its group, and its changes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq.asyncio

from policies.facts import WorkerChange
from router.discovery.kubernetes_source import Pod, PoolTerms, Slice, workers_in, workers_of
from router.discovery.source import KubernetesSpec, SourceSpecError, parse_source
from router.engines.adapter import EngineReply
from router.engines.spec import WorkerSpecError
from router.engines.worker_spec import parse_worker_spec
from router.fleet.context import FleetContext, FleetTerms, WorkerFact
from router.fleet.manager import FleetManager, reconcile
from router.fleet.wanted import WantedWorker
from router.http.reply import RelayLimits, Sends
from tests.router.core.core_world import World, stored
from tests.router.discovery.kubernetes_api import pod
from tests.router.discovery.pool_following import MINE, spec
from tests.router.engines.engine_pages import engine, recognized
from tests.router.vllm_pages import VLLM
from tests.router.waiting import until

OURS = {"data": [{"id": "m", "owned_by": "warmroute"}]}
TOLD = {**VLLM, "/version": {"version": "0.33.0"}}
ENGINE = {
    **VLLM,
    "/v1/models": OURS,
    "/version": {"version": "0.1", "revision": "v2"},
    "/server_info": {"role": "both", "group": "abc"},
}


@pytest.mark.parametrize(
    ("pages", "options", "revision", "group"),
    [
        (VLLM, "", None, None),
        (TOLD, "", "0.33.0", None),
        (TOLD, ",role=decode", "0.33.0", "vllm 0.33.0"),
        (TOLD, ",role=decode,revision=v2", "v2", "vllm 0.33.0@v2"),
        (TOLD, ",group=rack1", "0.33.0", "rack1@0.33.0"),
        (TOLD, ",group=rack1,revision=v2", "v2", "rack1@v2"),
        (VLLM, ",group=rack1", None, "rack1"),
        (VLLM, ",role=decode,revision=v2", "v2", None),
        (ENGINE, ",role=prefill", "v2", "warmroute 0.1 abc@v2"),
        (ENGINE, ",role=prefill,revision=v3", "v3", "warmroute 0.1 abc@v3"),
    ],
)
async def test_a_revision_comes_from_the_options_or_else_from_the_engine(
    pages: dict[str, Any], options: str, revision: str | None, group: str | None
) -> None:
    facts = (await recognized(pages, options)).facts
    assert (facts.revision, facts.group) == (revision, group)


@pytest.mark.parametrize("told", ["", 3, None, "x" * 129, "a,b", " a", "a\n", {}])
async def test_an_invalid_revision_of_an_engine_is_ignored(told: object) -> None:
    pages = {**ENGINE, "/version": {"version": "0.1", "revision": told}}
    assert (await recognized(pages)).facts.revision in ("0.1", None)


@pytest.mark.parametrize("text", ["", "x" * 129, "a\tb", "\x7f"])
def test_an_unprintable_or_too_long_revision_is_refused(text: str) -> None:
    with pytest.raises(WorkerSpecError, match="revision is"):
        parse_worker_spec(f"http://h:1,revision={text}")


def test_a_worker_spec_with_a_revision_parses_to_the_same_spec() -> None:
    spec = parse_worker_spec("http://h:1,group=g,revision=2026-11 (canary)")
    assert spec.revision == "2026-11 (canary)"
    assert parse_worker_spec(str(spec)) == spec


LABEL = "disaggregatedset.x-k8s.io/revision"


def test_a_pods_revision_is_its_label_unless_configured_otherwise() -> None:
    def of(text: str = "", notes: dict[str, str] | None = None, **labels: str) -> str | None:
        one = pod("a", "10.0.0.1", MINE | {LABEL: "v1"} | labels, notes=notes)
        pods, source = {"a": msgspec.convert(one, Pod)}, spec(f"inferencepool:llm/chat{text}")
        report, _ = workers_in(pods, PoolTerms("app=vllm", (8000,)), source)
        (worker,) = report.workers or ()
        return worker.spec.revision

    assert of() == "v1"
    assert of(",revision_label=track", track="canary") == "canary"
    assert of(",revision_label=track") is None
    assert of(",revision=v9") == "v9"
    assert of(notes={"warmroute.io/worker": "revision=v7"}) == "v7"


def test_a_slices_revision_is_the_configured_label() -> None:
    one = {
        "metadata": {"name": "s", "labels": {LABEL: "v1", "track": "canary"}},
        "endpoints": [{"addresses": ["10.0.0.1"]}],
        "ports": [{"port": 8000}],
    }
    slices = {"s": msgspec.convert(one, Slice)}
    for text, revision in (("", None), (",revision_label=track", "canary")):
        source = parse_source(f"kubernetes:llm/chat{text}")
        assert isinstance(source, KubernetesSpec)
        assert parse_source(str(source)) == source
        (worker,) = workers_of(slices, source).workers or ()
        assert worker.spec.revision == revision


def test_an_invalid_revision_label_is_refused() -> None:
    for text in ("inferencepool:llm/chat", "kubernetes:llm/chat"):
        with pytest.raises(SourceSpecError, match="revision_label"):
            parse_source(f"{text},revision_label=a b")


@asynccontextmanager
async def fleet_of(
    text: str, probe_s: float = 0.5
) -> AsyncIterator[tuple[FleetManager, list[WorkerFact]]]:
    """Yield a fleet of one worker, and its facts for the core."""
    told: list[WorkerFact] = []
    context = zmq.asyncio.Context()
    terms = FleetTerms(probe_s, 0.02, 0.02, 100, RelayLimits())
    async with aiohttp.ClientSession() as http:
        fleet = FleetManager(FleetContext(http, context, time.monotonic, told.append, terms), 8)
        member = fleet.add(parse_worker_spec(text))
        await until(lambda: member.ready, "the worker to be ready")
        yield fleet, told
        await fleet.aclose()
    context.destroy(linger=0)


async def test_a_request_waits_less_for_a_version_than_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    async def hangs(upstream: Sends, path: str, limit_s: float) -> EngineReply:
        limits.append(limit_s)
        raise TimeoutError

    monkeypatch.setattr("router.fleet.member.get_by_relay", hangs)
    async with (
        engine(TOLD, []) as url,
        fleet_of(f"{url},group=g,events=none", probe_s=5.0) as (fleet, _),
    ):
        for _ in range(9):
            assert await fleet.members[0].confirm(), "it counts as unchanged"
    assert set(limits) == {0.5}


async def test_a_changed_label_changes_a_worker_in_place() -> None:
    """A worker whose label changes keeps serving under its number, and the router does not ask it
    anything.
    """
    asked: list[str] = []
    async with (
        engine(TOLD, asked) as url,
        fleet_of(f"{url},group=g,revision=v1,events=none") as (fleet, told),
    ):
        member = fleet.members[0]
        asked.clear()
        told.clear()
        wanted = [WantedWorker(parse_worker_spec(f"{url},group=g,revision=v2,events=none"))]
        assert reconcile(fleet, wanted) == []
        (change,) = told
        assert isinstance(change, WorkerChange)
        assert change.spec is not None
        assert (change.state, change.spec.revision, change.spec.group) == ("ready", "v2", "g@v2")
        assert fleet.members == {0: member}
        assert "/v1/models" not in asked


def test_a_changed_label_keeps_the_known_cache() -> None:
    world = World(workers=0)
    world.join(0, group="g@v1", revision="v1")
    world.events(0, 0, stored([1, 2, 3]))
    world.join(0, group="g@v2", revision="v2")
    assert world.hits([1, 2, 3]) == [3]
