"""An engine that serves correctly, or fails every request at once in one of twelve ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Way = Literal[
    "empty_body",
    "zero_tokens",
    "done_alone",
    "error_first",
    "abort",
    "html",
    "cut_after_head",
    "status_429",
    "status_529",
    "status_503",
    "no_model",
    "no_adapter",
]
WAYS: tuple[Way, ...] = get_args(Way)
MODEL, ADAPTER = "base", "tuned"
PIECES = 4  # of a good streamed answer
_PAGE = b"<html><body><h1>It works</h1></body></html>"


@dataclass
class FailingEngine:
    """An engine that fails in the way that `way` names, or serves correctly if `way` is None.
    Lifetime: test.
    """

    way: Way | None = None
    service_s: float = 0.03
    asked: int = 0
    url: str = ""
    server: asyncio.Server | None = None
    _silent: bool = False
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def vanish(self) -> None:
        """Close the listening socket and stop answering on open connections."""
        assert self.server is not None
        self.server.close()
        self._silent = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection, one after another."""
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if self._silent:
                    await reader.read()  # until the other side closes
                    return
                lines = head.decode("latin-1").lower().split("\r\n")
                sizes = [int(x[15:]) for x in lines if x.startswith("content-length:")]
                body = await reader.readexactly(sizes[0]) if sizes else b""
                if lines[0].startswith("get"):
                    writer.write(_response(*self._page(lines[0].split()[1])))
                    continue
                self.asked += 1
                if await self._answer(json.loads(body), lines[0].split()[1], writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _page(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            cards = [{"id": MODEL, "max_model_len": 100_000}, {"id": ADAPTER, "parent": MODEL}]
            return 200, {"object": "list", "data": cards}
        return (200, {}) if path == "/health" else (404, {"detail": "Not Found"})

    async def _answer(self, body: dict[str, Any], path: str, out: asyncio.StreamWriter) -> bool:
        """Answer a request; return whether the connection ends with this answer."""
        way, streams = self.way, bool(body.get("stream"))
        chat = path.endswith("chat/completions")
        if way is None or (way == "no_adapter" and body["model"] != ADAPTER):
            await self._served(streams, chat, out)
            return False
        if way == "cut_after_head":
            kind = b"text/event-stream" if streams else b"application/json"
            out.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n" % kind)
            out.write(b"Content-Length: 400\r\n\r\n")
            await out.drain()
            return True
        out.write(_failure(way, body["model"], streams, chat))
        await out.drain()
        return False

    async def _served(self, streams: bool, chat: bool, out: asyncio.StreamWriter) -> None:
        usage = {"prompt_tokens": 64, "completion_tokens": PIECES}
        if not streams:
            await asyncio.sleep(self.service_s)
            text: dict[str, Any] = {"text": "word"}
            if chat:
                text = {"message": {"role": "assistant", "content": "word"}}
            choice = {"index": 0, "finish_reason": "length"} | text
            out.write(_response(200, {"id": "x", "choices": [choice], "usage": usage}))
            return
        out.write(_EVENTS_HEAD)
        for piece in range(PIECES):
            await asyncio.sleep(self.service_s / PIECES)
            end = "length" if piece == PIECES - 1 else None
            out.write(_chunk(_event(chat, "word", end)))
        out.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await out.drain()


_EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def _failure(way: Way, model: str, streams: bool, chat: bool) -> bytes:
    """Return the bytes that a failing engine sends at once."""
    error = {"object": "error", "message": "the engine failed", "code": 500}
    if way.startswith("status_"):
        status = int(way.removeprefix("status_"))
        extra = b"Retry-After: 2\r\n" if status != 529 else b""
        return _response(status, {"error": error | {"code": status}}, extra)
    if way in ("no_model", "no_adapter"):
        why = f"The model `{model}` does not exist."
        missing = {"message": why, "type": "NotFoundError", "param": "model", "code": 404}
        return _response(404, {"error": missing})
    if way == "html":
        return _response(200, _PAGE, kind=b"text/html")
    if way == "empty_body":
        return _response(200, b"", kind=b"text/event-stream" if streams else b"application/json")
    if not streams:
        return _response(200, _failed_json(way, error, chat))
    events = {
        "done_alone": b"",
        "error_first": b"data: " + json.dumps({"error": error}).encode() + b"\n\n",
        "abort": _event(chat, "", "abort"),
        "zero_tokens": _zero_tokens(chat),
    }[way]
    done = b"" if way == "error_first" else b"data: [DONE]\n\n"
    return _EVENTS_HEAD + b"".join(_chunk(part) for part in (events, done) if part) + b"0\r\n\r\n"


def _failed_json(way: Way, error: dict[str, Any], chat: bool) -> dict[str, Any]:
    text: dict[str, Any] = (
        {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    )
    usage = {"prompt_tokens": 64, "completion_tokens": 0, "total_tokens": 64}
    choice = {"index": 0, "finish_reason": "abort" if way == "abort" else "stop"} | text
    if way == "error_first":
        return {"error": error}
    choices = [] if way == "done_alone" else [choice]
    return {"id": "x", "choices": choices, "usage": usage}


def _zero_tokens(chat: bool) -> bytes:
    role = {"role": "assistant", "content": ""}
    begin = {"id": "x", "choices": [{"index": 0, "delta": role, "finish_reason": None}]}
    usage = {"prompt_tokens": 64, "completion_tokens": 0, "total_tokens": 64}
    end = {"id": "x", "choices": [], "usage": usage}
    events = [begin, end] if chat else [end]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def _event(chat: bool, text: str, end: str | None) -> bytes:
    said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    event = {"id": "x", "choices": [{"index": 0, "finish_reason": end} | said]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _response(
    status: int, body: Any, extra: bytes = b"", kind: bytes = b"application/json"
) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"HTTP/1.1 %d X\r\nContent-Type: %b\r\n%bContent-Length: %d\r\n\r\n"
    return head % (status, kind, extra, len(data)) + data


@asynccontextmanager
async def engine() -> AsyncIterator[FailingEngine]:
    """Yield a running engine at its own port, which serves correctly at first."""
    failing = FailingEngine()
    server = await asyncio.start_server(failing.serve, "127.0.0.1", 0)
    failing.server = server
    async with server:
        failing.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield failing
