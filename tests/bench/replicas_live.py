"""Several live routers compared with one: `python -m tests.bench.replicas_live [--quick]`.

The same requests, from the same seed, go through 1, 2 and 4 routers of the same simulated workers,
as real programs; several routers share state through a real Redis. Requests go to the routers in
turn, so each turn of a conversation goes through another router. Everything is restarted for each
run, repetitions are interleaved (1, 2, 4, 1, 2, 4, ...), and runs are compared within one
repetition: differences are medians over repetitions.

Predicted, from replays with shared state 2 ms late: mean TTFT within 4 %, p99 within 6 %, the same
hits. Times are model time: with `--speed 0.5` everything takes twice as long, which halves the
influence of routers and Redis. Steps that ended late mean that the machine was too slow for a
credible run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulator.live.load import Workload, opened
from simulator.live.outcome import ResultRow
from simulator.live.stack import StackSettings, run_scenario
from simulator.traces.spec import WorkloadSpec
from tests.live.redis_server import redis_server

ROUTERS = (1, 2, 4)
BARS = {"mean TTFT": 5.0, "p99 TTFT": 10.0, "hits": 1.0}  # per cent, per cent, points
_MS = 1e-3


@dataclass(frozen=True)
class Load:
    """The load to send. Rates are for each worker, so that a smaller machine may have fewer
    workers.
    """

    source: str  # a generator's; {rate} and {burst} are filled in
    rate_per_s: float  # a worker
    closed: bool  # a turn waits for the answer to the turn before
    burst_s: float = 0.0  # of arrivals, at once at the start

    def workload(self, name: str, workers: int, seconds: float, seed: int) -> Workload:
        """Return the requests of `seconds` seconds."""
        rate = self.rate_per_s * workers
        count = round(rate * (seconds + self.burst_s))
        source = self.source.format(
            rate=rate, burst=max(1, round(rate * self.burst_s)), count=count
        )
        ends_s = seconds if self.closed else None
        return opened(WorkloadSpec(source, seconds=seconds), name, source, seed, ends_s)


_CHATS = (
    "gen:tenants?sessions={count}&rate={rate}&burst={burst}&turns=2..6&output=24"
    "&think_s=4&pause_s=1"
)
LOADS = {
    "shared": Load("gen:shared?requests={count}&rate={rate}&output=24", 6.25, closed=False),
    "chats": Load(_CHATS, 1.0, closed=True),
    # The worst case: many requests begin at once, before any router can have heard of the others'.
    "burst": Load(_CHATS, 1.0, closed=True, burst_s=10.0),
}


@dataclass(frozen=True)
class Figures:
    """The latency and hit figures of one run."""

    mean_s: float
    p99_s: float
    hits: float  # per cent
    requests: int
    lost: int  # requests without a whole answer
    overruns: float  # per cent of the steps

    @staticmethod
    def of(row: ResultRow) -> Figures:
        """Return a result's figures in the units of the table."""
        mean_ms, p99_ms = row.ttft_ms.mean or 0.0, row.ttft_ms.p99 or 0.0
        return Figures(
            mean_ms * _MS,
            p99_ms * _MS,
            100 * (row.hit_rate_tokens or 0.0),
            row.requests,
            row.requests - row.completed,
            100 * (row.overrun_steps_share or 0.0),
        )

    def beyond(self, one: Figures) -> dict[str, float]:
        """Return how much greater each figure is than in the run with one router; negative means
        smaller.
        """
        return {
            "mean TTFT": 100 * (self.mean_s / one.mean_s - 1),
            "p99 TTFT": 100 * (self.p99_s / one.p99_s - 1),
            "hits": self.hits - one.hits,
        }


Runs = dict[int, list[Figures]]  # by number of routers, in order of repetition


async def compared(
    load: Load,
    name: str,
    settings: StackSettings,
    seconds: float,
    repeats: int,
    folder: Path,
    said: Callable[[str], None],
    routers: Sequence[int] = ROUTERS,
    seed: int = 1,
) -> Runs:
    """Run a load with each number of routers in turn; `seed` is the seed of the first repetition.
    Raises what `run_scenario` raises.
    """
    runs: Runs = {number: [] for number in routers}
    for repeat in range(repeats):
        workload = load.workload(name, settings.workers, seconds, seed + repeat)
        for number in routers:
            place = folder / f"{name}-{repeat}-{number}"
            place.mkdir(parents=True)
            with redis_server(place / "redis") as server:
                state = server.url if number > 1 else None
                of_run = replace(settings, routers=number, state=state)
                result = await run_scenario(workload, of_run, place, lambda _: None)
            assert not result.leftovers, result.leftovers
            runs[number].append(figures := Figures.of(result.row))
            said(f"{name}, repetition {repeat + 1}, {number} routers: {figures}")
    return runs


def differences(runs: Runs, number: int) -> dict[str, list[float]]:
    """Return by figure the differences between `number` routers and one, for each repetition."""
    pairs = [several.beyond(one) for several, one in zip(runs[number], runs[1], strict=True)]
    return {what: [pair[what] for pair in pairs] for what in BARS}


def table(name: str, runs: Runs) -> str:
    """Return the runs as rows of a Markdown table."""
    lines = []
    for number, of_number in runs.items():
        median = {
            key: statistics.median(getattr(one, key) for one in of_number)
            for key in ("mean_s", "p99_s", "hits", "overruns")
        }
        told = dict.fromkeys(BARS, "")
        if number > 1:
            for what, found in differences(runs, number).items():
                told[what] = f" ({_signed(found)}, {min(found):+.1f} to {max(found):+.1f})"
        requests = sum(one.requests for one in of_number)
        lost = sum(one.lost for one in of_number)
        lines.append(
            f"| {name} | {number} | {median['mean_s']:.3f} s{told['mean TTFT']} "
            f"| {median['p99_s']:.3f} s{told['p99 TTFT']} | {median['hits']:.1f} %{told['hits']} "
            f"| {requests:,}, {lost} | {median['overruns']:.1f} % |"
        )
    return "\n".join(lines)


def _signed(found: Sequence[float]) -> str:
    return f"{statistics.median(found):+.1f}"


def missed(name: str, runs: Runs) -> list[str]:
    """Return a line of text for each figure that exceeds its bound."""
    return [
        f"{name}, {number} routers: {what} {_signed(found)}, at most {BARS[what]:g}"
        for number in runs
        if number > 1
        for what, found in differences(runs, number).items()
        if (-1 if what == "hits" else 1) * statistics.median(found) > BARS[what]
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", choices=LOADS, action="append", help="default: all")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--speed", type=float, default=1.0, help="model seconds in a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of model time, a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first repetition")
    parser.add_argument("--policy", default="warmset")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    return parser.parse_args()


def main() -> int:
    """Print the table; return 1 if a figure is beyond its bound."""
    options = _arguments()
    settings = StackSettings(options.policy, options.workers, speed=options.speed)
    seconds, repeats = (10.0, 1) if options.quick else (options.seconds, options.repeats)
    tables, beyond = [], []

    def said(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    for name in options.load or LOADS:
        with tempfile.TemporaryDirectory() as folder:
            of_load = compared(
                LOADS[name], name, settings, seconds, repeats, Path(folder), said, seed=options.seed
            )
            runs = asyncio.run(of_load)
        tables.append(table(name, runs))
        beyond += missed(name, runs)
    print("| load | routers | mean TTFT | p99 | hits | requests, lost | late steps |")
    print("|---|---|---|---|---|---|---|", *tables, sep="\n")
    print(*beyond, sep="\n")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
