"""The picker's decisions behind a real Envoy, compared with those at the router's own port.

    python -m tests.bench.picker_quality [--load shared_prompt] [--policy warmset] [--repeats 3]
    python -m tests.bench.picker_quality --ladder [--policy llm_d --policy round_robin]

The demo's workloads, from the same seed, go to the same simulated workers as real programs in four
ways: through the router's own port; through Envoy with docs/deploy/envoy/original-dst.yaml and the
picker; the same with full duplex bodies, as gateways have them; and through Envoy with two pickers
in turn, which share state by a real Redis. Everything is restarted for each run, repetitions are
interleaved, and runs are compared within one repetition. Hits are the workers' own counts. Balance
is the busiest worker's requests over the mean. Steps that ended late mean that the machine was too
slow for a credible run; `--speed 0.5` takes twice as long and halves the machine's influence.

With `--ladder`, the 150 x 5 prompts of llm-d's benchmark, scaled to a quarter of the pool (38 x 5
prompts, two workers, a quarter of the rates), go through Envoy and the picker, and the same
requests are replayed. The bench compares each policy's TTFT at the benchmark's 40 requests/s, after
every prompt was seen, and whether both rank the policies alike.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from simulator.live.demo import BLOCK_SIZE, PROFILE, SEED, acts
from simulator.live.load import Workload, opened
from simulator.live.outcome import ResultRow
from simulator.live.stack import ProgramStack, RunResult, StackSettings, run_scenario
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.traces.spec import WorkloadSpec
from tests.bench.measuring import Row, show
from tests.engines.envoy import cluster_of, duplex, picker_of, running_envoy
from tests.live.redis_server import redis_server

FILE = "original-dst.yaml"
ENDS_S = 3_600.0  # of a closed loop, which ends by itself
HOLD_S = 60.0  # the longest wait of a request at either door


@dataclass(frozen=True)
class Door:
    """One way in which requests reach the router: its own port, or Envoy and the picker."""

    name: str
    envoy: bool = True
    duplex: bool = False
    routers: int = 1


FRONT, SAMPLE = Door("front", envoy=False), Door("picker")
DUPLEX, SHARED = Door("picker, duplex", duplex=True), Door("two pickers", routers=2)
DOORS = (FRONT, SAMPLE, DUPLEX, SHARED)
# A door, the door it is compared with, and by how much it may be worse, in per cent.
HELD_TO = ((SAMPLE, FRONT, 2.0), (DUPLEX, FRONT, 2.0), (SHARED, SAMPLE, 3.0))


def before(
    door: Door, folder: Path
) -> Callable[[ProgramStack], AbstractAsyncContextManager[list[str]]]:
    """Return a context manager that yields the addresses to which requests go for this way."""

    def change(config: Any) -> None:
        picker_of(config)["message_timeout"] = f"{HOLD_S + 1:g}s"
        cluster_of(config, "picker")["lb_policy"] = "ROUND_ROBIN"
        if door.duplex:
            duplex(config)

    @asynccontextmanager
    async def served(stack: ProgramStack) -> AsyncIterator[list[str]]:
        if not door.envoy:
            yield [router.url for router in stack.routers]
            return
        pickers = [router.facts["picker"] for router in stack.routers]
        async with running_envoy(folder, FILE, pickers, change=change) as envoy:
            yield [envoy.url]

    return served


async def run(workload: Workload, settings: StackSettings, door: Door, folder: Path) -> RunResult:
    """Run a workload once, with its requests sent this way. Raises what `run_scenario` raises."""
    more = ["--limits-hold-s", f"{HOLD_S:g}"]
    if door.envoy:
        more += ["--picker-port", "0", "--picker-decision-s", f"{HOLD_S:g}"]
    with ExitStack() as programs:
        state = None
        if door.routers > 1:
            state = programs.enter_context(redis_server(folder / "redis")).url
        of_run = replace(settings, routers=door.routers, state=state, router_flags=tuple(more))
        result = await run_scenario(workload, of_run, folder, lambda _: None, before(door, folder))
    assert not result.leftovers, result.leftovers
    return result


def made(folder: Path) -> Path:
    """Create a folder and return it."""
    folder.mkdir(parents=True)
    return folder


Results = dict[Door, list[ResultRow]]  # in order of repetition


async def compared(
    workloads: Iterable[Workload],
    settings: StackSettings,
    folder: Path,
    doors: Sequence[Door] = DOORS,
    said: Callable[[str], None] = lambda line: None,
) -> Results:
    """Run each workload with its requests sent each way, in turns."""
    results: Results = {door: [] for door in doors}
    for number, workload in enumerate(workloads):
        for door in doors:
            place = made(folder / f"{workload.name}-{number}-{door.name.replace(', ', '-')}")
            row = (await run(workload, settings, door, place)).row
            results[door].append(row)
            said(told(workload.name, door, row))
    return results


def told(name: str, door: Door, row: ResultRow) -> str:
    """Return the figures of a run as one line of text."""
    return (
        f"{name}, {row.policy}, {door.name}: hits {row.hit_rate_tokens:.4f}, max/mean "
        f"{row.load_skew:.3f}, TTFT mean {row.ttft_ms.mean:,.0f} ms, p99 {row.ttft_ms.p99:,.0f} "
        f"ms, {row.completed} of {row.requests}, late steps {row.overrun_steps_share or 0:.1%}"
    )


def beyond(results: Results, door: Door, than: Door, figure: Callable[[ResultRow], float]) -> float:
    """Return the median of how much greater a figure is than that of the way `than`, in
    per cent.
    """
    pairs = zip(results[door], results[than], strict=True)
    return statistics.median(100 * (figure(a) / figure(b) - 1) for a, b in pairs)


def hits(row: ResultRow) -> float:
    """Return the share of prompt tokens that the workers found cached."""
    return row.hit_rate_tokens or 0.0


def balance(row: ResultRow) -> float:
    """Return the busiest worker's number of requests over the mean of all workers."""
    return row.load_skew or 0.0


