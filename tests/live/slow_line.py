"""A TCP relay that delays each byte, as over a long distance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_READ_BYTES = 1 << 16
_MOST_CHUNKS = 4_096  # most chunks in flight in one direction; then nothing more is read


class SlowLine:
    """A TCP relay to `port` of this machine with the same delay in both directions.
    Lifetime: test.
    """

    def __init__(self, port: int, one_way_s: float) -> None:
        self.one_way_s = one_way_s
        self._port = port
        self._lines: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side ends it."""
        line = asyncio.current_task()
        assert line is not None
        self._lines.add(line)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._port)
            ways = self._way(reader, far), self._way(far_reader, writer)
            both = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in both:
                    way.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except OSError:
            pass
        finally:
            self._lines.discard(line)
            for end in (writer, far):
                if end is not None:
                    end.close()

    async def aclose(self) -> None:
        """End all open connections."""
        lines = list(self._lines)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy the data of one direction with its delay; go on reading while earlier data is
        delayed, so that throughput does not fall.
        """
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_CHUNKS)

        async def arrive() -> None:
            while True:
                due_s, data = await under_way.get()
                await asyncio.sleep(due_s - loop.time())
                writer.write(data)
                await writer.drain()
                if not data:
                    return

        arriving = asyncio.create_task(arrive())
        try:
            data = b"-"
            while data:
                data = await reader.read(_READ_BYTES)
                await under_way.put((loop.time() + self.one_way_s, data))
            await arriving
        finally:
            arriving.cancel()


@contextlib.asynccontextmanager
async def slow_line(port: int, one_way_s: float) -> AsyncIterator[int]:
    """Yield the port of a relay to `port` that delays data by `one_way_s` seconds."""
    line = SlowLine(port, one_way_s)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await line.aclose()
