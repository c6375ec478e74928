"""What a key allows is counted once, by however many processes its requests come in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from tests.live.stack import MODEL, Stack, running, until

FEW, TOKENS, TWO, NAMED = "sk-few-aaaaaaaa", "sk-tokens-bbbbb", "sk-two-cccccccc", "grey"
THREE = ["--processes", "3", "--trusted-peers", "127.0.0.0/8"]
LINES = f"""{FEW} blue requests_per_s=0.01 requests_burst=7
{TOKENS} green tokens_per_s=0.01 tokens_burst=1000
{TWO} red inflight=2
- {NAMED} requests_per_s=0.01 requests_burst=3
"""


async def asked(stack: Stack, headers: dict[str, str], **fields: Any) -> tuple[int, Any, Any]:
    """(status, JSON, headers) of a completion on a connection of its own."""
    body = {"model": MODEL, "prompt": [1] * 10, "max_tokens": 2} | fields
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as reply,
    ):
        return reply.status, await reply.json(), reply.headers


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_processes_count_what_a_key_uses_as_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(LINES)
    router = [*THREE, "--api-keys-file", str(keys)]
    async with running(tmp_path, workers=1, router=router) as stack:
        for headers, burst in ((bearer(FEW), 7), ({"x-tenant": NAMED}, 3)):
            answers = await asyncio.gather(*(asked(stack, headers) for _ in range(30)))
            statuses = [status for status, _, _ in answers]
            assert (statuses.count(200), statuses.count(429)) == (burst, 30 - burst)
            for status, body, told in answers:
                assert told["x-ratelimit-limit-requests"] == str(burst)
                if status == 429:
                    assert body["error"]["code"] == "rate_limit_exceeded"
                    assert body["error"]["type"] == "rate_limit_error"
                    assert int(told["retry-after-ms"]) > 90_000
        await _tokens(stack)
        await _inflight(stack)
        refused = 'warmroute_tenant_refusals_total{reason="rate_limit_exceeded",tenant="%s"}'

        async def counted() -> bool:  # satellites tell their figures once a second
            told = [await stack.metric(refused % name) for name in ("blue", NAMED, "red")]
            return told == [23, 27, 28]

        await until(counted, "the refusals to be counted")
        await stack.assert_idle()


async def _tokens(stack: Stack) -> None:
    """Prompt and answer are taken off one bucket; what a request took is known once it is over."""
    answers = await asyncio.gather(*(asked(stack, bearer(TOKENS)) for _ in range(20)))
    assert [status for status, _, _ in answers] == [200] * 20
    await stack.assert_idle()
    _, _, told = await asked(stack, bearer(TOKENS))
    assert told["x-ratelimit-remaining-tokens"] == str(1000 - 20 * 12 - 10)


async def _inflight(stack: Stack) -> None:
    """Two at a time, by whatever processes; whoever leaves makes room."""
    bodies = {"model": MODEL, "prompt": [2] * 10, "max_tokens": 10_000, "stream": True}
    url = f"{stack.url}/v1/completions"
    streams = [await stack.http.post(url, json=bodies, headers=bearer(TWO)) for _ in range(2)]
    assert [reply.status for reply in streams] == [200, 200]
    answers = await asyncio.gather(*(asked(stack, bearer(TWO)) for _ in range(28)))
    assert {status for status, _, _ in answers} == {429}
    assert "2 requests at a time" in answers[0][1]["error"]["message"]
    for reply in streams:
        reply.close()
    await stack.assert_idle()
    assert (await asked(stack, bearer(TWO)))[0] == 200