def rows_of(name: str, results: Results) -> list[Row]:
    """Return how much worse the figures of each way are than those of its reference, in per cent;
    negative means better.
    """
    found = []
    for door, than, bar in HELD_TO:
        if door in results and than in results:
            what = f"{name}: {door.name} beside {than.name}"
            fewer, above = -beyond(results, door, than, hits), beyond(results, door, than, balance)
            found.append(Row(f"{what}, fewer hits", fewer, "%", bar))
            found.append(Row(f"{what}, max/mean above", above, "%", bar))
    return found


def workloads_of(name: str, seeds: Iterable[int]) -> tuple[list[Workload], StackSettings]:
    """Return a demo workload for each seed, and the workers' settings for it."""
    act = next(one for one in acts() if one.name == name)
    ends_s = ENDS_S if act.closed_loop else None
    works = [opened(act.spec, name, act.description, seed, ends_s) for seed in seeds]
    settings = StackSettings(
        "warmset", act.workers, PROFILE, block_size=BLOCK_SIZE, kv_tokens=act.kv_tokens
    )
    return works, settings


LADDER_PAUSE_S = 100  # longer than the slowest stage takes to end, but for the last
LADDER = (
    "gen:inference_perf?groups=38&prompts=5&system=6000&question=1200&output=1000"
    f"&stages=3.75:50,10:20&warm_ups=1&pause_s={LADDER_PAUSE_S}"
)
LADDER_POLICIES = ("round_robin", "least_requests", "kv_prefix", "llm_d", "hybrid")
LADDER_POOL = WorkerGroup(2, PROFILE, 307_328)
LEVEL = 2.0  # first tokens that differ by a smaller factor count as equal


