"""The cost of rendering a conversation by an engine: time to first token, and router CPU time.

    python tests/bench/renders.py [--tokens N] [--growth N] [--turns N]

A conversation of N tokens grows at each turn. It goes through a router whose prompts the engine
renders, and through one without rendering (`render: never`). Engines are simulated ones, 100 times
as fast as a GPU and with a tokenizer of whole words, so that most of the time is the router's.
`cold` is the first two turns, which wait for the renderer; `warm` is the later ones, which are
placed by their known beginning. The CPU time of a warm turn includes the renderer's call that runs
at the same time. Figures are medians; all turns use one connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from simulator.live.processes import Program, Programs  # noqa: E402
from tests.bench.relay import cpu_s  # noqa: E402
from tests.bench.tokens import texts  # noqa: E402
from tests.live.stack import MODEL, engine_arguments  # noqa: E402
from tests.told_decision import EXPLAIN, decision_in  # noqa: E402

WAYS = ("auto", "never")
REST_S = 1.5  # between turns, so that the call beside a turn can end


class Conversation:
    """One growing conversation through one router. Lifetime: run."""

    def __init__(self, router: Program, words: list[str], seed: int) -> None:
        self.router = router
        self.messages: list[dict[str, Any]] = []
        self.rows: list[tuple[float, float, int, int]] = []  # TTFT s, CPU s, expected, cached
        self._words = words
        self._rng = random.Random(seed)

    def grow(self, words: int) -> None:
        at = self._rng.randrange(len(self._words) - words)
        text = " ".join(self._words[at : at + words])
        self.messages.append({"role": "user", "content": f"{self._rng.random()} {text}"})

    async def turn(self, http: aiohttp.ClientSession) -> None:
        body = {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        before_s, start_s = cpu_s(self.router.process.pid), time.perf_counter()
        first_s, usage, expected = 0.0, {}, 0
        url = f"{self.router.url}/v1/chat/completions"
        async with http.post(url, json=body, headers={EXPLAIN: "1"}) as reply:
            assert reply.status == 200, await reply.text()
            expected = decision_in(reply.headers[EXPLAIN])["expected_hit_tokens"]
            async for line in reply.content:
                first_s = first_s or time.perf_counter() - start_s
                if b'"usage":{' in line:
                    usage = json.loads(line[6:])["usage"]
        await asyncio.sleep(REST_S)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.rows.append((first_s, cpu_s(self.router.process.pid) - before_s, expected, cached))
        self.messages.append({"role": "assistant", "content": "That is so."})


async def measured(args: argparse.Namespace, folder: Path) -> dict[str, list[Any]]:
    words = " ".join(texts()).split()
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        talks = {}
        for way in WAYS:
            flags = engine_arguments(speed=100, **{"max-body-bytes": 64 << 20})
            engine = await programs.start(f"engine-{way}", "engine", [*flags, "--render"])
            serve = ["serve", "--port", "0", "--admin-port", "0", "--worker", engine.url]
            router = await programs.start(f"router-{way}", "router", [*serve, "--render", way])
            talks[way] = Conversation(router, words, 1)
        await asyncio.sleep(3.0)  # workers join, renderers are probed
        for turn in range(args.turns):
            for talk in talks.values():
                talk.grow(args.tokens if turn == 0 else args.growth)
                await talk.turn(http)
        return {way: talk.rows for way, talk in talks.items()}


def shown(rows: dict[str, list[Any]]) -> None:
    print(f"{'turn':>4} {'TTFT, ms':>22} {'CPU, ms':>18} {'expected, cached tokens':>26}")
    for at, (one, other) in enumerate(zip(rows["auto"], rows["never"], strict=True)):
        ttft = f"{1e3 * one[0]:.1f} ({1e3 * other[0]:.1f} never)"
        spent = f"{1e3 * one[1]:.0f} ({1e3 * other[1]:.0f})"
        print(f"{at:>4} {ttft:>22} {spent:>18} {one[2]:>14}, {one[3]:>10}")
    for name, part in (("cold", slice(0, 2)), ("warm", slice(2, None))):
        added = [a[0] - b[0] for a, b in zip(rows["auto"][part], rows["never"][part], strict=True)]
        cpu = [statistics.median(row[1] for row in rows[way][part]) for way in WAYS]
        print(
            f"{name}: added TTFT {1e3 * statistics.median(added):.1f} ms at p50; CPU of the router "
            f"{1e3 * cpu[0]:.0f} ms a turn, never {1e3 * cpu[1]:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=25_000, help="words at the first turn (25000: 40,000 tokens)")
    add("--growth", type=int, default=600, help="words of a later turn (600: 1,000 tokens)")
    add("--turns", type=int, default=16)
    with TemporaryDirectory() as folder:
        shown(asyncio.run(measured(parser.parse_args(), Path(folder))))


if __name__ == "__main__":
    main()
