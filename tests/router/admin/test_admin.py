"""Tests of the admin port over real HTTP: adding and removing workers, errors with reasons, invalid
input.
"""

from __future__ import annotations

import pytest

from policies.facts import Arrival, Finish
from tests.router.admin_port import BODY_BYTES, URL, admin
from tests.router.core.core_world import BLOCK, chain_of


async def test_a_worker_is_added_drained_and_removed() -> None:
    async with admin() as one:
        worker_id = await one.join({"url": URL, "max_requests": 3})
        assert worker_id == 0
        _, listed = await one.request("GET", "/workers")
        (row,) = listed["workers"]
        assert (row["id"], row["url"], row["state"]) == (0, URL, "ready")
        _, drained = await one.request("POST", "/workers/0/drain")
        assert drained["leaving"] is False
        status, leaving = await one.request("DELETE", "/workers/0")
        assert (status, leaving["leaving"]) == (202, True)
        status, gone = await one.request("DELETE", "/workers/0?force=true")
        assert (status, gone["state"]) == (200, "gone")
        assert (await one.request("GET", "/workers/0"))[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/workers", "ftp://x", 400, "http"),
        ("POST", "/workers", f"{URL},color=red", 400, "color"),
        ("POST", "/workers", {"url": URL, "weight": "heavy"}, 400, "weight"),
        ("POST", "/workers", [1], 400, "mapping"),
        ("POST", "/workers", "http://" + "a" * 64 + ".example", 400, "url"),  # no such host name
        ("GET", "/workers/9", None, 404, "ids: none"),
        ("GET", "/workers/-1", None, 404, "no worker"),
        ("GET", "/workers/%D9%A3", None, 404, "no worker"),
        ("GET", "/workers/" + "9" * 40, None, 404, "no worker"),
        ("DELETE", "/workers/x", None, 404, "no worker"),
        ("GET", "/explain?last=0", None, 400, "last"),
        ("GET", "/explain?last=1001", None, 400, "last"),
        ("GET", "/explain?last=x", None, 400, "last"),
        ("POST", "/explain", {"model": "m", "prompt": [1]}, 409, "no worker"),
        ("POST", "/explain", {"model": "m", "prompt": 5}, 400, "prompt"),
        ("POST", "/explain", {"prompt": "x" * BODY_BYTES}, 413, "larger"),
        ("PUT", "/workers", None, 405, "takes"),
        ("GET", "/nothing", None, 404, "not served"),
    ],
)
async def test_bad_input_gets_an_error_with_a_reason(method, path, body, status, says) -> None:
    async with admin() as one:
        got, answer = await one.request(method, path, body)
        assert got == status, answer
        assert says in answer["error"]["message"]


async def test_the_workers_page_shows_the_configured_limits() -> None:
    async with admin() as one:
        await one.join({"url": URL, "max_requests": 3, "max_kv_fraction": 0.5})
        keys = ("max_requests", "max_queued_tokens", "max_kv_fraction", "weight")
        _, row = await one.request("GET", "/workers/0")
        assert [row[key] for key in keys] == [3, None, 0.5, 1]


async def test_an_unquoted_url_is_refused_with_the_json_to_send() -> None:
    async with admin() as one:
        as_json = {"Content-Type": "application/json"}
        for data, form in (
            (f"{URL},weight=2", f'"{URL},weight=2"'),
            ("http://me:secret@h", '"http://127.0.0.1:8003"'),
        ):
            status, answer = await one.request("POST", "/workers", data=data, headers=as_json)
            assert status == 400
            assert f"as in {form} (for curl: -d '{form}')" in answer["error"]["message"]
            assert "secret" not in answer["error"]["message"]
        assert (await one.request("POST", "/workers", data=f'"{URL}"', headers=as_json))[0] == 201


async def test_invalid_json_or_a_missing_json_content_type_is_refused() -> None:
    async with admin() as one:
        as_json = {"Content-Type": "application/json"}
        for data in (b"", b"{", b"\xff", b"[" * 4000):
            status, _ = await one.request("POST", "/workers", data=data, headers=as_json)
            assert status == 400, data
        assert (await one.request("POST", "/workers", data=b'"http://h"'))[0] == 415


async def test_a_duplicate_worker_and_one_above_the_limit_are_refused() -> None:
    async with admin() as one:
        await one.join()
        status, answer = await one.request("POST", "/workers", URL)
        assert (status, answer["error"]["code"]) == (409, "worker_refused")
        await one.join("http://127.0.0.1:10")
        status, answer = await one.request("POST", "/workers", "http://127.0.0.1:11")
        assert status == 409
        assert "limits.workers" in answer["error"]["message"]


async def test_force_must_be_true_or_false() -> None:
    async with admin() as one:
        await one.join()
        status, answer = await one.request("DELETE", "/workers/0?force=yes")
        assert (status, answer["error"]["param"]) == (400, "force")


async def test_requests_from_other_origins_cannot_change_workers() -> None:
    async with admin() as one:
        await one.join()
        page = {"Origin": "http://evil.example"}
        for method, path in (("POST", "/workers/0/drain"), ("DELETE", "/workers/0?force=true")):
            assert (await one.request(method, path, headers=page))[0] == 403
        assert (await one.request("GET", "/workers/0"))[1]["state"] == "ready"


async def test_explain_changes_no_ledger_and_records_no_decision() -> None:
    async with admin() as one:
        await one.join()
        body = {"model": "m", "prompt": list(range(20))}
        for _ in range(3):
            status, answer = await one.request("POST", "/explain", body)
            assert (status, answer["worker"], answer["expected_hit_tokens"]) == (200, 0, 0)
        _, latest = await one.request("GET", "/explain")
        assert latest["decisions"] == []
        core = one.router.dispatcher.core
        assert core.inflight_requests == len(core.ledger) == 0
        _, health = await one.request("GET", "/health")
        assert health == {"status": "ok", "ready_workers": 1, "workers": 1}


async def test_ticks_are_rarer_while_no_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with admin() as one:
        router = one.router
        await one.join()
        with monkeypatch.context() as patched:
            patched.setattr("router.assembly.asyncio.sleep", sleep)
            await router._until_tick()
            assert slept == [router.config.intervals.tick_s] * 10  # half a second
            slept.clear()
            router.dispatcher.core.on_arrival(Arrival(0.0, 1, "m", 1, {BLOCK: chain_of([1])}))
            await router._until_tick()
            assert slept == [router.config.intervals.tick_s]
            router.dispatcher.core.on_finish(Finish(0.0, 1))
            assert router.dispatcher.core.is_quiet
