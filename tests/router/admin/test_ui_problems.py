"""Tests of the problems in `/ui/state`: what is wrong, where, why, since when, and a link to the
runbook.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from policies.facts import Silence
from router.admin.ui.problems import KINDS
from router.engines.worker_spec import parse_worker_spec
from tests.router.crowded import Crowd, crowd

ROOT = Path(__file__).parents[3]


async def problems_by_kind(one: Crowd) -> dict[str, Any]:
    """Return the problems on the page at `/ui`, by kind."""
    await one.second()
    return {kind["kind"]: kind for kind in (await one.ui_state())["frame"]["wrong"]}


def pass_time(one: Crowd, seconds: float) -> None:
    """Let `seconds` pass for the page at `/ui`."""
    problems = one.router.admin.ui.problems
    for key in problems._since:
        problems._since[key] -= seconds


async def test_a_healthy_fleet_has_no_problems() -> None:
    async with crowd(4) as one:
        for _ in range(20):
            await one.send()
        assert await problems_by_kind(one) == {}
        one.state(1, "draining")  # as an operator wishes
        assert await problems_by_kind(one) == {}


async def test_a_worker_that_is_down_is_shown_with_its_reason_and_duration() -> None:
    async with crowd(3) as one:
        one.state(2, "down")
        await problems_by_kind(one)
        one.router.fleet.members[2].trouble = "nobody listens there"
        pass_time(one, 90.0)
        down = (await problems_by_kind(one))["down"]
        assert (down["count"], down["runbook"]) == (1, "WarmrouteWorkerDown")
        (row,) = down["rows"]
        assert row["worker"] == 2
        assert row["where"] == one.router.fleet.members[2].spec.name
        assert "nobody listens there" in row["why"]
        assert 90.0 <= row["for_s"] < 120.0
        frame = (await one.ui_state())["frame"]
        assert "nobody listens there" in frame["troubles"]["2"]
        one.state(2, "ready")
        assert await problems_by_kind(one) == {}


async def test_of_a_thousand_workers_down_a_few_are_listed_and_all_counted() -> None:
    async with crowd(1000) as one:
        for worker in range(900):
            one.state(worker, "down")
        told = await problems_by_kind(one)
        assert told["down"]["count"] == 900
        assert len(told["down"]["rows"]) == 8
        frame = (await one.ui_state())["frame"]
        assert len(frame["troubles"]) == 100


async def test_a_lack_of_ready_workers_is_a_problem_only_once_it_lasts() -> None:
    async with crowd(2) as one:
        one.state(0, "down")
        one.state(1, "down")
        assert "unready" not in await problems_by_kind(one)
        pass_time(one, 5.0)
        unready = (await problems_by_kind(one))["unready"]
        assert unready["rows"][0]["why"] == "no worker takes requests"


async def test_a_model_with_most_workers_silent_is_in_panic() -> None:
    async with crowd(3) as one:
        for worker in (0, 1):
            now_s = one.router.dispatcher.clock()
            one.router.dispatcher.handle_fact(Silence(now_s, worker, 1, 2))
        told = await problems_by_kind(one)
        assert told["panic"]["rows"][0]["where"] == "m"
        assert told["silent"]["count"] == 2
        assert list(told) == [kind for kind in KINDS if kind in told], "the worst comes first"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("hold_timeout", "saturated"),
        ("out_of_files", "out_of_files"),
        ("worker_error", "refused"),
        ("model_not_found", None),
        ("draining", None),
    ],
)
async def test_refusals_of_the_last_minute_are_counted_by_cause(
    code: str, kind: str | None
) -> None:
    async with crowd(2) as one:
        await one.second()
        for _ in range(7):
            one.router.dispatcher.core.counters.rejected(code)
        told = await problems_by_kind(one)
        assert list(told) == ([] if kind is None else [kind])
        if kind is not None:
            (row,) = told[kind]["rows"]
            assert row["where"] == code
            assert row["why"].startswith("7 requests in the last minute: ")
        one.router.admin.ui.problems.look(one.router.dispatcher.clock() + 61.0)
        told = await one.ui_state()  # of the sample before
        assert one.router.admin.ui.problems.shown(0.0)["wrong"] == []


async def test_errors_of_the_router_and_its_policy_are_shown() -> None:
    async with crowd(2) as one:
        await one.second()
        one.router.metrics.requests.faulty(500)
        assert "defect" in await problems_by_kind(one)


async def test_a_worker_with_most_of_the_load_is_hot_only_once_it_lasts() -> None:
    async with crowd(4, policy="kv_prefix") as one:
        for _ in range(40):
            await one.send("one-session")
        requests = one.router.dispatcher.core.columns.requests
        requests[:4] = (40, 1, 1, 1)
        assert "hot" not in await problems_by_kind(one)
        pass_time(one, 31.0)
        (row,) = (await problems_by_kind(one))["hot"]["rows"]
        assert row["why"] == "40 requests, where the mean is 10.8"
        requests[:4] = (10, 10, 10, 10)
        assert "hot" not in await problems_by_kind(one)


async def test_missing_or_stopped_kv_events_are_shown() -> None:
    async with crowd(4) as one:
        worker = one.router.dispatcher.core.workers.get(3)
        assert worker is not None
        assert worker.facts.has_events
        assert await problems_by_kind(one) == {}
        pass_time(one, 61.0)
        missed = (await problems_by_kind(one))["events_missed"]
        assert missed["rows"][0]["worker"] == 3
        assert missed["rows"][0]["why"].startswith("they have not come again: ")
        worker.kv.unheard = True
        await problems_by_kind(one)
        pass_time(one, 4.0)
        lost = (await problems_by_kind(one))["events_lost"]
        assert lost["rows"][0]["why"].startswith("the connection to them is lost")


async def test_a_failing_source_and_a_replica_link_that_is_down_are_shown() -> None:
    async with crowd(1) as one:
        problems = one.router.admin.ui.problems
        problems.sources = lambda: [{"source": "dns", "trouble": "no answer"}, {"source": "file"}]
        problems.replicas = lambda: [{"name": "a (this router)", "state": "link down for 9 s"}]
        told = await problems_by_kind(one)
        assert told["source"]["rows"][0]["why"] == "no answer"
        assert told["replicas"]["rows"][0]["why"] == "link down for 9 s"


async def test_an_unrecognized_worker_is_shown_only_once_it_has_a_reason() -> None:
    async with crowd(1) as one:
        worker_id = one.router.fleet.add(parse_worker_spec("http://127.9.0.1:9")).worker_id
        assert await problems_by_kind(one) == {}
        one.router.fleet.members[worker_id].trouble = "it serves no model"
        await problems_by_kind(one)
        pass_time(one, 4.0)
        (row,) = (await problems_by_kind(one))["unrecognized"]["rows"]
        assert (row["worker"], row["why"]) == (worker_id, "it serves no model")


def test_the_runbook_has_a_heading_for_each_problem() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    headings = set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert {kind.runbook for kind in KINDS.values()} <= headings


async def test_the_root_page_shows_links_without_a_key(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-one operator\n")
    async with crowd(1, admin_keys_file=str(keys)) as one:
        async with one.http.get(f"{one.url}/") as reply:
            assert reply.status == 200
            assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
            page = await reply.text()
        for path in ("ui", "metrics", "workers"):
            assert f'href="{path}"' in page
        assert "POST <code>/drain</code>" in page
        assert "DELETE, GET <code>/workers/{id}</code>" in page
        assert one.router.fleet.members[0].spec.url not in page, "it has no data"
