"""The rate at which one router process takes event streams of many engines through real sockets.

    python tests/bench/feeds.py [--publishers N] [--batches N] [--blocks N] [--json FILE]

Every publisher sends its batches as fast as the sockets take them, from one thread of this process;
each batch stores a prompt of its own. The clock stops when the router has applied all batches.
`cpu` is the CPU time of all threads of the router's process. No batch may be missing at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import zmq

from router.admin.kv_view import KvView, decode_kv_view
from simulator.live.processes import Program, Programs
from tests.live.publishers import BLOCK, Publisher, publishing
from tests.live.stack import Stack

QUIET = ["--intervals-health-s", "30", "--intervals-load-report-s", "30", "--log-level", "error"]
POLL_S = 0.05
PATIENCE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--publishers", type=int, default=200)
    parser.add_argument("--batches", type=int, default=60, help="of each publisher")
    parser.add_argument("--blocks", type=int, default=64, help="of each batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    figures = asyncio.run(_measured(args.publishers, args.batches, args.blocks))
    for name, value in figures.items():
        print(f"{name:24}{value:>14,.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures))


async def _measured(count: int, batches: int, blocks: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Programs(Path(folder)) as programs,
            aiohttp.ClientSession() as http,
            publishing(count) as pool,
        ):
            limits = ["--limits-workers", str(count), "--limits-index-entries", str(1 << 24)]
            limits += ["--limits-events-backlog-batches", "100000"]
            arguments = ["serve", "--port", "0", "--admin-port", "0", *QUIET, *limits]
            for spec in pool.specs:
                arguments += ["--worker", spec]
            router = await programs.start("router", "router", arguments)
            stack = Stack(programs, router, [], http)
            await asyncio.gather(*(one.subscribed() for one in pool.all))
            await _reached(stack, "warmroute_worker_kv_known", count)
            for one in pool.all:
                for _ in range(batches):
                    one.add(rng.integers(0, 30_000, blocks * BLOCK, dtype=np.int32))
            return await _sent(stack, router, pool.all)


async def _sent(stack: Stack, router: Program, publishers: list[Publisher]) -> dict[str, float]:
    """Send all batches and wait until the router has applied them."""
    batches = sum(len(one.batches) for one in publishers)
    blocks = sum(len(chain) for one in publishers for chain in one.chains)
    payload_bytes = sum(len(batch) for one in publishers for batch in one.batches)
    cpu_s, began_s = _cpu_s(router), time.perf_counter()
    await asyncio.to_thread(_blast, publishers)
    sent_s = time.perf_counter() - began_s
    for number, one in enumerate(publishers):
        await _applied(stack, number, len(one.batches))
    spent_s, cpu_s = time.perf_counter() - began_s, _cpu_s(router) - cpu_s
    await _reached(stack, "warmroute_worker_resident_blocks", blocks)
    await _reached(stack, "warmroute_worker_kv_known", len(publishers))
    gaps = await _of_kind(stack, "gaps")
    return {
        "publishers": len(publishers),
        "batches": batches,
        "payload_mb": payload_bytes / 1e6,
        "sending_s": sent_s,
        "applied_s": spent_s,
        "batches_per_s": batches / spent_s,
        "blocks_per_s": blocks / spent_s,
        "cpu_us_per_batch": cpu_s / batches * 1e6,
        "blocks_per_cpu_s": blocks / cpu_s,
        "gaps": gaps,
    }


def _blast(publishers: list[Publisher]) -> None:
    """Send the batches of all publishers in turn, from the only thread that uses these sockets
    meanwhile.
    """
    sockets = [zmq.Socket.shadow(one.pub.underlying) for one in publishers]
    for number in range(len(publishers[0].batches)):
        frame = number.to_bytes(8, "big")
        for one, socket in zip(publishers, sockets, strict=True):
            socket.send_multipart([b"", frame, one.batches[number]])


async def _applied(stack: Stack, worker: int, batches: int) -> None:
    """Wait until the router has applied all batches of a worker; asking about one worker at a time
    costs the router less.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while (await _view(stack, worker)).next_seq != batches:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"worker {worker} is behind after {PATIENCE_S:g} s")
        await asyncio.sleep(POLL_S)


async def _view(stack: Stack, worker: int) -> KvView:
    async with stack.http.get(f"{stack.admin}/kv?worker={worker}") as reply:
        return decode_kv_view(await reply.read())


async def _reached(stack: Stack, metric: str, value: float) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while (seen := await stack.metric(metric)) != value:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{metric} is {seen:g} after {PATIENCE_S:g} s, not {value:g}")
        await asyncio.sleep(POLL_S)


async def _of_kind(stack: Stack, kind: str) -> float:
    """Return the number of KV events of a kind, over all workers."""
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    counts = [line for line in lines if line.startswith("warmroute_kv_events_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts if f'kind="{kind}"' in line)


def _cpu_s(program: Program) -> float:
    """Return the CPU seconds, user and system, of all threads of the program."""
    stat = Path(f"/proc/{program.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
