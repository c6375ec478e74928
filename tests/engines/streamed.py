"""Reads long streams of real servers to their ends."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.engines.pool import Pool
from tests.engines.traffic import words
from tests.engines.vllm_server import MODEL

TOKENS = 500  # enough to last until the server is killed, also on a busy machine


async def stream(pool: Pool, serial: int, max_tokens: int = TOKENS) -> tuple[list[str], int]:
    """Read a streamed answer; return (finish reasons, tokens). Raises an error if it breaks off."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": words(random.Random(serial), 20), "max_tokens": max_tokens,
        "stream": True, "ignore_eos": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    url = f"{pool.router.url}/v1/completions"
    finished, tokens = list[str](), 0
    async with pool.router.http.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            reasons = (choice["finish_reason"] for choice in event["choices"])
            finished += [reason for reason in reasons if reason]
    return finished, tokens
