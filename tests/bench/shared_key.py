"""TTFT of sub-agents whose client gives one cache key to a whole group of agents.

    python -m tests.bench.shared_key [--draws 10] [--kv 150000 200000 120000]

A main agent of 20,000 tokens starts five sub-agents of 5,000 tokens at once; such groups come at
random times, and memory is short. A row is one size of the workers' KV memory. Its columns are the
mean TTFT of the sub-agents' requests if the clients send an id for each agent, one session id for
the whole group, or one `prompt_cache_key` for it; then the second and the third as a ratio to the
first, with 95 % intervals over the draws (Student's t).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from random import Random

import numpy as np

from simulator.replay.run import replay
from simulator.replay.setup import ClientIds, Setup, WorkerGroup, World
from simulator.report.figures import interval
from simulator.traces.job import ErrorLog, Job, JobStream
from simulator.traces.spec import WorkloadSpec

PROFILE, WORKERS, BLOCK = "llama-3.1-8b-h100", 4, 64
MAIN_TOKENS, CHILD_TOKENS, CHILDREN, TURNS = 20_000, 5_000, 5, 6
GROWTH_TOKENS, OUTPUT_TOKENS = 600, 200
GROUPS_PER_S, SECONDS = 0.3, 300.0
IDS: tuple[ClientIds, ...] = ("agents", "group", "key")


def turns_of(
    random: Random, name: str, serial: int, start_s: float, tokens: int, group: str
) -> Iterator[Job]:
    """Yield the requests of one agent; each prompt is the previous one with its answer and a few
    tokens more.
    """
    at_s = start_s
    for turn in range(TURNS):
        prompt = tokens + turn * GROWTH_TOKENS
        ids = np.arange(prompt // BLOCK, dtype=np.uint64) + np.uint64(serial << 32)
        yield Job(
            round(at_s * 1e9),
            prompt,
            OUTPUT_TOKENS,
            ids,
            session=name,
            group=group,
            parent=None if name == group else group,
            think_ns=round(random.expovariate(1 / 3.0) * 1e9),
        )
        at_s += 8.0


def jobs_of(draw: int) -> list[Job]:
    """Return the requests of one random draw: groups of agents that come at random times."""
    random = Random(f"shared key {draw}")
    jobs: list[Job] = []
    at_s, serial = 0.0, 0
    while (at_s := at_s + random.expovariate(GROUPS_PER_S)) < SECONDS:
        group = f"g{serial}"
        for agent in range(CHILDREN + 1):
            serial += 1
            name = group if agent == 0 else f"{group}/{agent}"
            tokens = MAIN_TOKENS if agent == 0 else CHILD_TOKENS
            start_s = at_s if agent == 0 else at_s + 10.0
            jobs += turns_of(random, name, serial, start_s, tokens, group)
    return sorted(jobs, key=lambda job: job.at_ns)


def mean_ttft_s(jobs: list[Job], kv_tokens: int, ids: ClientIds, policy: str) -> float:
    """Return the mean TTFT of the sub-agents' answered requests, in seconds."""
    setup = Setup(
        WorkloadSpec("by hand"),
        policy,
        (WorkerGroup(WORKERS, PROFILE, kv_tokens=kv_tokens),),
        block_size=BLOCK,
        closed_loop=True,
        world=World(client_ids=ids),
    )
    stream = JobStream(
        "agents", BLOCK, iter(jobs), len(jobs), ErrorLog("agents"), "made up", lambda: 1.0
    )
    table = replay(setup, stream=stream).table
    # A sub-agent's prompt is always shorter than a main agent's.
    children = (table.prompt_tokens < MAIN_TOKENS) & (table.first_token_ns >= 0)
    return float(np.mean(table.first_token_ns[children] - table.arrival_ns[children])) / 1e9


def told(ratios: list[float]) -> str:
    """Return the mean of the ratios and half the width of its 95 % interval, as text."""
    found = interval(ratios)
    assert found is not None
    return f"{found.mean:.3f}" if found.half is None else f"{found.mean:.3f} +- {found.half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=10, help="draws of each row")
    parser.add_argument("--kv", type=int, nargs="+", default=[150_000, 200_000, 120_000],
                        help="KV tokens of each worker, a row each")  # fmt: skip
    parser.add_argument("--policy", default="warmset", help="as warmroute's `policy`")
    given = parser.parse_args()
    print("| KV tokens | an id each, s | one id, s | one key, s | one id / each | one key / each |")
    print("|---|---|---|---|---|---|")
    for kv_tokens in given.kv:
        found: dict[ClientIds, list[float]] = {ids: [] for ids in IDS}
        for draw in range(given.draws):
            jobs = jobs_of(draw)
            for ids in IDS:
                found[ids].append(mean_ttft_s(jobs, kv_tokens, ids, given.policy))
        ratios = [
            [a / b for a, b in zip(found[ids], found["agents"], strict=True)] for ids in IDS[1:]
        ]
        means = [f"{statistics.fmean(found[ids]):.2f}" for ids in IDS]
        print(f"| {kv_tokens:,} | {' | '.join(means)} | {' | '.join(map(told, ratios))} |",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
