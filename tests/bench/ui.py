"""The router's CPU time for the page at `/ui`: for samples, frames and answers, per second.

    python -m tests.bench.ui [WORKERS]

A page polls once a second. The HTTP client that polls runs in this process, so the figures include
it.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from tests.router.crowded import Crowd, crowd

_ROUNDS = 40
_PAGES = 10
_BUDGET = 0.01  # of a core, by one page that is open at a thousand workers


async def measure(workers: int) -> dict[str, float]:
    """Return the medians of CPU milliseconds over the rounds, and the size of the answer in KB."""
    async with crowd(workers, policy="warmset") as one:
        for _ in range(10):
            for n in range(100):
                await one.send(f"session-{n}", tenant="t")
            one.answer(0.5)
            await one.second()
        ui = one.router.admin.ui
        known = await one.ui_state()
        query = f"?boot={known['boot']}&names={known['frame']['version']}&since="
        found: dict[str, list[float]] = {}
        for _ in range(_ROUNDS):  # in turn, so that a busy moment of the machine affects all
            for n in range(20):
                await one.send(f"session-{n}")
            one.answer(0.5)
            await timed(found, "sample", one.second)
            since = f"{query}{ui.sampler.history.taken - 1}"
            await timed(found, "first page", lambda since=since: asked(one, since))
            await timed(found, "another page", lambda since=since: asked(one, since))
            nothing = f"{query}{ui.sampler.history.taken}"
            await timed(found, "nothing new", lambda nothing=nothing: asked(one, nothing))
        size = len(ui.news_json(known["boot"], ui.sampler.history.taken - 1, ui.version) or b"")
        return {"KB": size / 1e3} | {name: statistics.median(ms) for name, ms in found.items()}


async def asked(one: Crowd, query: str) -> None:
    """Send the poll that a page sends, and read the answer as bytes."""
    async with one.http.get(f"{one.url}/ui/state{query}") as reply:
        await reply.read()


async def timed(
    found: dict[str, list[float]], name: str, deed: Callable[[], Awaitable[None]]
) -> None:
    before_s = time.process_time()
    await deed()
    found.setdefault(name, []).append(1e3 * (time.process_time() - before_s))


def main() -> None:
    """Print the figures, and the share of a core that pages take."""
    logging.disable(logging.WARNING)
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    found = asyncio.run(measure(workers))
    print(f"{workers} workers; CPU of router and client together, ms, medians of {_ROUNDS}")
    for name in ("sample", "first page", "another page", "nothing new"):
        print(f"  {name:13} {found[name]:6.2f}")
    print(f"  answer of a second: {found['KB']:.0f} KB")
    one = (found["sample"] + found["first page"]) / 1e3
    many = one + (_PAGES - 1) * found["another page"] / 1e3
    print(f"one page open: {one:.2%} of a core, {_PAGES} pages: {many:.2%}")
    print(f"predicted: at most {_BUDGET:.0%} for the first page")


if __name__ == "__main__":
    main()
