"""The commands `demo`, `load` and `stack`; each returns whether all went well."""

from __future__ import annotations

import argparse
import asyncio
import re
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console

from simulator.cli import usage
from simulator.live.client import Target, first_model
from simulator.live.console import LoadBoard, print_rows, run_line
from simulator.live.demo import run_demo
from simulator.live.load import MAX_REQUESTS, Workload, opened, run_load
from simulator.live.outcome import Outcome, Verdict, as_report, summarize
from simulator.live.page import render_page
from simulator.live.processes import check_port
from simulator.live.scrape import pool_samples
from simulator.live.stack import (
    MODEL,
    RunResult,
    StackSettings,
    run_scenario,
    running_stack,
    wait_until_routable,
)
from simulator.traces.spec import WorkloadSpec

EXAMPLE_REPEATS = 50  # of a short sentence: several blocks of 16 tokens, and it still pastes well


async def demo(options: argparse.Namespace, console: Console) -> bool:
    """Runs the demo."""
    usage.check_folder("--out", options.out)
    return (await run_demo(options.out, console, options.quick, options.trace)).sound


async def load(options: argparse.Namespace, console: Console) -> bool:
    """Puts a workload on a live endpoint; what came back until Ctrl-C is shown as well."""
    usage.check_load(options)
    url = usage.base_url(options.url)
    workload = _workload(options)
    target = Target(
        url,
        options.model or await first_model(url),
        workload.block_tokens,
        options.vocabulary,
        timeout_s=options.timeout,
    )
    outcomes: list[Outcome] = []
    with LoadBoard(console, 1) as board:
        board.start_run(workload.name, len(workload.jobs))

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            board.note(outcome)

        try:
            await run_load(workload, target, note, options.speed or 1.0, options.concurrency)
        finally:
            if outcomes:
                _report(options, console, workload, target, outcomes)
    return all(outcome.verdict is not Verdict.FAILED for outcome in outcomes)


async def stack(options: argparse.Namespace, console: Console) -> bool:
    """Starts a router and timed workers; stays until one of them ends, or runs a trace."""
    usage.check_stack(options)
    check_port(options.port, "--port")
    check_port(options.admin_port, "--admin-port")
    settings = StackSettings(
        options.policy,
        options.workers,
        options.profile,
        options.speed,
        block_size=16,
        port=options.port,
        admin_port=options.admin_port,
        model=options.model,
    )
    if options.trace is not None:
        return await _trace_on_stack(options, settings, console)
    async with running_stack(settings, options.out / "logs") as running:
        async with aiohttp.ClientSession() as session:
            await wait_until_routable(running, session)
        for number, worker in enumerate(running.workers):
            console.print(f"worker {number}  {worker.url}", highlight=False)
        console.print(f"router    {running.router.url}", highlight=False)
        console.print(f"admin     {running.admin}  (/workers, /metrics)", highlight=False)
        # Plain print: the line must reach the terminal unwrapped to be copied.
        print(
            f"\n{example_request(running.router.url)}\n\nRun it twice: the second one shows "
            "expected_hit_tokens above 0. Ctrl-C ends all of them.",
            flush=True,
        )
        programs = (running.router, *running.workers)
        ends = [asyncio.ensure_future(program.process.wait()) for program in programs]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        running.check()
    return False


def example_request(url: str) -> str:
    """One line for a shell: a request whose prompt fills several blocks, so that it can be warm."""
    story = f"$(printf 'Once upon a time. %.0s' $(seq {EXAMPLE_REPEATS}))"
    body = f"""'{{"model": "{MODEL}", "max_tokens": 16, "prompt": "'"{story}"'"}}'"""
    return (
        f"curl -i {url}/v1/completions -H 'content-type: application/json' "
        f"-H 'x-warmroute-explain: 1' -d {body}"
    )


async def _trace_on_stack(
    options: argparse.Namespace, settings: StackSettings, console: Console
) -> bool:
    workload = _trace_workload(options)
    with LoadBoard(console, 1) as board:
        board.start_run(f"{workload.name} / {settings.policy}", len(workload.jobs))
        result = await run_scenario(workload, settings, options.out / "logs", board.note)
        board.end_run(run_line(result.row))
    print_rows(console, [result.row])
    for line in result.leftovers:
        console.print(f"[bold red]not back to zero:[/] {line}")
    (options.out / "report.json").write_bytes(as_report([result.row], origin=workload.origin))
    title = f"{workload.name} on {settings.workers} timed workers"
    page = render_page([result], [], [], [workload.origin], title)
    (options.out / "report.html").write_text(page)
    console.print(f"report: {options.out / 'report.html'} and {options.out / 'report.json'}")
    return result.row.failed == 0 and not result.leftovers


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace is not None:
        return _trace_workload(options)
    match = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", options.shared_prefix)
    if match is None:
        raise usage.UsageError(
            f"--shared-prefix {options.shared_prefix!r}: expected tokens above 0, as 6000+700"
        )
    requests = options.requests or usage.REQUESTS
    groups = min(options.groups or usage.GROUPS, requests)
    source = (
        f"gen:sglang?groups={groups}&prompts={-(-requests // groups)}&system={match[1]}"
        f"&question={match[2]}&output={options.output_tokens or usage.OUTPUT_TOKENS}"
        f"&rate={options.rate or usage.RATE_PER_S}"
    )
    name = "shared_prompt" if groups == 1 else "shared_prompts"
    seed = usage.SEED if options.seed is None else options.seed
    return opened(WorkloadSpec(source, requests=requests), name, source, seed)


def _trace_workload(options: argparse.Namespace) -> Workload:
    spec = WorkloadSpec(
        str(options.trace),
        block_tokens=options.block_tokens,
        requests=min(options.requests or MAX_REQUESTS, MAX_REQUESTS),
        seconds=options.seconds,
        spread_s=options.spread or 0.0,
        strict=True,
    )
    origin = f"{options.trace.name}, arrivals {options.speed or 1.0:g} times as fast as recorded"
    return opened(spec, options.trace.name, origin)


def _report(
    options: argparse.Namespace,
    console: Console,
    workload: Workload,
    target: Target,
    outcomes: list[Outcome],
) -> None:
    row = summarize("live", workload.name, outcomes)
    print_rows(console, [row])
    console.print(run_line(row))
    console.print(
        f"generator late: p50 {row.generator_late_ms.p50} ms, p99 {row.generator_late_ms.p99} ms"
    )
    if options.json is not None:
        options.json.write_bytes(as_report([row], origin=workload.origin, outcomes=outcomes))
    if options.html is not None:
        result = RunResult(row, tuple(outcomes), pool_samples([], 1.0), row.workers, ())
        # Without what stands before an @: a password has no place on a page.
        host = urlsplit(target.url).netloc.rpartition("@")[2]
        notes = [f"{workload.origin}. Model {target.model}.", _pace(options)]
        page = render_page([result], [], [], notes, f"Load test of {host}", clock="wall time")
        options.html.write_text(page)


def _pace(options: argparse.Namespace) -> str:
    if options.concurrency is not None:
        return (
            f"Closed loop: {options.concurrency} requests under way at any time, times of arrival "
            "not used. Times to first token count from when a request was sent."
        )
    faster = options.trace is None and options.speed is not None
    pace = f" {options.speed:g} times as fast as that" if faster else " at its time"
    return (
        f"Open loop: a request left{pace}, whatever became of earlier ones. Times to first token "
        "count from when it was due."
    )
