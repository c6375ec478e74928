"""Sends requests to real engines and returns answers without the fields that differ between two
equal answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp

from tests.engines.model import LORA
from tests.engines.traffic import requests


def base_requests(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests that vLLM's tests send, without those for a LoRA adapter, which SGLang
    cannot compute on a CPU.
    """
    return ((path, body) for path, body in requests(seed, count) if body["model"] != LORA)


async def answer_of(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return an answer's (status, text) without ids, times and cached tokens."""
    async with aiohttp.request("POST", f"{url}{path}", data=json.dumps(body)) as reply:
        text = await reply.text()
    text = re.sub(r'"(id|created|cached_tokens)":("[^"]*"|\d+)', "", text)
    return reply.status, re.sub(r'"timings":\{[^}]*\}', "", text)
