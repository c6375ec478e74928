"""Tests of members of the fleet: an error in the task that follows a worker, removal, reload."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq.asyncio

from policies.facts import WorkerChange, WorkerFacts
from router.core.placement.worker_caches import TableFullError
from router.engines.adapter import RankLoad, UnrecognizedError
from router.engines.spec import WorkerSpec
from router.engines.worker_spec import parse_worker_spec
from router.events.sources import ZmqSource
from router.events.zmq_feed import ZmqFeed
from router.fleet import member as member_module
from router.fleet.context import FleetContext, FleetTerms, WorkerFact
from router.fleet.manager import DuplicateWorkerError, FleetManager, reconcile
from router.fleet.recognize import Recognized, with_thresholds
from router.fleet.wanted import WantedWorker
from router.http.reply import RelayLimits
from router.upstream.fallback import Upstream
from tests.router.waiting import until

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "admin.md"
URL = "http://127.0.0.1:9"
OTHER = "http://127.0.0.1:10"


@dataclass
class Fleet:
    """A fleet manager, and the facts of its members. Lifetime: test."""

    manager: FleetManager
    told: list[WorkerFact]

    def states(self, worker_id: int) -> list[str]:
        changes = [f for f in self.told if isinstance(f, WorkerChange)]
        return [f.state for f in changes if f.worker_id == worker_id]

    async def until_state(self, worker_id: int, state: str) -> None:
        await until(lambda: self.states(worker_id)[-1:] == [state], f"{worker_id} to be {state}")


@asynccontextmanager
async def fleet(max_workers: int = 4) -> AsyncIterator[Fleet]:
    told: list[WorkerFact] = []
    context = zmq.asyncio.Context()
    terms = FleetTerms(0.5, 0.02, 0.02, 100, RelayLimits())
    async with aiohttp.ClientSession() as http:
        shared = FleetContext(http, context, time.monotonic, told.append, terms)
        manager = FleetManager(shared, max_workers)
        yield Fleet(manager, told)
        await manager.aclose()
        assert not manager.members
        assert len(asyncio.all_tasks()) == 1
    context.destroy(linger=0)


async def healthy_answer(*_: object) -> str:
    """Return the answer of a worker whose probes succeed."""
    return ""


@pytest.fixture(autouse=True)
def always_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fleet recognize every URL as a worker with events, without sending it a request."""

    async def known(http: object, spec: WorkerSpec, *terms: object) -> Recognized:
        await asyncio.sleep(0)
        facts = WorkerFacts(name=spec.url, models=("m",), block_size=16)
        source = ZmqSource("tcp://127.0.0.1:9")
        return with_thresholds(Recognized("vllm", facts, source), spec)

    monkeypatch.setattr(member_module, "recognize", known)
    monkeypatch.setattr(member_module.Member, "_complaint", healthy_answer)


async def test_an_exception_in_an_event_feed_does_not_end_its_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = 0

    async def breaks(feed: ZmqFeed) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise zmq.ZMQError(22, "broken on purpose")
        await asyncio.Event().wait()

    monkeypatch.setattr(ZmqFeed, "run", breaks)
    async with fleet() as one:
        one.manager.add(parse_worker_spec(URL))
        await until(lambda: rounds == 3, "the third round")
        await one.until_state(0, "ready")
        assert one.states(0) == ["ready", "down", "ready", "down", "ready"]
        assert "broken on purpose" in caplog.text


def recognized_by_turns(
    monkeypatch: pytest.MonkeyPatch, turns: Iterable[Exception | dict[str, Any]]
) -> list[WorkerSpec]:
    """Make each recognition raise or find the next of `turns`; return the list of workers that were
    asked for.
    """
    real, left = member_module.recognize, iter(turns)
    asked: list[WorkerSpec] = []

    async def by_turns(http: object, spec: WorkerSpec, *terms: object) -> Recognized:
        asked.append(spec)
        turn = next(left)
        if isinstance(turn, Exception):
            raise turn
        return replace(await real(http, spec, *terms), **turn)  # type: ignore[arg-type]

    monkeypatch.setattr(member_module, "recognize", by_turns)
    return asked


async def test_an_unrecognized_engine_is_shown_and_recognition_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toaster = UnrecognizedError("it is a toaster")
    recognized_by_turns(monkeypatch, [toaster, toaster, {}])
    async with fleet() as one:
        member = one.manager.add(parse_worker_spec(URL))
        await until(lambda: member.trouble == "it is a toaster", "the refusal to be shown")
        await one.until_state(0, "ready")
        assert member.trouble == ""


