"""The CPU cost of a router's link to Redis: `python -m tests.bench.replicas [PEERS]`.

Links of real replicas use a real redis-server; their messages are not interpreted. Each peer is a
process of its own and sends a message at each flush, as this process does: 1.5 kB, the size for ten
requests that were sent, answered and ended. A working router has something to do every millisecond,
so this process does a fixed amount of work, whose CPU time without a link (before and after, in the
same run) is subtracted.

Predicted: a flush and a read are three system calls and two turns of the event loop each, about 100
us together, so 1 % of a core with one peer, and 2 % with three, whose messages are read together.
"""

from __future__ import annotations

import asyncio
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import redis.asyncio
import uvloop

from router.config.extras import Replicas
from router.redis.url import parse_redis_url
from router.replicas.link import Link
from router.replicas.membership import VERSION, new_identity
from tests.bench.measuring import Row, show
from tests.live.redis_server import redis_server

PIECES, WINDOWS = 300, 9
MESSAGE_BYTES = 1_500
_STAMP = struct.Struct("<d")


class Stamped:
    """An exchange whose messages carry only the time at which they were made."""

    def __init__(self, talks: bool) -> None:
        self.talks = talks
        self.peers = self.wanted = 0
        self.late_s: list[float] = []
        self._said = False

    def joined(self, now_s: float) -> None: ...

    def parted(self, now_s: float) -> None: ...

    def present(self, peers: Collection[str], now_s: float) -> None:
        self.peers = len(peers)

    def outgoing(self, now_s: float) -> bytes | None:
        self._said = self.talks and not self._said  # one at each flush
        if not self._said:
            return None
        return _STAMP.pack(time.monotonic()) + bytes(MESSAGE_BYTES - _STAMP.size)

    def incoming(self, peer: str, payload: bytes, now_s: float) -> None:
        self.late_s.append(time.monotonic() - _STAMP.unpack_from(payload)[0])


def link(url: str, name: str, exchange: Stamped) -> Link:
    """Return a link that is not started yet."""
    return Link(parse_redis_url(url), Replicas(), new_identity(name), exchange, {VERSION: "1"})


async def talk(url: str) -> None:
    """Run a peer router that sends a message at each flush, until its standard input ends."""
    one = link(url, "peer", Stamped(talks=True))
    one.start()
    await asyncio.to_thread(sys.stdin.read)
    await one.aclose()


async def worked() -> tuple[float, float]:
    """Do a fixed amount of work in small pieces; return (CPU seconds, wall-clock seconds)."""
    used_s, begun_s = time.process_time(), time.perf_counter()
    for _ in range(PIECES):
        for _ in range(300):
            sum(range(50))
        await asyncio.sleep(0.001)
    return time.process_time() - used_s, time.perf_counter() - begun_s


async def plain(url: str) -> float:
    """Return the CPU microseconds of one XADD with redis-py's client, when XADDs are sent one after
    the other.
    """
    client = redis.asyncio.Redis.from_url(url, protocol=2)
    payload, times = bytes(MESSAGE_BYTES), []
    for _ in range(10):
        used_s = time.process_time()
        for _ in range(200):
            await client.xadd("bench", {b"m": payload}, maxlen=1_000)
        times.append((time.process_time() - used_s) / 200)
    await client.aclose()
    return statistics.median(times) * 1e6


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition returns true."""
    while not condition():  # noqa: ASYNC110 - what happens in other processes sets no event
        await asyncio.sleep(0.05)


def _begun(one: Link, exchange: Stamped) -> bool:
    return one.counters.sent_messages > 0 and exchange.peers == exchange.wanted


async def compared(url: str, exchange: Stamped) -> tuple[float, float, int]:
    """Return (the link's share of a core in per cent, CPU microseconds for each sent message,
    number of received messages).

    The first two are medians over time windows with and without the link, which alternate.
    """
    shares, flush_us, heard = [], [], 0
    for _ in range(WINDOWS):
        one = link(url, "measured", exchange)
        one.start()
        counters = one.counters
        await until(partial(_begun, one, exchange))
        told, heard_before = counters.sent_messages, counters.received_messages
        with_it, seconds = await worked()
        told = counters.sent_messages - told
        heard += counters.received_messages - heard_before
        await one.aclose()
        without, _ = await worked()
        shares.append((with_it - without) / seconds * 100)
        flush_us.append((with_it - without) / told * 1e6)
    return statistics.median(shares), statistics.median(flush_us), heard


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE)


async def measure(url: str, peers: int) -> list[Row]:
    """Start peers, measure, stop them, and return the rows."""
    exchange = Stamped(talks=True)
    alone, flush_us, _ = await compared(url, exchange)
    command = [sys.executable, "-m", "tests.bench.replicas", "--peer", url]
    others = [_started(command) for _ in range(peers)]
    exchange.wanted = peers
    try:
        both, both_us, heard = await compared(url, exchange)
    finally:
        for other in others:
            other.communicate()
    late_ms = sorted(late_s * 1e3 for late_s in exchange.late_s)
    late = {"p50": statistics.median(late_ms), "p99": late_ms[int(len(late_ms) * 0.99)]}
    return [
        Row("a flush with a message", flush_us, "us", others={"redis-py": await plain(url)}),
        Row("flushes and beats", alone, "% core"),
        Row(f"a flush, and what {peers} peers say meanwhile", both_us, "us"),
        Row(f"all of it ({heard} messages heard)", both, "% core", 5),
        Row("from flush to subscriber, median", late["p50"], "ms"),
        Row("from flush to subscriber, p99 (a flush comes every 10 ms)", late["p99"], "ms", 10),
    ]


def main() -> None:
    """Measure the link with the given numbers of peers and print the rows."""
    if sys.argv[1:2] == ["--peer"]:
        uvloop.run(talk(sys.argv[2]))
        return
    peers = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder) / "redis") as server,
    ):
        show(uvloop.run(measure(server.url, peers)), as_json=False)


if __name__ == "__main__":
    main()
