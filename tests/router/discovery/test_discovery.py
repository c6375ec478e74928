"""Tests that the fleet has the workers of the configuration, of sources, and those that were added
by hand.
"""

from __future__ import annotations

import asyncio

import pytest

from policies.facts import WorkerFacts
from router.collectors.workers import discovery_metrics
from router.engines.adapter import UnrecognizedError
from router.engines.spec import WorkerSpec
from router.engines.worker_spec import parse_worker_spec
from router.fleet import member as member_module
from router.fleet.member import Member
from router.fleet.recognize import Recognized, with_thresholds
from router.fleet.sources import Discovery
from tests.router.discovery.discovery_support import ScriptedSource, world
from tests.router.fleet.fleet_support import fleet_of
from tests.router.waiting import until

A, B, C = (f"http://127.0.0.1:{port}" for port in (11, 12, 13))


@pytest.fixture(autouse=True)
def down(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make every URL look like a worker that answers probes, except the URLs in the
    returned set.
    """
    down: set[str] = set()

    async def known(http: object, spec: WorkerSpec, *_: object) -> Recognized:
        await asyncio.sleep(0)
        if spec.url in down:
            raise UnrecognizedError("it is down")
        facts = WorkerFacts(name=spec.url, models=("m",), block_size=16, has_events=False)
        return with_thresholds(Recognized("vllm", facts, None), spec)

    async def complaint(member: Member) -> str:
        return "it is down" if member.spec.url in down else ""

    monkeypatch.setattr(member_module, "recognize", known)
    monkeypatch.setattr(member_module.Member, "_complaint", complaint)
    return down


async def test_the_fleet_has_the_workers_of_all_sources() -> None:
    async with world("file:x", "file:z", workers=[A]) as one:
        one.source("file:x").report_workers(B)
        one.source("file:z").report_workers(C, B)
        await one.until_workers(A, B, C)
        by = {m.spec.name: m.named.by for m in one.remaining_members()}
        assert by == {A: "configuration", B: "file:x", C: "file:z"}
        one.source("file:x").report_workers(C)
        await until(lambda: one.source_row("file:x")["workers"] == 1, "the second report")
        assert one.worker_names() == [A, B, C]  # the other one still names it


async def test_a_removed_worker_drains_and_stays_the_same_if_it_returns_meanwhile() -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        before = {m.spec.name: m for m in one.remaining_members()}
        await until(lambda: all(m.ready for m in before.values()), "both ready")
        one.source("file:x").report_workers(A)
        await one.until_workers(A)
        assert (before[B].leaving, before[B].draining) == (True, True)
        one.source("file:x").report_workers(A, f"{B},weight=2")
        await one.until_workers(A, B)
        assert one.manager.members[before[B].worker_id] is before[B]
        assert (before[B].draining, before[B].ready, before[B].spec.weight) == (False, True, 2.0)


async def test_a_worker_drained_before_its_removal_still_drains_after_its_return() -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        member = next(m for m in one.remaining_members() if m.spec.name == B)
        member.drain("admin request")
        one.source("file:x").report_workers(A)
        await one.until_workers(A)
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        assert member.draining


async def test_changed_options_at_a_url_lead_to_a_new_recognition_of_the_same_worker() -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A)
        await one.until_workers(A)
        one.source("file:x").report_workers(f"{A},block_size=64")
        await until(lambda: [m.spec.block_size for m in one.manager.members.values()] == [64], "")
        assert [m.leaving for m in one.manager.members.values()] == [False]


async def test_a_leaving_worker_reported_with_another_kind_stays_with_that_kind() -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        before = next(m for m in one.remaining_members() if m.spec.name == B)
        one.source("file:x").report_workers(A)
        await one.until_workers(A)
        one.source("file:x").report_workers(A, f"{B},kind=sglang,block_size=64")
        await one.until_workers(A, B)
        assert (before.leaving, before.spec.kind, before.spec.block_size) == (False, "sglang", 64)
        one.source("file:x").report_workers(A, B)
        await until(lambda: before.spec.block_size is None, "the first options")
        assert len(one.manager.members) == 2


async def test_a_reload_keeps_a_configured_worker_that_leaves_by_hand() -> None:
    async with world("file:x", workers=[A]) as one:
        await one.until_workers(A)
        (before,) = one.remaining_members()
        one.manager.leave(before, "admin request")
        one.discovery.apply([parse_worker_spec(A)], ["file:x"])
        await one.until_workers(A)
        assert one.remaining_members() == [before]
        assert len(one.manager.members) == 1


async def test_workers_added_or_removed_by_hand_stay_so_despite_sources() -> None:
    async with world("file:x", workers=[A]) as one:
        one.source("file:x").report_workers(B)
        await one.until_workers(A, B)
        one.manager.add(parse_worker_spec(C), "admin request", by_hand=True)
        one.manager.leave(
            next(m for m in one.remaining_members() if m.spec.name == B), "admin request"
        )
        one.source("file:x").report_workers(B, f"{C},weight=3")
        await until(
            lambda: [m.spec.weight for m in one.remaining_members()] == [1.0, 3.0], "C's weight"
        )
        assert one.worker_names() == [A, C]
        one.source("file:x").report_workers(f"{A},weight=9")  # no longer names B: forgotten
        await until(lambda: one.discovery.conflicts == 1, "A, named twice")
        one.source("file:x").report_workers(B)
        await one.until_workers(A, B, C)
        assert one.discovery.conflicts == 0


async def test_a_reload_brings_back_workers_that_were_removed_by_hand() -> None:
    async with world("file:x", workers=[A]) as one:
        one.source("file:x").report_workers(B)
        await one.until_workers(A, B)
        for member in one.remaining_members():
            one.manager.leave(member, "admin request")
        assert one.worker_names() == []
        one.discovery.apply([parse_worker_spec(A)], ["file:x"])
        assert one.worker_names() == [A, B]


async def test_if_a_source_fails_its_workers_that_answer_are_kept(down, caplog) -> None:
    async with world("file:x", grace_s=0.2) as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        down.add(B)
        one.source("file:x").report_failure("the disk is on fire")
        await one.until_workers(A)
        assert one.source_row("file:x")["trouble"] == "the disk is on fire"
        assert "source file:x: the disk is on fire" in caplog.text
        one.source("file:x").report_workers(B)
        await one.until_workers(B)
        assert one.source_row("file:x")["trouble"] is None


async def test_a_worker_that_its_source_reports_as_stopping_drains(caplog) -> None:
    async with world("file:z") as one:
        one.source("file:z").report_workers(A, B)
        await one.until_workers(A, B)
        one.source("file:z").report_workers(A, B, stopping=[A, B])
        await one.until_workers()
        one.manager.sweep(lambda worker_id: 0)
        await until(lambda: not one.manager.members, "both gone")
        one.source("file:z").report_workers(A)
        await one.until_workers(A)


async def test_requests_that_run_too_long_at_a_leaving_worker_are_cancelled(monkeypatch) -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        one.source("file:x").report_workers(B)
        await one.until_workers(B)
        one.manager.sweep(lambda worker_id: 1)
        assert len(one.manager.members) == 2
        real = one.manager.now_s
        context = one.manager._context
        monkeypatch.setattr(context, "clock", lambda: real + 601.0)
        one.manager.sweep(lambda worker_id: 1)
        one.manager.sweep(lambda worker_id: 1)
        await until(lambda: len(one.manager.members) == 1, "the end of its drain")
        assert one.manager.cut_short == 1


async def test_a_worker_above_the_limit_is_logged_and_joins_once_a_slot_is_free(caplog) -> None:
    async with world("file:x", max_workers=2) as one:
        one.source("file:x").report_workers(A, B, C)
        await one.until_workers(A, B)
        assert f"worker {C}: all 2 worker slots are taken (limits.workers)" in caplog.text
        one.source("file:x").report_workers(B, C)
        await one.until_workers(B)
        one.manager.sweep(lambda worker_id: 0)
        await one.until_workers(B, C)


async def test_replacing_a_source_keeps_its_workers_until_the_new_source_reports() -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        assert one.discovery.apply([], ["file:y"]) == []
        assert one.worker_names() == [A, B]
        one.source("file:y").report_workers(B)
        await one.until_workers(B)
        assert one.remaining_members()[0].named.by == "file:y"


async def test_an_exception_in_a_source_costs_one_report(caplog) -> None:
    async with world("file:x", "file:z") as one:
        one.source("file:z").report_workers(B)
        one.source("file:x").report_workers(A)
        await one.until_workers(A, B)
        one.source("file:x").news.put_nowait(KeyError("ours"))
        one.source("file:x").report_workers(C)
        await one.until_workers(B, C)
        assert "source file:x failed" in caplog.text


async def test_two_sources_with_different_options_for_a_worker_are_logged(caplog) -> None:
    async with world("file:x", "file:z") as one:
        one.source("file:x").report_workers(A)
        await one.until_workers(A)
        one.source("file:z").report_workers(f"{A},weight=2")
        await until(lambda: one.discovery.conflicts == 1, "the conflict")
        assert f"file:z names {A},weight=2, which file:x names as {A}: that counts" in caplog.text
        assert [m.spec.weight for m in one.remaining_members()] == [1.0]


async def test_waiting_for_first_reports_ends_at_its_timeout_or_with_the_last_report() -> None:
    async with world("file:x", "file:z") as one:
        one.source("file:x").report_workers(A)
        await one.discovery.wait_until_reported(0.05)
        assert one.worker_names() == [A]
        one.source("file:z").report_workers(B)
        await one.discovery.wait_until_reported(30.0)
        assert one.worker_names() == [A, B]


async def test_a_new_process_starts_with_the_workers_found_before() -> None:
    async with world("file:x", "file:z") as one:
        one.source("file:x").report_workers(A, B, stopping=[B])
        await one.until_workers(A)
        found = one.discovery.found()
        assert found == (("file:x", A),)
        async with fleet_of(8) as (manager, _):
            told = {name: ScriptedSource() for name in ("file:x", "file:z")}
            after = Discovery(manager, lambda spec: told[str(spec)], lambda: 60.0)
            after.start([], ["file:x", "file:z"], [*found, ("file:x", "ftp:"), ("dns:gone:1", B)])
            told["file:x"].report_failure("torn")
            told["file:z"].report_workers(C)
            await after.wait_until_reported(30.0)
            assert {m.spec.name: m.named.by for m in manager.members.values()} == {
                A: "file:x",
                C: "file:z",
            }
            told["file:x"].report_workers(B, C)
            await until(lambda: sum(not m.leaving for m in manager.members.values()) == 2, "B")
            await after.aclose()


async def test_metrics_show_the_state_of_sources() -> None:
    async with world("file:x") as one:
        one.source("file:x").report_workers(A, B)
        await one.until_workers(A, B)
        one.source("file:x").report_failure("no")
        await until(lambda: one.source_row("file:x")["trouble"] == "no", "the failure")
        families = discovery_metrics(one.discovery, one.manager)
        values = {
            (s.name, s.labels.get("change", "")): s.value for f in families for s in f.samples
        }
        assert values["warmroute_discovery_up", ""] == 0
        assert values["warmroute_discovery_workers", ""] == 2
        assert values["warmroute_discovery_silent_seconds", ""] > 0
        assert values["warmroute_discovery_changes_total", "joined"] == 2
