"""Tests of `/ui` and `/ui/state`: which data pages get, how often it is computed, and which
requests are forbidden.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from pathlib import Path

import pytest

from router.admin.ui import fleet as frame
from router.admin.ui import state
from router.admin.ui.samples import COLUMNS
from router.engines.worker_spec import parse_worker_spec
from tests.router.crowded import Crowd, crowd


async def test_a_page_gets_everything_once_and_then_only_changes() -> None:
    async with crowd(3) as one:
        await one.second()
        first = await one.ui_state()
        assert first["columns"] == list(COLUMNS)
        assert [name[0] for name in first["names"]] == [0, 1, 2]
        assert len(first["history"]) == first["frame"]["sample"] == 1
        known = f"?boot={first['boot']}&since=1&names={first['frame']['version']}"
        assert await one.ui_state(known) is None
        await one.second()
        await one.second()
        more = await one.ui_state(known)
        assert "names" not in more
        assert (more["frame"]["sample"], len(more["history"])) == (3, 2)
        one.join()
        await one.second()
        joined = await one.ui_state(known.replace("since=1", "since=3"))
        assert len(joined["names"]) == len(joined["frame"]["workers"]["state"]) == 4
        assert len(joined["history"]) == 1


async def test_a_page_from_before_a_restart_gets_everything_again() -> None:
    async with crowd(2) as one:
        await one.second()
        told = await one.ui_state("?boot=another&since=800&names=9")
        assert len(told["history"]) == 1
        assert len(told["names"]) == 2
        later = await one.ui_state(f"?boot={told['boot']}&since=999999999999999&names=1")
        assert later["history"] == []


@pytest.mark.parametrize("query", ["since=-1", "since=x", "names=1.5", "since=" + "9" * 16])
async def test_the_error_for_an_invalid_number_contains_the_parameter(query: str) -> None:
    async with crowd(1) as one, one.http.get(f"{one.url}/ui/state?{query}") as reply:
        assert reply.status == 400
        assert query.partition("=")[0] in (await reply.json())["error"]["message"]


async def test_the_columns_agree_with_the_workers_endpoint() -> None:
    async with crowd(30, policy="hybrid") as one:
        for _ in range(60):
            await one.send()
        for request in one.requests[::2]:
            request.ticket.first_token(one.router.dispatcher.clock())
        one.state(4, "down")
        one.state(5, "draining")
        one.router.fleet.add(parse_worker_spec("http://127.9.0.1:9"))
        one.router.fleet.leave(one.router.fleet.members[6], "test")
        await one.second()
        told = await one.ui_state()
        columns = told["frame"]["workers"]
        async with one.http.get(f"{one.url}/workers") as reply:
            rows = (await reply.json())["workers"]
        assert len(rows) == len(told["names"]) == 31
        states = [columns["states"][n] for n in columns["state"]]
        for n, row in enumerate(rows):
            name = told["names"][n]
            assert name[:4] == [row["id"], row["url"], row["rank"], row.get("kind")]
            expected = "leaving" if row["leaving"] else row["state"]
            assert states[n] == expected
            if expected == "joining":
                assert columns["requests"][n] == columns["kv"][n] == -1
                continue
            assert columns["requests"][n] == row["inflight_requests"]
            assert columns["waiting"][n] == row["waiting_requests"]
            assert columns["context_tokens"][n] == pytest.approx(row["context_tokens"], abs=1)
            assert columns["queued_tokens"][n] <= columns["waiting"][n] * 10_000
            used = row["kv_used_tokens"] / row["kv_capacity_tokens"]
            assert columns["kv"][n] == pytest.approx(1e3 * used, abs=0.51)
            exactness = told["frame"]["exactness"]
            kind = exactness["rows"][n]
            assert (None if kind < 0 else exactness["kinds"][kind]) == row["hits"]
            assert columns["index"][n] == ("1" if row["kv_known"] else "0" if n % 7 == 3 else "-")


async def test_decisions_are_counted_and_show_their_tenant() -> None:
    async with crowd(2) as one:
        for n in range(50):
            await one.send(tenant=f"team-{n}")
        await one.second()
        told = (await one.ui_state())["frame"]["decisions"]
        assert told["added"] == 50
        assert [row["tenant"] for row in told["rows"]] == [f"team-{n}" for n in range(49, 9, -1)]
        assert told["outcomes"] == [[None, None, None]] * 50
        one.answer(0.1)  # the oldest five
        await one.second()
        told = (await one.ui_state())["frame"]["decisions"]
        assert all(s > 0 and of > tokens >= 0 for s, tokens, of in told["outcomes"][-5:])
        assert told["outcomes"][:-5] == [[None, None, None]] * 45


async def test_holders_of_a_trunk_are_the_workers_that_have_its_blocks() -> None:
    async with crowd(11, policy="warmset") as one:
        for n in range(60):
            await one.send(f"session-{n}")
        await one.second()
        told = (await one.ui_state())["frame"]["trunks"]
        assert told["followed"]
        caches = one.router.dispatcher.core.caches
        assert told["rows"]
        for row in told["rows"]:
            bits = bin(int("1" + row["holders"], 16))[3:]
            held = {n for n, bit in enumerate(bits) if bit == "1"}
            slots = caches.holders(int(row["hash"], 16))
            workers = one.router.dispatcher.core.workers
            assert held == {w.worker_id for w in workers if slots[w.slot]}
            assert row["copies"] == len(held) > 0


async def test_several_pages_share_one_frame_and_without_pages_none_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    real = frame.columns
    monkeypatch.setattr(frame, "columns", lambda *a: made.append(1) or real(*a))
    async with crowd(3) as one:
        for _ in range(5):
            await one.second()
        assert not made
        for _ in range(4):
            await one.ui_state()
        assert len(made) == 1
        await one.second()
        for _ in range(4):
            await one.ui_state()
        assert len(made) == 2


async def test_a_router_without_workers_still_has_a_page() -> None:
    async with crowd(0, policy="warmset") as one:
        await one.second()
        told = await one.ui_state()
        assert told["names"] == told["frame"]["workers"]["state"] == []
        assert told["history"][0][COLUMNS.index("imbalance")] is None
        assert told["frame"]["readiness"]["ready"] is False


async def test_a_failed_sample_is_logged_and_sampling_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state, "SAMPLE_S", 0.01)
    async with crowd(1) as one:
        ui, real, asked = one.router.admin.ui, one.router.admin.ui.sample, []
        enough = asyncio.Event()

        def sample() -> None:
            asked.append(1)
            if len(asked) == 2:
                raise ZeroDivisionError
            real()
            if ui.sampler.history.taken == 3:
                enough.set()

        monkeypatch.setattr(ui, "sample", sample)
        running = asyncio.create_task(ui.run())
        await enough.wait()
        running.cancel()
        await asyncio.wait([running])
        assert ui.sampler.history.taken == len(asked) - 1
        assert "no sample for the page" in caplog.text


async def test_replicas_are_shown_if_there_are_any() -> None:
    async with crowd(1) as one:
        one.router.admin.ui.problems.replicas = lambda: [
            {"name": "b", "age_s": 0.5, "stale": False}
        ]
        await one.second()
        assert (await one.ui_state())["frame"]["replicas"][0]["name"] == "b"


async def test_the_page_needs_no_key_but_its_data_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-one operator\n")
    async with crowd(1, admin_keys_file=str(keys)) as one:
        assert (await page_of(one))[0] == 200
        for header, status in (({}, 401), ({"Authorization": "Bearer secret-one"}, 200)):
            async with one.http.get(f"{one.url}/ui/state", headers=header) as reply:
                assert reply.status == status


async def test_the_page_is_self_contained_and_its_csp_has_its_hashes() -> None:
    async with crowd(1) as one:
        status, headers, text = await page_of(one)
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for element in ("script", "style"):
        (inside,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
        assert len(inside) > 5_000
    assert not re.findall(r"<[^>]+\son\w+=", text)
    assert not re.findall(r"<[^>]+\sstyle=", text)
    assert set(re.findall(r"https?://[^\s\"'<>`]+", text)) == {"http://www.w3.org/2000/svg"}
    for name in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert name not in text
    assert headers["X-Content-Type-Options"] == "nosniff"


async def page_of(one: Crowd) -> tuple[int, dict[str, str], str]:
    async with one.http.get(f"{one.url}/ui") as reply:
        return reply.status, dict(reply.headers), await reply.text()
