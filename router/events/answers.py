"""Answers by HTTP, read as far as they may go."""

from __future__ import annotations

import aiohttp

from engine.wire import WireError


async def read_bounded(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body. Raises WireError for one of more than `limit` bytes."""
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > limit:
            raise WireError(f"{reply.method} {reply.url}: an answer of more than {limit} bytes")
    return bytes(body)
