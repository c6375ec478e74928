"""The gain of sending KV before its prompt is fully computed, over a slow network.

    python -m tests.bench.early_kv [--runs 7] [--json]

The network (tcp, limited to a rate) takes as long for a prompt's KV as its prefill does. The bench
itself calls the prefill and then the decode worker, and stops at the first token of the latter,
alternately with `--kv-overlap` and without. It measures processes that run at the same time, so
nothing is pinned, and other load spoils the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engine.model.tiny import TinySettings, make_tiny
from simulator.live.processes import Programs
from tests.bench.measuring import Row, show
from tests.engine.split import ASK, PATH
from tests.live.stack import MODEL, computing_arguments, metric_sum

BAR = 0.6
PROMPT_TOKENS = 1_900
CHUNKS = ("--max-num-tokens", "128", "--max-batch-size", "8", "--port", "0")


@dataclass(slots=True)
class Pair:
    """A decode worker and the prefill workers, of which one is used at a time. Lifetime:
    the bench.
    """

    http: aiohttp.ClientSession
    decode: str
    asked: int = 0

    async def legs(self, prefill: str) -> tuple[float, float]:
        """Return two times in seconds: that of the call to the prefill worker, and from the start
        to the decode worker's first token.
        """
        self.asked += 1  # each prompt is new, so nothing is cached
        prompt = [(token * 31 + self.asked * 97) % 250 + 3 for token in range(PROMPT_TOKENS)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        begun_s = time.monotonic()
        first = await self._post(prefill, body | {"kv_transfer_params": ASK})
        first_s = time.monotonic() - begun_s
        await self._post(self.decode, body | {"kv_transfer_params": first["kv_transfer_params"]})
        return first_s, time.monotonic() - begun_s

    async def _post(self, url: str, body: dict[str, object]) -> dict[str, object]:
        async with self.http.post(f"{url}{PATH}", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()  # type: ignore[no-any-return]


async def measure(folder: Path, runs: int) -> dict[str, list[float]]:
    """Return seconds to the first token: of prefill alone, and with the slow network without and
    with overlap.
    """
    make_tiny(folder / "model", TinySettings(layers=8))
    flags = [*computing_arguments(folder / "model"), *CHUNKS]
    async with Programs(folder / "logs") as programs, aiohttp.ClientSession() as http:
        pair = Pair(http, (await programs.start("decode", "engine", flags)).url)
        free = (await programs.start("prefill", "engine", flags)).url
        alone = [await pair.legs(free) for _ in range(runs)]
        size = await metric_sum(http, free, "warmroute_engine_kv_bytes_total") / runs
        prefill_s = statistics.median(first_s for first_s, _ in alone)
        slow = [*flags, "--kv-gbytes-per-s", f"{size / prefill_s / 1e9:.6f}"]
        after = (await programs.start("after", "engine", slow)).url
        beside = (await programs.start("beside", "engine", [*slow, "--kv-overlap"])).url
        times: dict[str, list[float]] = {"prefill": [first_s for first_s, _ in alone]}
        for _ in range(runs):
            for name, url in (("after", after), ("beside", beside)):
                times.setdefault(name, []).append((await pair.legs(url))[1])
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="prompts of each way")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(measure(Path(folder), options.runs))
    rows = [
        Row(f"{name}: first token", 1e3 * statistics.median(taken), "ms")
        for name, taken in times.items()
    ]
    ratio = statistics.median(
        beside / after for beside, after in zip(times["beside"], times["after"], strict=True)
    )
    rows.append(Row("beside / after", ratio, "times", BAR))
    show(rows, options.json)


if __name__ == "__main__":
    main()
