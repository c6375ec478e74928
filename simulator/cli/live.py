"""The commands `demo`, `load` and `stack`; each returns True if all went well."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct
from rich.console import Console

from simulator.cli.flags import Either, Place, Port, Whole, command
from simulator.cli.usage import (
    UsageError,
    base_url,
    check_file,
    check_folder,
    check_policy,
    check_profile,
)
from simulator.live.client import FIRST_TOKEN_ID, Target, first_model
from simulator.live.console import LoadBoard, print_rows, run_line
from simulator.live.demo import run_demo
from simulator.live.load import MAX_REQUESTS, Workload, opened, run_load
from simulator.live.outcome import LiveVerdict, Outcome, as_report, summarize
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

EXAMPLE_REPEATS = 50  # of a short sentence: several blocks of 16 tokens, and short enough to paste


REQUESTS, GROUPS, RATE_PER_S, OUTPUT_TOKENS, SEED = 100, 1, 10.0, 32, 1
BLOCK_TOKENS = 512

OF_A_TRACE = ("seconds", "spread", "block_tokens")
OF_A_SHARED_PREFIX = ("groups", "rate", "output_tokens", "seed")


class Demo(Struct):
    """The options of `demo`."""

    out: Annotated[Path, "DIR", "folder for reports and logs"] = Path("build/demo")
    quick: Annotated[bool, "send as few live requests as on a busy machine"] = False
    trace: Annotated[Path | None, "conversation trace to replay"] = None


@command("[option]...")
async def demo(options: Demo, console: Console) -> bool:
    """Replays three workloads for several policies, then starts timed workers and a router as
    processes on loopback and sends the first workload to them. Prints a table, writes report.html
    and report.json. Takes about a minute and a half, never more than four; on a busy machine the
    demo sends fewer requests and says so. Ends with 0 if no request was lost and every load counter
    came back to zero.
    """
    check_folder("--out", options.out)
    return (await run_demo(options.out, console, options.quick, options.trace)).sound


class TracePart(Struct):
    """The part of a trace that is sent, and how the trace is read."""

    requests: Annotated[int | None, "use at most N requests of the trace"] = None
    seconds: Annotated[float | None, "use the first S seconds of the trace only"] = None
    spread: Annotated[float | None, "S", "spread requests of one timestamp over S seconds "
        "(Mooncake: 3)"] = None  # fmt: skip
    block_tokens: Annotated[int | None, "prompt tokens that one id stands for; default: as the "
        f"format says, Mooncake's {BLOCK_TOKENS}"] = None  # fmt: skip


class SharedPrefix(Struct):
    """The generated load if there is no trace."""

    groups: Annotated[int | None, f"number of shared prompts; default {GROUPS}"] = None
    rate: Annotated[float | None, "R", f"requests per second; default {RATE_PER_S:g}"] = None
    output_tokens: Annotated[int | None, f"tokens of an answer; default {OUTPUT_TOKENS}"] = None
    seed: Annotated[Whole | None, "SEED", f"seed of all random draws; default {SEED}"] = None


class Load(Struct, kw_only=True):
    """The options of `load`."""

    url: Annotated[str, Place(), "url", "base address, as http://127.0.0.1:8080; /v1 is added"]
    trace: Annotated[Path | None, Either("load", required=True), "a trace, plain or packed"] = None
    shared_prefix: Annotated[str | None, Either("load", required=True), "SYSTEM+QUESTION",
        "number of shared and own tokens of each prompt, as 6000+700"] = None  # fmt: skip
    model: Annotated[
        str | None, "M", "model to ask; default: the first model that the endpoint lists"
    ] = None
    speed: Annotated[float | None, "X", "let requests arrive X times as fast as in the trace"] = (
        None
    )
    concurrency: Annotated[int | None, "keep N requests running (closed loop)"] = None
    part: TracePart
    made: SharedPrefix
    vocabulary: Annotated[int, "upper bound of token ids in prompts"] = 10_000
    timeout: Annotated[float, "S", "longest time of a request, seconds"] = 600.0
    json: Annotated[Path | None, "file that gets results and rows"] = None
    html: Annotated[Path | None, "page that shows the results"] = None


def _check_load(options: Load) -> None:
    """Raise `UsageError` for a load that cannot be sent, or results that could not be written."""
    part, made = options.part, options.made
    if options.trace is None:
        _refuse(part, OF_A_TRACE, "is for --trace, and this load is made by --shared-prefix")
    else:
        _refuse(made, OF_A_SHARED_PREFIX, "is for --shared-prefix; a trace brings its own")
    if options.concurrency is not None:
        why = "sets times of arrival, which a closed loop (--concurrency) has none of"
        _refuse(made, ("rate",), why)
        _refuse(options, ("speed",), why)
        _refuse(part, ("spread",), why)
    if options.vocabulary <= FIRST_TOKEN_ID:
        raise UsageError(f"--vocabulary {options.vocabulary}: must be above {FIRST_TOKEN_ID}")
    for option, path in (("--json", options.json), ("--html", options.html)):
        if path is not None:
            check_file(option, path)


def _refuse(options: Struct, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}; leave one of the two out")


@command("URL (--trace FILE | --shared-prefix SYSTEM+QUESTION) [option]...")
async def load(options: Load, console: Console) -> bool:
    """Sends streamed completions of token-id prompts to URL/v1/completions, in open loop at the
    workload's times (or in closed loop with --concurrency), and prints latencies and hits. Ends
    with 0 if no request was lost.
    """
    _check_load(options)
    url = base_url(options.url)
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
    return all(outcome.verdict is not LiveVerdict.FAILED for outcome in outcomes)


class Stack(Struct, kw_only=True):
    """The options of `stack`."""

    workers: Annotated[int, "number of workers"] = 4
    policy: Annotated[str, "SPEC", "policy of the router"] = "warmset"
    profile: Annotated[str, "P", "profile of the workers"] = "llama-3.1-8b-h100"
    model: Annotated[Path | None, "DIR", "serve the model in DIR with the real engine, in place of "
        "--profile"] = None  # fmt: skip
    port: Annotated[Port, "PORT", "port of the router; default 8080, 0: any free port"] = 8080
    admin_port: Annotated[Port, "PORT", "admin port of the router; default 8081, 0: any free port"
    ] = 8081  # fmt: skip
    speed: Annotated[float, "X", "run workers, and the trace's arrivals, X times as fast"] = 1.0
    out: Annotated[Path, "DIR", "folder for logs and report"] = Path("build/stack")
    trace: Annotated[Path | None, "a trace, plain or packed"] = None
    part: TracePart


def check_stack(options: Stack) -> None:
    """Raise `UsageError` for a stack that could not start, or a report that could not be
    written.
    """
    if options.trace is None:
        _refuse(options.part, ("requests", *OF_A_TRACE), "is for --trace, and there is none")
    if options.port and options.port == options.admin_port:
        raise UsageError(f"--port and --admin-port are both {options.port}; choose two")
    check_profile(options.profile)
    check_policy(options.policy)
    check_folder("--out", options.out)


@command("[--trace FILE] [option]...")
async def stack(options: Stack, console: Console) -> bool:
    """Starts timed workers and a router in front of them on loopback. Without --trace it prints a
    working curl command and runs until Ctrl-C. With --trace the command sends the trace to the
    router, writes report.html and report.json to --out, and ends. The router reads its environment
    variables: with WARMROUTE_REQUEST_LOG=FILE the router writes a request log for `replay`.
    """
    check_stack(options)
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
        return await _trace_on_stack(options, options.trace, settings, console)
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
    """Return a curl command whose prompt fills several blocks, so that its prefix can be cached."""
    story = f"$(printf 'Once upon a time. %.0s' $(seq {EXAMPLE_REPEATS}))"
    body = f"""'{{"model": "{MODEL}", "max_tokens": 16, "prompt": "'"{story}"'"}}'"""
    return (
        f"curl -i {url}/v1/completions -H 'content-type: application/json' "
        f"-H 'x-warmroute-explain: 1' -d {body}"
    )


async def _trace_on_stack(
    options: Stack, trace: Path, settings: StackSettings, console: Console
) -> bool:
    workload = _trace_workload(trace, options.part, options.speed)
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


def _workload(options: Load) -> Workload:
    if options.trace is not None:
        return _trace_workload(options.trace, options.part, options.speed or 1.0)
    match = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", options.shared_prefix or "")
    if match is None:
        raise UsageError(
            f"--shared-prefix {options.shared_prefix!r}: expected tokens above 0, as 6000+700"
        )
    requests, made = options.part.requests or REQUESTS, options.made
    groups = min(made.groups or GROUPS, requests)
    source = (
        f"gen:sglang?groups={groups}&prompts={-(-requests // groups)}&system={match[1]}"
        f"&question={match[2]}&output={made.output_tokens or OUTPUT_TOKENS}"
        f"&rate={made.rate or RATE_PER_S}"
    )
    name = "shared_prompt" if groups == 1 else "shared_prompts"
    seed = SEED if made.seed is None else made.seed
    return opened(WorkloadSpec(source, requests=requests), name, source, seed)


def _trace_workload(trace: Path, part: TracePart, speed: float) -> Workload:
    spec = WorkloadSpec(
        str(trace),
        block_tokens=part.block_tokens,
        requests=min(part.requests or MAX_REQUESTS, MAX_REQUESTS),
        seconds=part.seconds,
        spread_s=part.spread or 0.0,
        strict=True,
    )
    origin = f"{trace.name}, arrivals {speed:g} times as fast as recorded"
    return opened(spec, trace.name, origin)


def _report(
    options: Load,
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
        # The user and password before an @ must not be shown on a page.
        host = urlsplit(target.url).netloc.rpartition("@")[2]
        notes = [f"{workload.origin}. Model {target.model}.", _pace(options)]
        page = render_page([result], [], [], notes, f"Load test of {host}", clock="wall time")
        options.html.write_text(page)


def _pace(options: Load) -> str:
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