def p90_s(taken_ms: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the p90 of the TTFT in seconds for each reported stage; `taken_ms` has (due time in s,
    TTFT in ms) of each request.
    """
    stages: list[list[float]] = [[]]
    last_s = 0.0
    for due_s, ttft_ms in sorted(taken_ms):
        if due_s - last_s > LADDER_PAUSE_S / 2:
            stages.append([])
        stages[-1].append(ttft_ms / 1000)
        last_s = due_s
    return tuple(float(np.percentile(stage, 90)) for stage in stages[1:])


async def climbed(policy: str, speed: float, folder: Path) -> tuple[float, ...]:
    """Run a policy's ladder of request rates live and return the TTFT p90 of each stage."""
    workload = opened(WorkloadSpec(LADDER), "ladder", LADDER)
    settings = StackSettings(
        policy, LADDER_POOL.count, PROFILE, speed, block_size=16, kv_tokens=LADDER_POOL.kv_tokens
    )
    result = await run(workload, settings, SAMPLE, folder)
    assert result.row.completed == result.row.requests, result.row
    return p90_s([
        (one.scheduled_s * speed, (one.ttft_ms or math.inf) * speed) for one in result.outcomes
    ])  # fmt: skip


def replayed(policy: str) -> tuple[float, ...]:
    """Replay a policy's ladder of request rates on virtual time and return the TTFT p90 of each
    stage.
    """
    table = replay(Setup(WorkloadSpec(LADDER), policy, (LADDER_POOL,), block_size=16)).table
    taken_ns = table.first_token_ns - table.arrival_ns
    return p90_s([*zip(table.arrival_ns / 1e9, taken_ns / 1e6, strict=True)])


def same_order(live: Sequence[float], simulated: Sequence[float]) -> bool:
    """Return True if live and simulated figures never rank two policies in opposite order."""
    pairs = combinations(range(len(live)), 2)
    return not any(_ahead(live, *pair) * _ahead(simulated, *pair) < 0 for pair in pairs)


def _ahead(of: Sequence[float], one: int, other: int) -> int:
    if max(of[one], of[other]) < LEVEL * min(of[one], of[other]):
        return 0
    return 1 if of[one] < of[other] else -1


def ladder(policies: Sequence[str], speed: float) -> bool:
    """Print live and replayed figures of each policy; return whether they rank the
    policies alike.
    """
    live, simulated = [], []
    print("| policy | TTFT p90 at 40/s: live | replayed |", "|---|---|---|", sep="\n")
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder:
            live.append(asyncio.run(climbed(policy, speed, Path(folder))))
        simulated.append(replayed(policy))
        shown = (" s, ".join(f"{one:.2f}" for one in each) for each in (live[-1], simulated[-1]))
        print(f"| `{policy}` |", " s | ".join(shown), "s |", flush=True)
    same = all(
        same_order([one[stage] for one in live], [one[stage] for one in simulated])
        for stage in range(len(live[0]))
    )
    print("ranking: the same in both worlds" if same else "ranking: ANOTHER")
    return same


def main() -> int:
    """Print the figures; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [one.name for one in acts()]
    parser.add_argument("--load", choices=names, action="append", help="default: all")
    parser.add_argument("--policy", action="append", help="default: warmset")
    parser.add_argument("--door", choices=[one.name for one in DOORS], action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speed", type=float, default=1.0, help="model seconds in a second")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--ladder", action="store_true", help="llm-d's, instead of the demo's")
    options = parser.parse_args()
    if options.ladder:
        return 0 if ladder(options.policy or LADDER_POLICIES, options.speed) else 1
    doors = [one for one in DOORS if not options.door or one.name in options.door]
    found = list[Row]()
    for name in options.load or names:
        works, of_load = workloads_of(name, range(SEED, SEED + options.repeats))
        for policy in options.policy or ["warmset"]:
            settings = replace(of_load, policy=policy, speed=options.speed)
            said = partial(print, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                results = asyncio.run(compared(works, settings, Path(folder), doors, said))
            found += rows_of(f"{name}, {policy}", results)
    show(found, options.json)
    return 0 if all(row.reached for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
