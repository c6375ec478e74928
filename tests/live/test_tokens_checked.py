"""Tests with whole programs of the router's check that its token ids equal the engines'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.wire.hf import HfTokenizer
from tests.engine.model_dirs import write_model
from tests.live.stack import MODEL, Stack, misbehaving, running, until
from tests.told_decision import decision_in

TEXT = "The quick brown fox jumps over the lazy dog. " * 8
EXACT = f'warmroute_tokenizer_exact{{model="{MODEL}"}}'
MISMATCH = f'warmroute_tokenizer_mismatch_total{{model="{MODEL}"}}'
ANSWER = (
    b'{"id":"1","object":"text_completion","choices":[{"index":0,"text":"x"}],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":2}}'
)


async def metrics(stack: Stack) -> dict[str, float]:
    """Return the router's metric samples by name and labels."""
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


async def explained(stack: Stack, **fields: Any) -> dict[str, Any]:
    """Send a completion and return the router's explanation."""
    headers = {"x-warmroute-explain": "1"}
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1} | fields
    async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return decision_in(reply.headers["x-warmroute-explain"])


async def checked(stack: Stack, value: float) -> None:
    """Wait until the router's check has found the model's tokens right (1) or wrong (0)."""

    async def found() -> bool:
        return (await metrics(stack)).get(EXACT) == value

    await until(found, "the check of the tokens")


async def test_the_check_finds_that_the_same_tokenizer_is_exact(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    router = ["--tokenizer", str(folder)]
    async with running(tmp_path, workers=2, router=router, tokenizer=folder) as stack:
        await checked(stack, 1.0)
        assert not (await explained(stack))["approximate"]
        assert not (await explained(stack, truncate_prompt_tokens=7))["approximate"]
        assert (await metrics(stack))[MISMATCH] == 0.0
        await stack.assert_idle()


async def test_the_check_finds_another_tokenizer_and_no_request_fails(tmp_path: Path) -> None:
    ours = write_model(tmp_path / "ours")
    theirs = write_model(tmp_path / "theirs", "unigram", "turns")
    router = ["--tokenizer", str(ours)]
    async with running(tmp_path, workers=2, router=router, tokenizer=theirs) as stack:
        await checked(stack, 0.0)
        assert (await metrics(stack))[MISMATCH] >= 1.0
        assert (await explained(stack))["approximate"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
        status, answer = await stack.post(json.dumps(chat).encode(), "/v1/chat/completions")
        assert status == 200, answer
        await stack.assert_idle()
    assert "placed by text from now on" in (tmp_path / "router.log").read_text()


@pytest.mark.parametrize("off_by", [0, 1])
async def test_token_counts_of_answers_are_compared_with_the_routers(
    tmp_path: Path, off_by: int
) -> None:
    """The router compares the prompt tokens that answers count with its own tokens if workers lack
    /tokenize.
    """
    folder = write_model(tmp_path / "model")
    count = len(HfTokenizer(folder).encode(TEXT)) + off_by
    body = ANSWER % count
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    async with misbehaving(answer % (len(body), body)) as (url, _):
        router = ["--tokenizer", str(folder), "--worker", url]
        async with running(tmp_path, workers=0, router=router) as stack:
            await stack.until_state(0, "ready")
            approximate = [(await explained(stack))["approximate"] for _ in range(5)]
            assert approximate == [False] * 3 + [bool(off_by)] * 2
            figures = await metrics(stack)
            assert figures[EXACT] == (0.0 if off_by else 1.0)
            assert figures[MISMATCH] == 3.0 * off_by


async def test_token_ids_are_forwarded_if_configured_and_accepted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    ids = HfTokenizer(folder).encode(TEXT)
    body = ANSWER % len(ids)
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    raw = b'{"prompt":%s, "max_tokens" : 1,"model":"%s"}' % (
        json.dumps(TEXT).encode(),
        MODEL.encode(),
    )
    forwarded = b'{"prompt":%s, "max_tokens" : 1,"model":"%s"}' % (
        json.dumps(ids, separators=(",", ":")).encode(),
        MODEL.encode(),
    )
    async with misbehaving(answer % (len(body), body)) as (url, seen):
        router = ["--tokenizer", str(folder), "--forward-token-ids", "true"]
        router += ["--worker", f"{url},kind=vllm"]
        async with running(tmp_path, workers=0, router=router) as stack:
            await stack.until_state(0, "ready")
            for _ in range(3):
                status, _ = await stack.post(raw)
                assert status == 200
    bodies = [body for body in seen if b"max_tokens" in body]
    # One of every 64 requests is passed on as it came, so that the worker counts tokens itself.
    assert bodies == [raw, forwarded, forwarded]
