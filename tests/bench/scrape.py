"""The CPU time for which a scrape of `/metrics` blocks the router's event loop.

    python -m tests.bench.scrape [WORKERS]

The router reads the counts on the loop and makes their text in a thread
(`router/metrics/exposition.py`), so only the reading blocks the loop.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Callable

from tests.router.crowded import crowd

_ROUNDS = 15
_RATIO = 2.5  # reading alone against reading and writing


async def measure(workers: int) -> dict[str, float]:
    """Return medians of CPU milliseconds over rounds, and the size of the text in MB."""
    async with crowd(workers, policy="warmset") as one:
        metrics = one.router.metrics
        found: dict[str, list[float]] = {"read": [], "read and written": []}
        for _ in range(_ROUNDS):
            found["read"].append(timed(lambda: list(metrics.collect())))
            found["read and written"].append(timed(metrics.exposition))
        size = len(metrics.exposition()) / 1e6
        return {"MB": size} | {name: statistics.median(ms) for name, ms in found.items()}


def timed(work: Callable[[], object]) -> float:
    """Return the CPU time of the work in milliseconds."""
    before_s = time.process_time()
    work()
    return 1e3 * (time.process_time() - before_s)


def main() -> None:
    """Print both times and their ratio."""
    logging.disable(logging.WARNING)
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    found = asyncio.run(measure(workers))
    print(f"{workers} workers, {found['MB']:.1f} MB of text; CPU ms, medians of {_ROUNDS}")
    for name in ("read", "read and written"):
        print(f"  {name:17} {found[name]:7.1f}")
    ratio = found["read and written"] / found["read"]
    print(f"the loop is held up {ratio:.1f} times less; predicted: at least {_RATIO:g}")


if __name__ == "__main__":
    main()