def documented_log_lines() -> list[str]:
    """Return as patterns the log lines in docs/reference/admin.md about workers that come
    and go.
    """
    section = PAGE.read_text(encoding="utf-8").partition("The router logs these lines")[2]
    lines = re.findall(r"^- `(worker N \(URL\) [^`]+)`", section, re.MULTILINE)
    return [
        re.sub("WHO|PLACES", ".+", re.escape(line).replace("N", r"\d").replace("URL", URL))
        for line in lines
    ]


async def test_grpc_and_metrics_addresses_that_answer_later_are_added_in_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router")
    grpc, metrics = "gpu1:8001", "http://gpu1:8002/metrics"
    neither = {"silent": frozenset({grpc, metrics})}
    one_of_them = {"silent": frozenset({metrics}), "grpc": grpc}
    turns = [neither, TimeoutError(), neither, *3 * [one_of_them], *2 * [{"grpc": grpc}]]
    asked = recognized_by_turns(monkeypatch, turns)
    monkeypatch.setattr(member_module, "_SILENT_S", 0.0)
    async with fleet() as one:
        member = one.manager.add(parse_worker_spec(URL))
        await until(lambda: len(asked) == len(turns), "all of it to be known")
        for _ in range(100):  # it is asked no more
            await asyncio.sleep(0)
        assert member.recognized is not None
        assert (member.recognized.grpc, member.recognized.silent) == (grpc, frozenset())
        assert set(one.states(0)) == {"ready"}
        assert len(asked) == len(turns)
    of_answers = [pattern for pattern in documented_log_lines() if "answer" in pattern]
    assert len(of_answers) == 2
    for pattern in of_answers:
        assert any(re.match(pattern, line) for line in caplog.messages), pattern


async def test_failed_probes_take_a_worker_down_and_a_success_brings_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([TimeoutError(), "", TimeoutError(), "GET /health answered 503"])

    async def by_turns(member: object) -> str:
        answer = next(answers, "")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(member_module.Member, "_complaint", by_turns)
    async with fleet() as one:
        one.manager.add(parse_worker_spec(URL))
        await until(lambda: one.states(0) == ["ready", "down", "ready"], "down and back")


async def test_a_removal_continues_after_its_client_disconnects() -> None:
    async with fleet() as one:
        member = one.manager.add(parse_worker_spec(URL))
        await one.until_state(0, "ready")
        waiting = asyncio.create_task(one.manager.remove(member, "forced"))
        await asyncio.sleep(0)
        waiting.cancel()  # the client that asked for it left
        await asyncio.wait([waiting])
        await until(lambda: member.upstream._closed, "its connections to be closed")
        assert one.states(0)[-1] == "gone"
        await one.manager.remove(member, "forced")  # a second time: nothing left to do
        assert one.states(0).count("gone") == 1


async def test_a_duplicate_address_and_a_worker_above_the_limit_are_refused() -> None:
    async with fleet(max_workers=2) as one:
        first = one.manager.add(parse_worker_spec(URL))
        with pytest.raises(DuplicateWorkerError):
            one.manager.add(parse_worker_spec(f"{URL},weight=2"))
        one.manager.leave(first, "test")
        second = one.manager.add(parse_worker_spec(OTHER))
        assert second.worker_id == 1
        with pytest.raises(TableFullError):
            one.manager.add(parse_worker_spec("http://127.0.0.1:11"))


@pytest.mark.parametrize("drained", [False, True])
async def test_a_worker_added_again_while_it_leaves_is_the_same_worker(drained: bool) -> None:
    async with fleet(max_workers=1) as one:
        member = one.manager.add(parse_worker_spec(URL), by_hand=True)
        await one.until_state(0, "ready")
        if drained:
            member.drain("test")
        for _ in range(2):
            one.manager.leave(member, "test")
            one.manager.leave(member, "test")
            one.manager.sweep(lambda worker_id: 1)
            await asyncio.sleep(0)
            assert one.states(0)[-1] == "draining"
            again = one.manager.add(
                parse_worker_spec(f"{URL},max_requests=3,weight=2"), "test", by_hand=True
            )
            assert again is member
            assert (member.leaving, member.draining, member.spec.weight) == (False, False, 2.0)
            assert one.states(0)[-1] == "ready"
        one.manager.sweep(lambda worker_id: 0)
        await asyncio.sleep(0)
        assert list(one.manager.members) == [0]
        with pytest.raises(DuplicateWorkerError):
            one.manager.add(parse_worker_spec(URL))
        assert "down" not in one.states(0), "nothing of it was forgotten"


