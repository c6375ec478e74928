"""One run: start cold programs, put the workload on the router, read every counter, end them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from simulator.client import Target
from simulator.load import OnOutcome, run_load
from simulator.outcome import Outcome
from simulator.scrape import Sample, fetch_workers, sample_forever
from simulator.stack import (
    MODEL,
    StackSettings,
    leftovers,
    running_stack,
    wait_until_routable,
    worker_names,
)
from simulator.summary import ResultRow, summarize
from simulator.workload import Workload

SAMPLES_PER_RUN = 40
MIN_SAMPLE_S = 0.5  # wall clock: asking eight workers more often costs the cores they run on


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave. Lifetime: process."""

    row: ResultRow
    outcomes: tuple[Outcome, ...]  # `worker` is one of `workers`
    samples: tuple[Sample, ...]
    workers: tuple[str, ...]
    leftovers: tuple[str, ...]  # load counters that did not come back to zero


async def run_scenario(
    workload: Workload, settings: StackSettings, log_dir: Path, on_outcome: OnOutcome
) -> RunResult:
    """Runs `workload` (arrivals in model time) against a fresh stack of `settings`.

    Raises `StartError` when a program does not start or dies, `ScrapeError` when one does not
    answer. Everything started has ended when this returns or raises.
    """
    outcomes: list[Outcome] = []
    samples: list[Sample] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_outcome(outcome)

    async with (
        running_stack(settings, log_dir) as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
    ):
        await wait_until_routable(stack, session)
        names = await worker_names(stack, session)
        before = await fetch_workers(session, stack.urls)
        others = tuple(router.url for router in stack.routers[1:])
        target = Target(stack.router.url, MODEL, workload.block_tokens, others=others)
        interval_s = max(MIN_SAMPLE_S, workload.span_s / settings.speed / SAMPLES_PER_RUN)
        try:
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(
                    sample_forever(session, stack.urls, interval_s, samples)
                )
                await run_load(workload, target, note, settings.speed)
                sampling.cancel()
        except ExceptionGroup as failures:
            stack.check()  # a program that died says more than the request that missed it
            raise failures.exceptions[0] from failures
        found = await leftovers(stack, session)
        after = await fetch_workers(session, stack.urls)
    named = [_named(outcome, names) for outcome in outcomes]
    workers = tuple(names.values())
    row = summarize(settings.policy, workload.name, named, workers, before, after, settings.speed)
    return RunResult(row, tuple(named), tuple(samples), workers, tuple(found))


def _named(outcome: Outcome, names: dict[str, str]) -> Outcome:
    if outcome.worker is None:
        return outcome
    return replace(outcome, worker=names.get(outcome.worker, outcome.worker))
