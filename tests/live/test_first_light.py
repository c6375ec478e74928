"""End-to-end tests with real programs: a request finds the worker with its prefix, and all load
counters return to zero.
"""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, until
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="session")

PREFIX = list(range(1000, 1000 + 640))  # 40 blocks of 16


@pytest.fixture
def stack(shared: Stack) -> Stack:
    return shared


async def test_a_worker_configured_by_its_url_only_is_recognized(stack) -> None:
    for row in await stack.rows():
        assert (row["kind"], row["models"], row["block_size"]) == ("warmroute", [MODEL], 16)
        assert row["events"].startswith("tcp://")
        assert row["kv_capacity_tokens"] > 100_000


async def test_the_second_request_goes_to_the_worker_whose_events_have_its_prefix(stack) -> None:
    async def explained(suffix: list[int]) -> dict:
        body = {"model": MODEL, "prompt": PREFIX + suffix, "max_tokens": 1}
        headers = {"x-warmroute-explain": "1"}
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body, headers=headers) as reply:
            explanation = decision_in(reply.headers["x-warmroute-explain"])
            usage = (await reply.json())["usage"]
            assert reply.headers["x-warmroute-worker"] == str(explanation["worker"])
            return {**explanation, "cached": usage["prompt_tokens_details"]["cached_tokens"]}

    first = await explained([1] * 20)
    assert first["expected_hit_tokens"] == 0
    assert len(first["best"]) == 3

    async def resident() -> bool:
        return (await stack.row(first["worker"]))["resident_blocks"] >= 40

    await until(resident, "the worker's own events")
    second = await explained([2] * 20)
    assert second["worker"] == first["worker"]
    assert second["expected_hit_tokens"] == second["cached"] == len(PREFIX)
    await stack.assert_idle()


async def test_streams_carry_every_token_and_usage(stack) -> None:
    body = {
        "model": MODEL,
        "prompt": [7, 8, 9],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body) as reply:
        lines = [line async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    await stack.assert_idle()


async def test_a_prompt_gives_the_same_tokens_through_the_router_and_directly(stack) -> None:
    _, through = await stack.complete([5, 6, 7], max_tokens=8)
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8}
    async with stack.http.post(f"{stack.workers[2].url}/v1/completions", json=body) as reply:
        direct = await reply.json()
    assert through["choices"][0]["text"] == direct["choices"][0]["text"]


async def test_text_without_a_tokenizer_is_routed_approximately_to_one_worker(stack) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 60
    seen = set()
    for i in range(4):
        body = {"model": MODEL, "prompt": f"{text}{i}", "max_tokens": 1}
        headers = {"x-warmroute-explain": "1"}
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body, headers=headers) as reply:
            explanation = decision_in(reply.headers["x-warmroute-explain"])
            await reply.read()
        assert explanation["approximate"]
        seen.add(explanation["worker"])
    assert len(seen) == 1


async def test_a_chat_with_an_unknown_field_is_answered(stack) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 2,
        "x_unknown": {"kept": [1, 2.50, "ü"]},
    }
    url = f"{stack.url}/v1/chat/completions"
    async with stack.http.post(url, json=body) as reply:
        answer = await reply.json()
    assert (reply.status, answer["object"]) == (200, "chat.completion")


async def test_sixty_concurrent_requests_are_spread_and_none_is_lost(stack) -> None:
    answers = await asyncio.gather(*(stack.complete([i] * 100, max_tokens=3) for i in range(60)))
    assert [status for status, _ in answers] == [200] * 60
    await stack.assert_idle()
    assert await stack.metric("warmroute_decisions_total") >= 60


async def test_models_health_and_metrics_answer(stack) -> None:
    async with stack.http.get(f"{stack.url}/v1/models") as reply:
        assert [m["id"] for m in (await reply.json())["data"]] == [MODEL]
    async with stack.http.get(f"{stack.url}/health") as reply:
        assert (await reply.json())["ready_workers"] == 3
    assert await stack.metric("warmroute_worker_kv_known") == 3
    async with stack.http.get(f"{stack.url}/metrics") as reply:
        assert reply.status == 404  # this path is the admin port's, not the clients'


async def test_explain_shows_the_latest_decisions_and_can_decide_without_dispatch(stack) -> None:
    before = [r["inflight_requests"] for r in await stack.rows()]
    body = {"model": MODEL, "prompt": PREFIX}
    tried: dict[str, Any] = {}
    hits: dict[int, int] = {}

    async def hits_are_expected() -> bool:  # the router first learns a slow worker anew
        async with stack.http.post(f"{stack.admin}/explain", json=body) as reply:
            tried.update(await reply.json())
        hits.update({one["worker"]: one["hit_tokens"] for one in tried["best"]})
        return sorted(hits.values()) == [0, 0, len(PREFIX) - 1]

    # The choice depends on loads and speeds, too, which differ on a busy machine.
    await until(hits_are_expected, "one worker to have the prompt")
    assert tried["expected_hit_tokens"] == hits[tried["worker"]]
    assert [r["inflight_requests"] for r in await stack.rows()] == before
    async with stack.http.get(f"{stack.admin}/explain?last=2") as reply:
        assert len((await reply.json())["decisions"]) == 2


