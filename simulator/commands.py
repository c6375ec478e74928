"""What each command of `warmroute-sim` does; each returns whether all went well."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import aiohttp
from rich.console import Console

from simulator.client import Target
from simulator.console import Board, results_tables, run_line
from simulator.demo import DemoSettings, run_demo
from simulator.load import run_load
from simulator.outcome import Outcome, Verdict
from simulator.page import render_page
from simulator.prompt import FIRST_TOKEN_ID
from simulator.sample import SAMPLE_PATH, conversation_sample, write_sample
from simulator.scenario import RunResult, run_scenario
from simulator.scrape import ScrapeError
from simulator.stack import MODEL, StackSettings, running_stack
from simulator.summary import as_report, summarize
from simulator.trace import read_trace, spread_ticks
from simulator.workload import MAX_REQUESTS, Workload, first_seconds, generated_shared_prefix


class UsageError(ValueError):
    """The command line asks for something that cannot be done; says what would do."""


async def demo(options: argparse.Namespace, console: Console) -> bool:
    """Runs the demo."""
    settings = DemoSettings(
        out=options.out,
        workers=options.workers,
        speed=options.speed,
        quick=options.quick,
        trace=options.trace,
    )
    return (await run_demo(settings, console)).sound


async def load(options: argparse.Namespace, console: Console) -> bool:
    """Puts a workload on a live endpoint; what came back until Ctrl-C is shown as well."""
    url = options.url.rstrip("/")
    if not re.match(r"https?://[^/]+", url):
        raise UsageError(f"URL {options.url!r}: expected http://HOST:PORT")
    if options.vocabulary <= FIRST_TOKEN_ID:
        raise UsageError(f"--vocabulary {options.vocabulary}: must be above {FIRST_TOKEN_ID}")
    workload = _workload(options)
    target = Target(
        url,
        options.model or await _first_model(url),
        workload.block_tokens,
        options.vocabulary,
        timeout_s=options.timeout,
    )
    outcomes: list[Outcome] = []
    with Board(console, 1) as board:
        board.start_run(workload.name, len(workload.rows))

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            board.note(outcome)

        try:
            await run_load(workload, target, note, options.speed, options.concurrency)
        finally:
            if outcomes:
                _report(options, console, workload, outcomes)
    return all(outcome.verdict is not Verdict.FAILED for outcome in outcomes)


async def stack(options: argparse.Namespace, console: Console) -> bool:
    """Starts a router and timed workers; stays until one of them ends, or runs a trace."""
    settings = StackSettings(
        options.policy,
        options.workers,
        options.profile,
        options.speed,
        block_size=16,
        port=options.port,
    )
    if options.trace is not None:
        return await _trace_on_stack(options, settings, console)
    async with running_stack(settings, options.out / "logs") as running:
        for number, worker in enumerate(running.workers):
            console.print(f"worker {number}  {worker.url}", highlight=False)
        console.print(f"router    {running.router.url}", highlight=False)
        console.print(f"admin     {running.admin}  (/workers, /metrics)", highlight=False)
        body = f'{{"model": "{MODEL}", "prompt": "Once upon a time", "max_tokens": 16}}'
        # Plain print: the line must reach the terminal unwrapped to be copied.
        print(
            f"\ncurl {running.router.url}/v1/completions -H 'content-type: application/json' "
            f"-H 'x-warmroute-explain: 1' -i -d '{body}'\n\nCtrl-C ends all of them.",
            flush=True,
        )
        programs = (running.router, *running.workers)
        ends = [asyncio.ensure_future(program.process.wait()) for program in programs]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        running.check()
    return False


async def _trace_on_stack(
    options: argparse.Namespace, settings: StackSettings, console: Console
) -> bool:
    workload = _trace_workload(options)
    with Board(console, 1) as board:
        board.start_run(f"{workload.name} / {settings.policy}", len(workload.rows))
        result = await run_scenario(workload, settings, options.out / "logs", board.note)
        board.end_run(run_line(result.row))
    console.print(*results_tables([result.row]))
    for line in result.leftovers:
        console.print(f"[bold red]not back to zero:[/] {line}")
    (options.out / "report.json").write_bytes(as_report([result.row], origin=workload.origin))
    page = render_page([result], [], [], [workload.origin], workload.name)
    (options.out / "report.html").write_text(page)
    console.print(f"report: {options.out / 'report.html'} and {options.out / 'report.json'}")
    return result.row.failed == 0 and not result.leftovers


async def sample(options: argparse.Namespace, console: Console) -> bool:
    """Writes the conversation sample."""
    path: Path = options.out or SAMPLE_PATH
    count = write_sample(path, conversation_sample(options.seconds, seed=options.seed))
    console.print(f"{path}: {count} requests", highlight=False)
    return True


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace is not None:
        return _trace_workload(options)
    match = re.fullmatch(r"(\d+)\+(\d+)", options.shared_prefix)
    if match is None:
        raise UsageError(f"--shared-prefix {options.shared_prefix!r}: expected tokens as 6000+700")
    requests = options.requests or 100
    workload = generated_shared_prefix(
        options.groups,
        -(-requests // options.groups),
        int(match[1]),
        int(match[2]),
        options.output_tokens,
        options.rate,
        options.seed,
    )
    return replace(workload, rows=workload.rows[:requests])


def _trace_workload(options: argparse.Namespace) -> Workload:
    rows = read_trace(options.trace, options.block_tokens)
    if options.spread is not None:
        rows = spread_ticks(rows, options.spread)
    kept = islice(rows, min(options.requests or MAX_REQUESTS, MAX_REQUESTS))
    origin = f"{options.trace.name}, arrivals {options.speed:g} times as fast as recorded"
    seconds = options.seconds or math.inf
    return first_seconds(kept, seconds, options.trace.name, origin, options.block_tokens)


async def _first_model(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models") as reply,
        ):
            body = await reply.json()
            return str(body["data"][0]["id"])
    except (
        aiohttp.ClientError,
        TimeoutError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        raise ScrapeError(f"{url}/v1/models lists no model ({error}); name one: --model") from error


def _report(
    options: argparse.Namespace, console: Console, workload: Workload, outcomes: list[Outcome]
) -> None:
    row = summarize("live", workload.name, outcomes)
    console.print(*results_tables([row]))
    console.print(run_line(row))
    console.print(
        f"generator late: p50 {row.generator_late_ms.p50} ms, p99 {row.generator_late_ms.p99} ms"
    )
    if options.json is not None:
        options.json.write_bytes(as_report([row], origin=workload.origin, outcomes=outcomes))
    if options.html is not None:
        result = RunResult(row, tuple(outcomes), (), row.workers, ())
        options.html.write_text(render_page([result], [], [], [workload.origin], options.url))
