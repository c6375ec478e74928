"""A program of hostile clients, separate so that good clients wait only for the router.

    python -m tests.live.hostile.attackers mutated|slow PORT COUNT SEED

`mutated` sends COUNT requests with faults in them; `slow` opens COUNT connections that send one
header a second. The program prints one JSON object: how many answers of each status came and how
the connections ended. It exits with an error if a connection was left hanging, or if something
other than the router's parser answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.live.hostile.mutations import faults

PER_CONNECTION = 4
AT_ONCE = 96
STAYS_EVERY = 50  # one connection of this many stays until the router ends it
FIRST_S = 0.3  # that the others wait for a first answer before they leave
LATEST_S = 60.0  # by then every connection has ended; the router's own limits are far below
SLOW_S = 120.0  # the same for slow connections, which take a while to be accepted
STATUSES = ("200", "400", "404", "405", "408", "413", "417", "431", "500", "503")
HOST = "127.0.0.1"
ADDRESSES = 200  # source addresses: each has 28,000 ports, and a used one is kept for a minute


async def attack(
    port: int, parts: Sequence[bytes], stays: bool, counted: Counter[str], turn: int = 0
) -> None:
    """Open one hostile connection and count how it ended; the router must answer or close it and
    never leave it hanging.
    """
    async with asyncio.timeout(LATEST_S):
        reader, writer = await _connected(port, turn)
        got = b""
        try:
            for part in parts:
                writer.write(part)
            await writer.drain()
            if not stays:
                with contextlib.suppress(TimeoutError):
                    got = await asyncio.wait_for(reader.read(1 << 16), FIRST_S)
                writer.write_eof()
            while data := await reader.read(1 << 16):
                got += data
        except (ConnectionError, OSError):
            counted["reset"] += 1
        finally:
            writer.close()
    for status in STATUSES:
        counted[status] += got.count(f"HTTP/1.1 {status} ".encode())
    # The router answers in JSON; plain text would come from another program.
    assert b"text/plain" not in got, (parts, got)


async def _connected(port: int, turn: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    source = (f"127.0.1.{1 + turn % ADDRESSES}", 0)
    return await asyncio.open_connection(HOST, port, local_addr=source)


async def mutated(port: int, requests: int, seed: int) -> Counter[str]:
    """Send `requests` faulty requests over `AT_ONCE` connections at a time; count the answers."""
    counted: Counter[str] = Counter()
    source: Iterator[bytes] = faults(seed)
    turns = itertools.count()
    connections = requests // PER_CONNECTION

    async def attacker() -> None:
        while (turn := next(turns)) < connections:
            parts = list(itertools.islice(source, PER_CONNECTION))
            await attack(port, parts, turn % STAYS_EVERY == 0, counted, turn)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(attacker())
    counted["connections"] = connections
    return counted


async def slow(port: int, connections: int, seed: int) -> Counter[str]:
    """Open `connections` connections that each send one header a second until the router closes
    them.
    """
    counted: Counter[str] = Counter()

    async def one(turn: int) -> None:
        got = b""
        async with asyncio.timeout(SLOW_S):
            reader, writer = await _connected(port, turn)
            counted["open"] += 1
            counted["most_open"] = max(counted["most_open"], counted["open"])
            try:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
                while True:
                    writer.write(b"X-a: b\r\n")
                    with contextlib.suppress(TimeoutError):
                        got += (came := await asyncio.wait_for(reader.read(4096), 1.0))
                        if not came:
                            break
            except ConnectionError:
                counted["reset"] += 1
            finally:
                counted["open"] -= 1
                writer.close()
        counted["ended"] += 1
        for status in STATUSES:
            counted[status] += got.count(f"HTTP/1.1 {status} ".encode())

    async with asyncio.TaskGroup() as group:
        for turn in range(connections):
            group.create_task(one(turn + seed))
    return counted


def main(kind: str, port: str, count: str, seed: str) -> None:
    """Run the named attack and print its counts as JSON."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacking = {"mutated": mutated, "slow": slow}[kind]
    with asyncio.Runner() as runner:  # uvloop raises if a connection was lost before a write
        print(json.dumps(runner.run(attacking(int(port), int(count), int(seed)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