async def test_a_client_that_disconnects_during_prefill_stops_the_worker(stack) -> None:
    slow = await stack.programs.start(
        "slow", "engine", engine_arguments(speed=0.01, **{"model-name": "slow"})
    )
    worker_id = await stack.add(slow.url)
    body = {"model": "slow", "prompt": [1] * 5000, "max_tokens": 2, "stream": True}
    request = asyncio.create_task(stack.http.post(f"{stack.url}/v1/completions", json=body))

    async def runs_at_worker() -> bool:
        return await metric_sum(stack.http, slow.url, "vllm:num_requests_running") == 1

    await until(runs_at_worker, "the request to run")
    request.cancel()

    async def gone() -> bool:
        left = await metric_sum(stack.http, slow.url, "vllm:num_requests_running")
        return left == 0 and (await stack.row(worker_id))["inflight_requests"] == 0

    await until(gone, "the worker to stop")
    await stack.remove(worker_id)
    slow.process.terminate()


async def test_a_client_that_disconnects_during_the_stream_stops_the_worker(stack) -> None:
    body = {"model": MODEL, "prompt": [3] * 50, "max_tokens": 20_000, "stream": True}
    reply = await stack.http.post(f"{stack.url}/v1/completions", json=body)
    await reply.content.readline()
    reply.close()
    await stack.assert_idle()


async def test_a_draining_worker_finishes_its_requests_and_takes_no_new_ones(stack) -> None:
    extra = await stack.programs.start("extra", "engine", engine_arguments())
    worker_id = await stack.add(extra.url)
    async with stack.http.post(f"{stack.admin}/workers/{worker_id}/drain") as reply:
        assert (await reply.json())["state"] == "draining"
    for i in range(12):
        await stack.complete([i] * 40)
    assert await metric_sum(stack.http, extra.url, "vllm:request_success_total") == 0
    async with stack.http.delete(f"{stack.admin}/workers/{worker_id}") as reply:
        assert reply.status == 202

    async def gone() -> bool:
        return worker_id not in [row["id"] for row in await stack.rows()]

    await until(gone, "the drained worker to leave")
    extra.process.terminate()


async def test_requests_move_from_a_killed_worker_which_is_used_again_after_restart(stack) -> None:
    """No request is lost when a worker is killed under load, and the worker is used again after its
    restart.
    """
    victim = await stack.programs.start("victim", "engine", engine_arguments())
    port = victim.url.rpartition(":")[2]
    worker_id = await stack.add(victim.url)
    requests = [asyncio.create_task(stack.complete([i] * 200, max_tokens=4)) for i in range(40)]
    victim.process.send_signal(signal.SIGKILL)
    answers = await asyncio.gather(*requests)
    statuses = {status for status, _ in answers}
    assert statuses == {200}
    await stack.until_state(worker_id, "down")
    await stack.programs.start("victim-again", "engine", engine_arguments(port=port))
    await stack.until_state(worker_id, "ready")

    async def known() -> bool:
        row = await stack.row(worker_id)
        return bool(row["kv_known"]) and row["resident_blocks"] == 0

    await until(known, "the new worker's empty cache")
    await stack.assert_idle()
    await stack.remove(worker_id)


async def test_the_doctor_examines_the_workers_of_a_router(stack) -> None:
    """The doctor examines the workers of a router, one examination at a time, and reports a pool
    without load as idle.
    """
    url = f"{stack.admin}/doctor"

    async def examined(query: str, **headers: str) -> tuple[int, Any]:
        async with stack.http.get(f"{url}{query}", headers=headers) as reply:
            return reply.status, await reply.json()

    answers = await asyncio.gather(*(examined("?seconds=0.4") for _ in range(2)))
    (status, report), refused = sorted(answers, key=lambda one: one[0])
    assert (status, refused[0]) == (200, 409)
    assert (report["loaded"], report["findings"]) == (False, [])
    assert not any("--router" in one for one in report["not_looked_at"])
    for wrong in ("?seconds=0", "?seconds=nan", "?seconds=31", "?seconds=x"):
        assert (await examined(wrong))[0] == 400
    assert (await examined("", **{"Sec-Fetch-Site": "cross-site"}))[0] == 403