@pytest.mark.parametrize("option", ["block_size=64", "role=decode,group=g", "kind=sglang"])
async def test_a_leaving_worker_added_with_other_options_is_recognized_again_in_place(
    option: str,
) -> None:
    async with fleet() as one:
        member = one.manager.add(parse_worker_spec(URL), by_hand=True)
        await one.until_state(0, "ready")
        one.manager.leave(member, "test")
        spec = parse_worker_spec(f"{URL},{option}")
        assert one.manager.add(spec, "test", by_hand=True) is member
        assert (member.spec, member.leaving) == (spec, False)
        await one.until_state(0, "ready")
        assert one.states(0) == ["ready", "draining", "down", "ready"]
        assert list(one.manager.members) == [0]


async def test_a_tls_change_of_a_leaving_worker_keeps_its_running_requests() -> None:
    async with fleet() as one:
        url = "https://127.0.0.1:9"
        member = one.manager.add(parse_worker_spec(url), by_hand=True)
        await one.until_state(0, "ready")
        before = member.upstream
        closed: list[Upstream] = []

        async def aclose() -> None:
            closed.append(before)

        before.aclose = aclose  # type: ignore[method-assign]
        one.manager.leave(member, "test")
        one.manager.add(parse_worker_spec(f"{url},insecure=true"), "test", by_hand=True)
        assert member.upstream is not before
        assert closed == []
        await one.until_state(0, "ready")
        await one.manager.remove(member, "test")
        assert closed == [before]


async def test_repeated_removal_does_not_lengthen_the_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet() as one:
        member = one.manager.add(parse_worker_spec(URL))
        one.manager.leave(member, "test")
        since = member.leave
        one.manager.leave(member, "test")
        assert member.leave == since


async def test_two_workers_cannot_share_a_topic_at_a_bound_endpoint() -> None:
    async with fleet(max_workers=4) as one:
        first = one.manager.add(parse_worker_spec(f"{URL},events=bind:tcp://*:5557,topic=a"))
        with pytest.raises(DuplicateWorkerError, match="worker 0 takes the events with topic 'a'"):
            one.manager.add(parse_worker_spec(f"{OTHER},events=bind:tcp://*:5557,topic=a"))
        one.manager.add(parse_worker_spec(f"{OTHER},events=bind:tcp://*:5557,topic=b"))
        one.manager.leave(first, "test")
        one.manager.add(parse_worker_spec("http://127.0.0.1:11,events=bind:tcp://*:5557,topic=a"))


async def test_leaving_workers_are_removed_once_idle() -> None:
    async with fleet() as one:
        member = one.manager.add(parse_worker_spec(URL))
        await one.until_state(0, "ready")
        one.manager.leave(member, "test")
        assert one.states(0)[-1] == "draining"
        one.manager.sweep(lambda worker_id: 1)
        await asyncio.sleep(0)
        assert member.worker_id in one.manager.members
        for _ in range(3):
            one.manager.sweep(lambda worker_id: 0)
        await one.until_state(0, "gone")
        assert one.states(0).count("gone") == 1


async def test_joins_and_removals_are_logged_as_documented(caplog) -> None:
    caplog.set_level("INFO", "router")
    async with fleet() as one:
        first = one.manager.add(parse_worker_spec(URL))
        await one.until_state(0, "ready")
        reconcile(one.manager, [])
        one.manager.sweep(lambda worker_id: 0)
        await one.until_state(0, "gone")
        second = one.manager.add(parse_worker_spec(URL), "admin request")
        await one.until_state(1, "ready")
        second.drain("admin request")
        await one.manager.remove(second, "forced by admin request")
    assert first.recognized is not None
    of_fleet = [line for line in caplog.records if line.name.startswith("router.fleet.")]
    told = [line.getMessage() for line in of_fleet]
    assert told == [
        f"worker 0 ({URL}) added, by configuration",
        f"worker 0 ({URL}) joined: {first.recognized}",
        f"worker 0 ({URL}) is draining, by configuration reload, to be removed when idle",
        f"worker 0 ({URL}) removed, idle",
        f"worker 1 ({URL}) added, by admin request",
        f"worker 1 ({URL}) joined: {first.recognized}",
        f"worker 1 ({URL}) is draining, by admin request",
        f"worker 1 ({URL}) removed, forced by admin request",
    ]
    patterns = documented_log_lines()
    assert len(patterns) == 8
    unseen = [p for p in patterns if not any(re.match(p, line) for line in told)]
    elsewhere = (
        "longer",
        "cut",
        "answer",
        "options",
    )  # tests/router/discovery/test_discovery.py, above
    assert unseen == [p for p in patterns if any(word in p for word in elsewhere)]


