"""Scripts of workers whose streams break off, and readers of what clients received."""

from __future__ import annotations

import json
from typing import Any

from tests.router.migration.migration_engines import Engine
from tests.router.migration.migration_support import TOTAL
from tests.router.relay_support import (
    STREAM,
    WorkerCall,
    chunked,
    post,
)

PROMPT = [3, 1, 4]
BODY = {"model": "m", "prompt": "x", "max_tokens": TOTAL, "stream": True}


def events_for(call: WorkerCall) -> list[bytes]:
    """Return the events that a warmroute engine sends in reply to this request."""
    body = json.loads(call.body)
    given = body["prompt"]
    prompt = given if isinstance(given, list) else PROMPT
    return Engine("warmroute", "x").stream(body, prompt, body["max_tokens"])


def framed(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


async def dies(call: WorkerCall) -> None:
    """Send two events and close the connection, as a worker that dies."""
    await call.send(STREAM + framed(*events_for(call)[:2]))
    call.hang_up()


async def serves(call: WorkerCall) -> None:
    """Send the whole stream, as a healthy worker."""
    await call.send(STREAM + chunked(*events_for(call)))


def request_bytes(**fields: Any) -> bytes:
    return post(json.dumps({**BODY, **fields}).encode())


WHOLE = b"".join(Engine("warmroute", "x").stream(BODY, PROMPT, TOTAL))


def body_of(reply: bytes) -> bytes:
    """Return the body of a chunked reply; fails unless the reply is complete."""
    _, _, framed_body = reply.partition(b"\r\n\r\n")
    body = b""
    while framed_body:
        size, _, framed_body = framed_body.partition(b"\r\n")
        length = int(size, 16)
        body += framed_body[:length]
        assert framed_body[length : length + 2] == b"\r\n"
        framed_body = framed_body[length + 2 :]
        if not length:
            assert framed_body == b""
            return body
    raise AssertionError("the body has no end")


def is_incomplete(reply: bytes) -> bool:
    return not reply.endswith(b"0\r\n\r\n")
