"""Tests of what load reports show besides load: faults in them, and a restart of the engine."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from engine.wire.metrics import process_start_s
from policies.facts import LoadReport, WorkerChange
from router.engines.adapter import RankLoad
from router.engines.worker_spec import parse_worker_spec
from router.fleet.context import WorkerFact
from router.fleet.load_reports import SeenFigures
from router.fleet.member import Member
from tests.router.engines.engine_pages import CUT, HANGS, Pages, engine
from tests.router.fleet.fleet_support import fleet_of
from tests.router.vllm_pages import METRICS, VLLM
from tests.router.waiting import until

START = "# HELP process_start_time_seconds x\nprocess_start_time_seconds"


@asynccontextmanager
async def ready_worker(pages: Pages) -> AsyncIterator[tuple[Member, list[WorkerFact]]]:
    async with engine(pages) as url, fleet_of(2) as (manager, told):
        member = manager.add(parse_worker_spec(url))
        await until(lambda: any(isinstance(fact, LoadReport) for fact in told), "its load")
        yield member, told


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (HANGS, "its load figures do not come: no answer within 0.5 s"),
        (CUT, "its load figures "),
        (500, "its load figures are of no use: GET "),
        ("<html>", "its load figures are of no use: "),
        (METRICS.replace("0.5", "7.5"), "its load figures are of no use: KV usage is 7.5"),
    ],
    ids=["hangs", "cut", "500", "html", "nonsense"],
)
async def test_missing_load_reports_are_logged_once_with_advice(
    page: object, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = {**VLLM, "/health": "ok"}
    caplog.set_level("INFO")
    async with ready_worker(pages) as (member, _):
        for times in (1, 2):
            pages["/metrics"] = page
            await until(lambda: says in member.advice, "it to be said")
            assert "metrics=URL" in member.advice
            missed = member.figures.missed
            await until(lambda missed=missed: member.figures.missed > missed + 1, "more of them")
            assert caplog.text.count("its load figures ") == 2 * times - 1
            assert member.ready
            pages["/metrics"] = METRICS
            await until(lambda: "its load figures" not in member.advice, "its figures")
            assert caplog.text.count("its load figures can be read again") == times


async def test_an_invalid_gzip_load_report_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pages = {**VLLM, "/health": "ok"}
    body = b"this is no gzip"
    async with ready_worker(pages) as (member, _):

        async def compressed() -> web.Response:
            return web.Response(body=body, headers={"Content-Encoding": "gzip"})

        pages["/metrics"] = compressed
        await until(lambda: "are of no use" in member.advice, "it to be said")
        assert caplog.text.count("its load figures are of no use") == 1


def test_a_single_late_load_report_is_not_an_error() -> None:
    seen = SeenFigures(0, "w")
    seen.failed(TimeoutError(), "http://w/metrics", 2.0)
    seen.note_readable_report()
    seen.failed(TimeoutError(), "http://w/metrics", 2.0)
    assert seen.trouble == ""
    seen.failed(TimeoutError(), "http://w/metrics", 2.0)
    assert "no answer within 2 s" in seen.trouble


@pytest.mark.parametrize(
    ("text", "start_s"),
    [
        ("", math.nan),
        (f"{START} 1.7643e+09\n", 1.7643e9),
        (f"a 1\n{START} 1764300000.25", 1764300000.25),
        (f'{START}{{pid="7"}} 12.5 1700000000000\n', 12.5),
        (f"{START} 5\n{START} 5\n", 5.0),
        (f'{START}{{pid="1"}} 5\n{START}{{pid="2"}} 6\n', math.nan),  # of several processes
        (f"{START} NaN\n", math.nan),
        (f"{START} -3\n", math.nan),
        ("other_process_start_time_seconds 5\n", math.nan),
        ("process_start_time_seconds_total 5\n", math.nan),
        ("process_start_time_seconds", math.nan),
        ("process_start_time_seconds{", math.nan),
        ("process_start_time_seconds 1e", math.nan),
    ],
)
def test_the_process_start_time_is_read_from_the_metrics(text: str, start_s: float) -> None:
    assert process_start_s(text) == pytest.approx(start_s, abs=0.0, nan_ok=True)


async def test_a_later_process_start_is_a_restart_whatever_the_counters() -> None:
    pages = {**VLLM, "/health": "ok", "/metrics": f"{METRICS}{START} 1000\n"}
    async with ready_worker(pages) as (_, told):
        states = [fact.state for fact in told if isinstance(fact, WorkerChange)]
        assert states == ["ready"]
        reports = [fact.started_s for fact in told if isinstance(fact, LoadReport)]
        assert set(reports) == {1000.0}
        pages["/metrics"] = f"{METRICS}{START} 1001\n"
        await until(
            lambda: (
                [f.state for f in told if isinstance(f, WorkerChange)]
                == ["ready", "down", "ready", "ready"]
            ),
            "its cache to be forgotten",
        )
        latest = len(told)
        await until(
            lambda: any(isinstance(f, LoadReport) and f.started_s == 1001 for f in told[latest:]),
            "its load",
        )


async def test_several_engines_behind_one_address_do_not_count_as_restarts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Several engines behind one address do not look like restarts of one engine: a proxy passes
    each request to another engine.
    """
    turn = 0

    async def by_turns() -> str:
        nonlocal turn
        turn += 1
        return f"{METRICS}{START} {1000 + turn % 2}\n"

    pages = {**VLLM, "/health": "ok", "/metrics": by_turns}
    async with ready_worker(pages) as (_, told):
        await until(lambda: turn > 40, "many answers")
        states = [fact.state for fact in told if isinstance(fact, WorkerChange)]
        assert states.count("down") <= 1
        assert caplog.text.count("several processes report its load in turn") == 1
        assert math.isnan([f for f in told if isinstance(f, LoadReport)][-1].started_s)


def test_ranks_of_one_process_share_its_start() -> None:
    seen = SeenFigures(0, "w")
    loads = [RankLoad(1, 0, started_s=start_s) for start_s in (50.0, 50.0, 49.9, 51.0, 40.0, 60.0)]
    found = [seen.start_of(load) for load in loads]
    assert found[:4] == [50.0, 50.0, 49.9, 51.0]
    assert all(map(math.isnan, found[4:]))