async def test_a_reload_changes_limits_in_place_and_other_options_by_recognition(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet() as one:
        reconcile(one.manager, [WantedWorker(parse_worker_spec(URL))])
        await one.until_state(0, "ready")
        reconcile(one.manager, [WantedWorker(parse_worker_spec(f"{URL},max_requests=3,weight=2"))])
        (member,) = one.manager.members.values()
        assert (member.worker_id, member.leaving) == (0, False)
        last = one.told[-1]
        assert isinstance(last, WorkerChange)
        assert last.spec is not None
        assert (last.state, last.spec.max_requests, last.spec.weight) == ("ready", 3, 2)
        assert one.states(0) == ["ready", "ready"]
        reconcile(one.manager, [WantedWorker(parse_worker_spec(f"{URL},block_size=64"))])
        assert one.states(0)[2:] == ["draining", "down"]
        await one.until_state(0, "ready")
        assert [m.leaving for m in one.manager.members.values()] == [False]
        (pattern,) = (pattern for pattern in documented_log_lines() if "options" in pattern)
        assert any(re.match(pattern, line) for line in caplog.messages)


async def test_limits_changed_during_recognition_are_not_lost() -> None:
    async with fleet() as one:
        reconcile(one.manager, [WantedWorker(parse_worker_spec(URL))])
        await asyncio.sleep(0)  # recognition has begun with the old ones
        reconcile(one.manager, [WantedWorker(parse_worker_spec(f"{URL},max_requests=3"))])
        await one.until_state(0, "ready")
        ready = next(f for f in one.told if isinstance(f, WorkerChange) and f.spec)
        assert ready.spec is not None
        assert ready.spec.max_requests == 3


async def test_a_reload_with_too_many_workers_reports_those_left_out() -> None:
    async with fleet(max_workers=2) as one:
        urls = [f"http://127.0.0.1:{port}" for port in (11, 12, 13)]
        refused = reconcile(one.manager, [WantedWorker(parse_worker_spec(url)) for url in urls])
        assert len(one.manager.members) == 2
        assert len(refused) == 1
        assert urls[2] in refused[0]
        assert "limits.workers" in refused[0]


async def test_a_restarted_engine_loses_its_known_cache_but_stays_in_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine whose counters show a restart is recognized again, and its cache forgotten, without
    a moment out of service; here several engines share an address, so counters differ at every
    reading.
    """
    counters = iter([5, 9, 3])
    recognitions = 0
    real = member_module.recognize

    class Reader:
        async def read(self, http: object, timeout: object) -> dict[int, RankLoad]:
            return {0: RankLoad(running=0, waiting=0, grown=next(counters, 3))}

    async def known(http: object, spec: WorkerSpec, *terms: object) -> Recognized:
        nonlocal recognitions
        recognitions += 1
        one = await real(http, spec, *terms)  # type: ignore[arg-type]
        return Recognized(one.kind, one.facts, None, loads=Reader())

    monkeypatch.setattr(member_module, "recognize", known)
    async with fleet() as one:
        one.manager.add(parse_worker_spec(URL))
        await until(lambda: recognitions == 2, "another recognition")
        await until(lambda: len(one.states(0)) == 4, "its end")
        assert one.states(0) == ["ready", "down", "ready", "ready"]
        changes = [f for f in one.told if isinstance(f, WorkerChange)]
        assert one.told.index(changes[2]) == one.told.index(changes[1]) + 1


async def test_an_idle_fleet_is_polled_for_load_less_often() -> None:
    async with fleet() as one:
        context = one.manager._context
        context.busy.clear()
        begun_s = time.monotonic()
        await context.until_scrape(is_busy=False)
        assert time.monotonic() - begun_s >= 0.159  # eight times
        context.terms = replace(context.terms, load_report_s=0.25)  # 2 s where all is quiet
        await asyncio.wait_for(context.until_scrape(is_busy=True), 1.8)  # by others' requests
        waiting = asyncio.create_task(context.until_scrape(is_busy=False))
        await asyncio.sleep(0)
        context.busy.set()
        await asyncio.wait_for(waiting, 1.8)
        await asyncio.wait_for(context.until_scrape(is_busy=False), 1.8)
