"""Compares policies by vLLM's own benchmark of repeated prefixes at two servers.

    python -m tests.engines.prefix_workload [--rate 2 --rate 4] [--prompts 240] [--repeats 3]

`vllm bench serve` sends prompts of six thousand tokens, in which a dozen prefixes recur, at each
rate through a router of each policy; the servers' caches are emptied in between. "Possible" is the
share of prompt tokens that a cache without bounds would hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from simulator.live.processes import Programs
from tests.engines.environment import NEWEST_VLLM, Environment
from tests.engines.model import make_model
from tests.engines.vllm_server import BLOCK_SIZE, ENVIRONMENT, MODEL, Server
from tests.live.stack import Stack, metric_sum

SERVERS = 2
PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 6_144, 64, 8
# The blocks of each server: one server has no room for all prefixes, two servers have.
BLOCKS = 8 * PREFIX_TOKENS // BLOCK_SIZE
FLAGS = ("--max-model-len", "8192")
PREFIXES, PROMPTS = 12, 120
POLICIES = ("round_robin", "warmset")
RATES = (2.0, 4.0)  # requests a second


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one run of the benchmark with one policy and rate."""

    policy: str
    rate: float
    hit_share: float  # of prompt tokens, by the servers' own counters
    ttft_ms: float  # mean
    ttft_p99_ms: float
    completed: int


def possible_share(prompts: int) -> float:
    """Return the share of prompt tokens that were sent before, counted in whole blocks."""
    again = PREFIX_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    return again * (prompts - PREFIXES) / (prompts * (PREFIX_TOKENS + SUFFIX_TOKENS))


async def run_once(
    servers: Sequence[Server],
    model: Path,
    folder: Path,
    policy: str,
    rate: float,
    prompts: int,
    seed: int,
) -> Row:
    """Empty the servers' caches, start a router with the policy, and run the benchmark."""
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        for server in servers:
            await server.post("/reset_prefix_cache")
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--tokenizer", str(model)]
        arguments += ["--policy", policy]
        for server in servers:
            arguments += ["--worker", server.spec]
        router = Stack(programs, await programs.start("router", "router", arguments), [], http)
        for worker_id in range(len(servers)):
            await router.until_state(worker_id, "ready")
        before = [await _hits(http, server) for server in servers]
        result = await _bench(servers[0], model, folder, router.url, rate, prompts, seed)
        after = [await _hits(http, server) for server in servers]
    hits = sum(a[0] - b[0] for a, b in zip(after, before, strict=True))
    queries = sum(a[1] - b[1] for a, b in zip(after, before, strict=True))
    return Row(
        policy=policy, rate=rate, hit_share=hits / queries, ttft_ms=result["mean_ttft_ms"],
        ttft_p99_ms=result["p99_ttft_ms"], completed=result["completed"],
    )  # fmt: skip


async def _hits(http: aiohttp.ClientSession, server: Server) -> tuple[float, float]:
    """Return (tokens from cache, tokens looked up) since the server's start."""
    hits = await metric_sum(http, server.url, "vllm:prefix_cache_hits_total")
    return hits, await metric_sum(http, server.url, "vllm:prefix_cache_queries_total")


async def _bench(
    server: Server, model: Path, folder: Path, url: str, rate: float, prompts: int, seed: int
) -> dict[str, float]:
    command = [
        *(str(server.environment.python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", MODEL, "--tokenizer", str(model), "--dataset-name", "prefix_repetition"),
        *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS)),
        *("--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)),
        *("--prefix-repetition-num-prefixes", str(PREFIXES)),
        *("--prefix-repetition-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(prompts), "--request-rate", str(rate), "--seed", str(seed)),
        *("--percentile-metrics", "ttft", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]
    with (folder / "bench.log").open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=sink, stderr=sink, env={**os.environ, **ENVIRONMENT}
        )
        status = await process.wait()
    if status:
        raise RuntimeError(f"vllm bench serve ended with {status}: {folder / 'bench.log'}")
    result: dict[str, float] = json.loads((folder / "result.json").read_text())
    return result


def table(rows: Sequence[Row], prompts: int) -> Table:
    """Return a table with a row for each rate and policy: medians over the repeats."""
    shown = Table(title=f"two vLLM servers, {PREFIXES} prefixes of {PREFIX_TOKENS} tokens")
    for name in ("requests/s", "policy", "from cache", "of possible", "TTFT mean", "TTFT p99"):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for rate in sorted({row.rate for row in rows}):
        for policy in dict.fromkeys(row.policy for row in rows):
            own = [row for row in rows if (row.rate, row.policy) == (rate, policy)]
            hit = statistics.median(row.hit_share for row in own)
            shown.add_row(
                f"{rate:g}", policy, f"{hit:.0%}", f"{hit / possible_share(prompts):.1%}",
                f"{statistics.median(row.ttft_ms for row in own):,.0f} ms",
                f"{statistics.median(row.ttft_p99_ms for row in own):,.0f} ms",
            )  # fmt: skip
    return shown


async def compare(
    folder: Path,
    policies: Sequence[str],
    rates: Sequence[float],
    prompts: int,
    repeats: int,
    first_seed: int = 0,
) -> list[Row]:
    """Start two servers and run each policy at each rate in turn, `repeats` times."""
    environment = Environment("vllm", NEWEST_VLLM)
    environment.make()
    model = make_model(folder / "model")
    servers = [
        Server(environment, model, folder / f"server-{n}", blocks=BLOCKS, flags=FLAGS)
        for n in range(SERVERS)
    ]
    rows = list[Row]()
    try:
        print(f"starting {SERVERS} vLLM servers: a minute or two", file=sys.stderr)
        for server in servers:
            await server.start()
        for server in servers:
            await server.until_healthy()
        for seed in range(first_seed, first_seed + repeats):
            for rate in rates:
                for policy in policies:
                    at = folder / f"{policy}-{rate:g}-{seed}"
                    row = await run_once(servers, model, at, policy, rate, prompts, seed)
                    print(
                        f"{rate:g} requests/s, {policy}: {row.completed} answers, "
                        f"{row.hit_share:.0%} from cache, mean TTFT {row.ttft_ms:,.0f} ms",
                        file=sys.stderr,
                    )
                    rows.append(row)
    finally:
        await asyncio.gather(*(server.stop() for server in servers))
    return rows


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", action="append", metavar="NAME", help=f"default: {', '.join(POLICIES)}")
    add("--rate", action="append", type=float, metavar="R", help="requests a second; default: 2, 4")
    add("--prompts", type=int, default=PROMPTS, metavar="N", help=f"a run; default {PROMPTS}")
    add("--repeats", type=int, default=1, metavar="N", help="of which medians are shown; default 1")
    add("--seed", type=int, default=0, metavar="N", help="of the first repeat; default 0")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(
            compare(
                Path(folder),
                flags.policy or POLICIES,
                flags.rate or RATES,
                flags.prompts,
                flags.repeats,
                flags.seed,
            )
        )
    Console().print(table(rows, flags.prompts))


if __name__ == "__main__":
    main()
