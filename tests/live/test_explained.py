"""Tests of the explanations of routing decisions, in every place where a running router
shows them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.live.stack import MODEL, Stack, running, until
from tests.told_decision import decision_in

ASK = "x-warmroute-explain"


async def explanation_in_header(stack: Stack, prompt: list[int], how: str = "1") -> dict[str, Any]:
    """Send a streamed request, read it to its end and return the explanation in its header."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body, headers={ASK: how}) as reply:
        await reply.read()
        return decision_in(reply.headers[ASK])


async def page(stack: Stack, query: str) -> tuple[int, dict[str, Any]]:
    async with stack.http.get(f"{stack.admin}/explain?{query}") as reply:
        return reply.status, await reply.json()


async def answered(stack: Stack, request: int) -> dict[str, Any]:
    """Wait until the router has recorded a request's end, and return its decision record."""
    kept: dict[str, Any] = {}

    async def ended() -> bool:
        status, answer = await page(stack, f"request={request}")
        assert status == 200
        (found,) = answer["decisions"]
        kept.update(found)
        return "first_token_s" in kept and kept["first_token_s"] is not None

    await until(ended, f"the end of request {request}")
    return kept


async def test_the_explain_header_the_admin_page_and_the_log_agree(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    async with running(
        tmp_path, workers=2, router=["--policy", "hybrid", "--request-log", str(log)]
    ) as stack:
        short = await explanation_in_header(stack, list(range(100)))
        assert short["best"][0]["terms"].keys() == {"missing_s", "queued_s", "requests_s"}
        assert "columns" not in short
        full = await explanation_in_header(stack, list(range(100)), "full")
        assert full["columns"][str(full["worker"])]["hit_tokens"] == full["expected_hit_tokens"]
        kept = await answered(stack, full["request"])
        assert kept["why"].startswith(f"worker {full['worker']} holds ")
        assert {name: kept[name] for name in short} == {name: full[name] for name in short}
        assert [row["worker"] for row in kept["workers"]] == [one["worker"] for one in kept["best"]]
        assert kept["hits"]["mode"] == "exact"  # of a prompt of token ids
        async with stack.http.post(f"{stack.admin}/explain", json={"prompt": "text"}) as reply:
            would = await reply.json()
        assert would["hits"]["cause"] == "no-tokenizer"
        assert " holds about 0 of 1 block; " in would["why"]
        assert kept["considered_workers"] == 2
        assert kept["unit"] == "s"
        expected_s = kept["first_token_s"] - kept["best"][1]["cost"]
        assert abs(kept["regret_s"] - expected_s) < 1e-4
        assert kept["prompt_tokens"] == kept["worker_prompt_tokens"] == 100
        assert kept["regret_hit_tokens"] == max(
            kept["best"][1]["hit_tokens"] - kept["cached_tokens"], 0
        )
        stack.router.process.terminate()
        assert await stack.router.process.wait() == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()][1:]
        assert len(lines) == 2
        assert lines[1]["explained"]["workers"] == kept["workers"]
        assert abs(lines[1]["regret_ms"] - 1e3 * kept["regret_s"]) < 1.0
        assert lines[1]["regret_hit_tokens"] == kept["regret_hit_tokens"]
        assert 0 <= lines[1]["sent_ms"] < lines[1]["ttft_ms"]


async def test_every_nth_decision_is_kept_with_all_workers_for_the_operator(tmp_path: Path) -> None:
    async with running(
        tmp_path, workers=2, router=["--policy", "hybrid", "--explain-every", "3"]
    ) as stack:
        for number in range(6):
            assert (await stack.complete([number]))[0] == 200
        kept = [(await page(stack, f"request={n}"))[1]["decisions"][0] for n in range(6)]
        assert ["workers" in one for one in kept] == [True, False, False] * 2
        assert (await page(stack, "request=6"))[0] == 404
        assert (await page(stack, "request=x"))[0] == 400
        assert (await page(stack, "request=" + "9" * 40))[0] == 400


async def test_clients_without_the_right_to_explanations_get_none(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, router=["--explain", "false"]) as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
        for how in ("1", "full"):
            url = f"{stack.url}/v1/completions"
            async with stack.http.post(url, json=body, headers={ASK: how}) as reply:
                assert reply.status == 200
                assert ASK not in reply.headers
        assert "workers" not in (await page(stack, "request=0"))[1]["decisions"][0]


async def test_a_held_request_is_explained_while_it_waits_and_in_its_refusal(
    tmp_path: Path,
) -> None:
    policy = ["--policy", "tests.live.holding:hold_all", "--limits-hold-s", "1.5"]
    async with running(tmp_path, workers=2, router=policy) as stack:
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1}
        url = f"{stack.url}/v1/completions"
        asking = asyncio.ensure_future(stack.http.post(url, json=body, headers={ASK: "1"}))

        async def waits() -> bool:
            return await stack.metric("warmroute_held_requests") == 1

        await until(waits, "the request to wait")
        status, answer = await page(stack, "request=0")
        assert status == 200
        assert answer["held"] is True
        assert answer["policy"] == "tests.live.holding:hold_all"
        assert answer["held_s"] > 0
        assert [row["cost"] for row in answer["workers"]] == [None, None]
        reply = await asking
        assert reply.status == 503
        shown = decision_in(reply.headers[ASK])
        assert shown["held"] is True
        assert shown["held_s"] >= 1.5
        async with stack.http.post(f"{stack.admin}/explain", json=body) as tried:
            assert (await tried.json())["held"] is True
