"""A proxy in front of a worker that cuts streamed replies off where and how a test wants."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

How = Literal["reset", "close", "garbage", "half", "stall", "end"]
_CHUNK_END = b"\n\n\r\n"  # at our workers an event is a chunk


@dataclass(frozen=True)
class Fate:
    """Where and how a reply is cut off: after how many whole events, and in which way."""

    events: int
    how: How


class Cutter:
    """A proxy that gives each reply to an inference request the next fate of a shared queue."""

    def __init__(self, url: str, fates: deque[Fate]) -> None:
        self._at = url.removeprefix("http://").split(":")
        self._fates = fates
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from the router, and cut its replies off as the test wants."""
        up_reader, up_writer = await asyncio.open_connection(self._at[0], int(self._at[1]))
        self._writers |= {writer, up_writer}
        fate: list[Fate | None] = [None]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._requests(reader, up_writer, fate))
                tasks.create_task(self._replies(up_reader, writer, fate))
        except* (ConnectionError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for each in (writer, up_writer):
                each.close()
                self._writers.discard(each)

    async def _requests(
        self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, fate: list[Fate | None]
    ) -> None:
        while data := await reader.read(1 << 16):
            if data.startswith(b"POST /v1/"):
                fate[0] = replace(self._fates.popleft()) if self._fates else None
            up.write(data)
        raise ConnectionResetError

    async def _replies(
        self, up: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: list[Fate | None]
    ) -> None:
        passed, of = b"", fate[0]  # the bytes passed so far of the reply with this fate
        while data := await up.read(1 << 16):
            if fate[0] is not of:
                passed, of = b"", fate[0]
            if of is None:
                writer.write(data)
                continue
            before = len(passed)
            passed += data
            head = passed.find(b"\r\n\r\n") + 4
            place = _nth_end(passed, head, of.events)
            if place is None:
                writer.write(data)
                continue
            writer.write(passed[before:place])
            await self._cut(writer, passed[place:] or await up.read(1 << 16), of.how)

    async def _cut(self, writer: asyncio.StreamWriter, following: bytes, how: How) -> None:
        if how == "stall":
            await asyncio.Event().wait()
        if how == "garbage":
            writer.write(b"zz\r\n" + following)
        elif how == "half":
            writer.write(following[: len(following) // 2])
        elif how == "end":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        raise ConnectionResetError

    def close(self) -> None:
        """Close all open connections."""
        for writer in tuple(self._writers):
            writer.transport.abort()


def _nth_end(data: bytes, start: int, events: int) -> int | None:
    """Return where the `events`-th event from `start` ends, or None if it has not arrived yet."""
    at = start if start >= 4 else None
    for _ in range(events):
        found = -1 if at is None else data.find(_CHUNK_END, at)
        at = None if found < 0 else found + len(_CHUNK_END)
    return at


@asynccontextmanager
async def cutter(url: str, fates: deque[Fate]) -> AsyncIterator[str]:
    """Yield the URL of a cutting proxy in front of the worker at `url`, whose replies get these
    fates in turn.
    """
    it = Cutter(url, fates)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        it.close()
