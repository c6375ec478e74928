"""Tests of a pool's InferenceObjectives: they give the priorities of requests that name them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from router.discovery import kubernetes_watch
from router.discovery.kubernetes_source import MAX_OBJECTIVES, InferenceObjective, priorities_in
from router.fleet.sources import Report, SourceTrust
from router.picker.picked import PickerTerms
from tests.router.discovery.discovery_support import world
from tests.router.discovery.kubernetes_api import KubernetesApi, objective, pod, pool
from tests.router.discovery.pool_following import MINE, FollowedPool, followed_pool, spec
from tests.router.waiting import until

KIND = "inferenceobjectives"


def priorities_of(*objectives: dict[str, Any]) -> tuple[dict[str, int], str]:
    by_name = {
        one["metadata"]["name"]: msgspec.convert(one, InferenceObjective) for one in objectives
    }
    return priorities_in(by_name, spec())


@asynccontextmanager
async def pool_with_objectives() -> AsyncIterator[tuple[KubernetesApi, FollowedPool]]:
    """Yield an API server with a pool of one worker that is up and no objectives yet, and the
    reader of its reports.
    """
    async with followed_pool(objectives=True) as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until_serving("10.0.0.1")
        yield api, one


async def until_priorities(one: FollowedPool, **priorities: int) -> None:
    """Wait until a report without trouble has exactly these priorities, and the worker is up."""
    await one.until(lambda r: r.objectives == priorities and not r.trouble, f"{priorities}")
    assert one.trusted_workers() == ["10.0.0.1:8000"]


def test_priorities_of_objectives_are_negated_and_default_to_0() -> None:
    assert priorities_of(
        objective("a", "chat", 10), objective("b", "chat", -3), objective("c", "chat")
    ) == (
        {"a": -10, "b": 3, "c": 0},
        "",
    )


def test_only_objectives_of_the_pool_that_are_not_being_deleted_count() -> None:
    going = objective("going", "chat", 1)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    others = (
        objective("other", "embed", 1),
        objective("old", "chat", 1, group="inference.networking.x-k8s.io"),
        objective("service", "chat", 1, kind="Service"),
        {"metadata": {"name": "bare"}},
    )
    assert priorities_of(*others, going) == ({}, "")
    short = {"metadata": {"name": "short"}, "spec": {"poolRef": {"name": "chat"}}}
    assert priorities_of(*others, short) == ({"short": 0}, "")


def test_objectives_beyond_the_limits_are_left_out_and_reported() -> None:
    most = 999_999_999
    kept, told = priorities_of(
        *(objective(f"n{n:04}", "chat", n) for n in range(MAX_OBJECTIVES)),
        *(objective(f"o{n}", "chat", n) for n in range(9)),
    )
    assert len(kept) == MAX_OBJECTIVES
    assert told.startswith("InferenceObjectives left out: 9; 'o0': at most 256 are taken; 'o1'")
    assert "'o5'" not in told
    kept, told = priorities_of(
        objective("far", "chat", 10**30),
        objective("least", "chat", -most),
        objective("low", "chat", -most - 1),
        objective("x" * 254, "chat", 1),
    )
    assert kept == {"least": most}
    assert "'far': priority 1000000000000000000000000000000; allowed: -999999999..999999999" in told
    assert "'low': priority -1000000000" in told
    assert "a name has 1 to 253 characters" in told
    assert len(told) < 500


async def test_changes_and_deletions_of_objectives_are_followed() -> None:
    async with pool_with_objectives() as (api, one):
        await until_priorities(one)
        await api.put(KIND, objective("urgent", "chat", 10))
        await api.put(KIND, objective("other", "embed", 7))
        await until_priorities(one, urgent=-10)
        await api.put(KIND, objective("urgent", "chat", 20))
        await api.put(KIND, objective("batch", "chat", -5))
        await until_priorities(one, urgent=-20, batch=5)
        await api.put(KIND, objective("batch", "embed", -5))
        await until_priorities(one, urgent=-20)
        await api.delete(KIND, "urgent")
        await until_priorities(one)
        assert api.lists(KIND) == 1


async def test_a_router_that_is_not_an_endpoint_picker_reads_no_objectives() -> None:
    async with followed_pool() as (api, one):
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        report = await one.until_serving("10.0.0.1")
        assert report.objectives is None
        assert KIND not in {kind for kind, _ in api.asked}


async def test_an_objective_left_out_is_reported_and_workers_stay() -> None:
    async with pool_with_objectives() as (api, one):
        await api.put(KIND, objective("far", "chat", 10**10))
        report = await one.until(lambda r: bool(r.refused))
        assert report.objectives == {}
        assert one.trust.refused[0].startswith("InferenceObjectives left out: 1; 'far'")
        assert one.trusted_workers() == ["10.0.0.1:8000"]


async def test_a_missing_crd_is_logged_once_and_listed_again_later(monkeypatch, caplog) -> None:
    monkeypatch.setattr(kubernetes_watch, "_AGAIN_S", (0.01, 0.02))
    caplog.set_level(logging.INFO, "router.discovery")
    async with followed_pool(objectives=True) as (api, one):
        api.illnesses[KIND] = "unknown"
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await api.until_requested(KIND, 4)
        report = await one.until_serving("10.0.0.1")
        assert report.objectives is None
        (told,) = (one for one in caplog.records if one.name == kubernetes_watch.__name__)
        assert told.levelno == logging.INFO
        assert (
            "404: it knows no inferenceobjectives of inference.networking.x-k8s.io" in told.message
        )
        await api.put(KIND, objective("urgent", "chat", 10))
        api.illnesses.clear()
        await until_priorities(one, urgent=-10)


@pytest.mark.parametrize(
    ("illness", "says"),
    [("forbidden", "403: the account may not list and watch inferenceobj"), ("refuses", "503")],
)
async def test_workers_serve_while_objectives_cannot_be_read(illness, says) -> None:
    async with followed_pool(objectives=True) as (api, one):
        api.illnesses[KIND] = illness
        await api.put("inferencepools", pool("chat", MINE, 8000))
        await api.put("pods", pod("a", "10.0.0.1", MINE))
        await one.until(lambda r: says in r.trouble and bool(r.workers))
        assert one.trusted_workers() == ["10.0.0.1:8000"]
        api.illnesses.clear()
        await until_priorities(one)


async def test_an_invalid_objective_is_reported_and_the_last_priorities_stay() -> None:
    async with pool_with_objectives() as (api, one):
        await api.put(KIND, objective("urgent", "chat", 10))
        await until_priorities(one, urgent=-10)
        await api.put(KIND, objective("urgent", "chat", "much"))
        await one.until(lambda r: "no list of inferenceobjectives" in r.trouble)
        assert one.trust.objectives == {"urgent": -10}
        assert one.trusted_workers() == ["10.0.0.1:8000"]
        await api.put(KIND, objective("urgent", "chat", 11))
        await until_priorities(one, urgent=-11)


@pytest.mark.parametrize("harm", ["end", "break", "expire", "garbage"])
async def test_a_watch_that_ends_or_expires_loses_nothing(harm) -> None:
    async with pool_with_objectives() as (api, one):
        await api.put(KIND, objective("urgent", "chat", 10))
        await api.put(KIND, objective("batch", "chat", -5))
        await until_priorities(one, urgent=-10, batch=5)
        await api.until_watched(KIND)
        await api.send_to_watches(harm)
        await api.delete(KIND, "batch")
        await api.put(KIND, objective("urgent", "chat", 20))
        await until_priorities(one, urgent=-20)
        assert api.lists(KIND) == (2 if harm in ("expire", "garbage") else 1)


async def test_objectives_stay_while_the_api_server_is_unreachable() -> None:
    async with pool_with_objectives() as (api, one):
        await api.put(KIND, objective("urgent", "chat", 10))
        await until_priorities(one, urgent=-10)
        await api.stop()
        await one.until(lambda r: bool(r.trouble))
        assert one.trust.objectives == {"urgent": -10}
        await api.delete(KIND, "urgent")
        await api.start()
        await until_priorities(one)
        assert one.trust.objectives == {}


def test_a_report_without_objectives_leaves_them_unchanged() -> None:
    trust = SourceTrust()
    trust.update(Report((), objectives={"urgent": -10}), 0.0)
    trust.update(Report(None, "away"), 1.0)
    assert trust.objectives == {"urgent": -10}


async def test_the_first_source_that_has_an_objective_sets_its_priority() -> None:
    async with world("file:x", "file:z") as one:
        one.source("file:z").news.put_nowait(Report((), objectives={"urgent": 1, "batch": 5}))
        await until(lambda: one.discovery.priority_of("urgent") == 1, "the second source's word")
        one.source("file:x").news.put_nowait(Report((), objectives={"urgent": 0}))
        await until(lambda: one.discovery.priority_of("urgent") == 0, "the first source's word")
        assert [one.discovery.priority_of(name) for name in ("batch", "else")] == [5, None]


def test_configured_priorities_override_discovered_ones() -> None:
    terms = PickerTerms(
        5.0, 1, {"urgent": 0}, {"urgent": -10, "batch": 5}.get, counts=Counter[str]()
    )
    assert [terms.priority_of(name) for name in ("urgent", "batch", "else")] == [0, 5, None]
