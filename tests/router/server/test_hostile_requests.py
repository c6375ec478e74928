"""Tests of the corpus of hostile requests, each alone on a connection to a server with a worker
behind it.
"""

from __future__ import annotations

import json
from ipaddress import ip_network

import pytest

from router.http.messages import Answer, Request, Response
from tests.live.hostile.corpus import BODY, PRIVATE, refused, served, sized
from tests.router.server_support import pieces, serving

REFUSED = {name: (status, data) for name, status, data in refused()}
SERVED = dict(served())


async def answered(data: bytes, trusted=()) -> tuple[bytes, list[tuple[bytes, tuple]]]:
    """Send the data; return the reply's bytes, and (body, header fields) of each request that the
    handler got.
    """
    got: list[tuple[bytes, tuple]] = []

    async def handle(request: Request) -> Answer:
        got.append((request.body, request.fields))
        return Response(200, b"served", keep_alive=False)

    async with serving(handle, trusted=trusted) as it:
        return await pieces(it.port, data), got


@pytest.mark.parametrize("name", REFUSED)
async def test_ambiguous_requests_are_refused(name: str) -> None:
    status, data = REFUSED[name]
    reply, got = await answered(data)
    assert not got
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head[:8] in (b"HTTP/1.0", b"HTTP/1.1")
    assert head.split()[1] == b"%d" % status, reply
    if status != 404:
        assert json.loads(body)["error"]["message"]
    assert b"aiohttp" not in reply


@pytest.mark.parametrize("name", SERVED)
async def test_unusual_but_valid_requests_are_served(name: str) -> None:
    reply, got = await answered(SERVED[name])
    assert b" 200 OK" in reply, reply
    ((body, headers),) = got
    assert body == BODY
    names = [key.lower() for key, _ in headers]
    assert names.count(b"content-length") == 1
    assert not {b"transfer-encoding", b"upgrade", b"expect", b"http2-settings"} & set(names)


@pytest.mark.parametrize("line", PRIVATE)
async def test_internal_headers_are_accepted_from_trusted_peers_only(line: bytes) -> None:
    for trusted in (False, True):
        networks = (ip_network("127.0.0.0/8"),) if trusted else ()
        _, ((_, headers),) = await answered(sized(line, b"X-Mine: 1"), networks)
        names = [key for key, _ in headers]
        assert (line.partition(b":")[0] in names) is trusted
        assert b"X-Mine" in names
