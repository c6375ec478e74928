"""Sends requests to Triton, directly or through a router, and reads its gauges."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.engines.triton_server import WHOLE, TritonServer
from tests.engines.vllm_server import MODEL

GENERATE, STREAM = f"/v2/models/{MODEL}/generate", f"/v2/models/{MODEL}/generate_stream"
INFER = f"/v2/models/{WHOLE}/infer"
Answer = tuple[int, str, bytes]


async def answer_of(url: str, method: str, path: str, body: bytes | None, **headers: str) -> Answer:
    """Return (status, content type, body), byte for byte and still compressed if the server
    compresses it.
    """
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.request(method, f"{url}{path}", data=body, headers=headers) as reply,
    ):
        return reply.status, reply.headers.get("Content-Type", ""), await reply.read()


def tensors(prompt: str, max_tokens: int) -> dict[str, Any]:
    """Return the body of an `infer` request."""
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}
    count = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [max_tokens]}
    return {"inputs": [text, count]}


def text_request(prompt: str, max_tokens: int, **fields: Any) -> bytes:
    """Return the body of a `generate` request."""
    return json.dumps({"text_input": prompt, "max_tokens": max_tokens, **fields}).encode()


async def gauges_of(server: TritonServer, labelled: str) -> float:
    """Return the value of a server's gauge with this label."""
    _, _, text = await answer_of(server.metrics_url, "GET", "", None)
    lines = (line for line in text.decode().splitlines() if f'type="{labelled}"' in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
