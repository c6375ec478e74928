"""The demo: which workloads run on which workers for which policies, and the reports it writes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from simulator import CHECKOUT
from simulator.live.console import (
    Board,
    Claim,
    claim_lines,
    claims,
    results_tables,
    run_line,
    story,
)
from simulator.live.load import Workload, generated_shared_prefix, opened
from simulator.live.outcome import as_report
from simulator.live.sample import SAMPLE_PATH
from simulator.live.stack import RunResult, StackSettings, run_scenario
from simulator.replay.setup import WorkloadSpec
from simulator.report.live_page import render_page

TRACE_PATH = CHECKOUT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
TICK_S = 3.0  # clock of the Mooncake trace: all requests of a tick bear one time
SEED = 1
CONVERSATION_KV_TOKENS = 1_000_000
AGENTS_KV_TOKENS = 94_000  # the agents' prompt and the contexts of some six of them
AGENTS_S = 100.0
# Memory binds, prefill does not: six agents a worker at once, and one more every 13 seconds.
AGENTS = (
    "gen:agentic?sessions={sessions}&burst={burst}&rate={rate:g}&turns=4..12&context=8000*0.5"
    "&question=1000*0.5&output=60*0.5&pause_s=0.5&think_s=1.5"
)
AGENTS_AT_ONCE = 6  # a worker
AGENTS_PER_S = 0.075  # a worker
AGENTS_HOLD_S = 120.0  # wall clock: longer than the act


@dataclass(frozen=True, slots=True)
class Act:
    """One workload and the policies it is run for. Lifetime: process."""

    workload: Workload
    policies: tuple[str, ...]
    settings: StackSettings


def acts(workers: int, speed: float, quick: bool, trace: Path | None) -> tuple[Act, Act, Act]:
    """A popular prompt, conversations, and agents in tight memory; raises `TraceError`.

    `speed` multiplies what each act has, `quick` takes a fifth of each. `trace` None: the Mooncake
    trace where it is at hand, else the sample that ships.
    """
    fifth = 5 if quick else 1
    stack = StackSettings(policy="", workers=workers)
    shared = Act(
        generated_shared_prefix(1, 500 // fifth, 6_000, 700, 24, 60.0, SEED),
        ("round_robin", "kv_prefix", "kv_load", "hybrid"),
        replace(stack, speed=1.0 * speed),
    )
    conversation = Act(
        _conversation(trace, 120.0 / fifth),
        ("round_robin", "hybrid"),
        replace(stack, speed=3.0 * speed, kv_tokens=CONVERSATION_KV_TOKENS),
    )
    few = max(1, workers // 2)  # fewer programs can run faster on the same cores
    agents = Act(
        _agents(few, AGENTS_S / fifth),
        ("kv_prefix", "hybrid", "warmset"),
        replace(
            stack,
            workers=few,
            speed=4.0 * speed,
            kv_tokens=AGENTS_KV_TOKENS,
            hold_s=AGENTS_HOLD_S,
        ),
    )
    return shared, conversation, agents


def _conversation(trace: Path | None, seconds: float) -> Workload:
    path = trace or (TRACE_PATH if TRACE_PATH.exists() else SAMPLE_PATH)
    spread_s = TICK_S if path.name.startswith("mooncake") else 0.0
    spec = WorkloadSpec(str(path), seconds=seconds, spread_s=spread_s, strict=True)
    origin = f"first {seconds:g} s of {path.name} at the times recorded"
    return opened(spec, "conversation", origin)


def _agents(workers: int, ends_s: float) -> Workload:
    burst, rate = AGENTS_AT_ONCE * workers, AGENTS_PER_S * workers
    origin = (
        f"agents that share a prompt of 10,000 tokens and have some 9,000 of their own, 4 to 12 "
        f"turns of some 1,100 more, two or three seconds between an answer and the next turn; "
        f"{burst} begin at once, then {rate:g} per second; no turn begins after {ends_s:g} s"
    )
    sessions = burst + round(2 * rate * ends_s)  # more than will have begun by then
    spec = WorkloadSpec(AGENTS.format(sessions=sessions, burst=burst, rate=rate))
    return opened(spec, "agents", origin, SEED, ends_s)


OVERRUN_LIMIT = 0.02  # share of steps that ended late; beyond it the machine was too slow
SLOWER = 0.6  # the speed of a repeated run over the one before
TRIES = 3
PACE_NOTE = (
    "Timed workers sleep as long as a model of the GPU says a step takes, instead of computing it; "
    "caches, events, HTTP and routing are real. Times are model time: wall time multiplied by the "
    "speed of the run. A run in which more than 2 % of the steps ended late is repeated slower."
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo runs. Lifetime: process."""

    out: Path = Path("build/demo")
    workers: int = 8
    speed: float = 1.0  # times the speeds below: of workers and arrivals alike
    quick: bool = False  # a fifth of the requests: shows that all works, not the figures
    trace: Path | None = None  # None: the Mooncake trace where it is at hand, else the sample


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All runs and what they show. Lifetime: process."""

    runs: tuple[RunResult, ...]
    claims: tuple[Claim, ...]

    @property
    def sound(self) -> bool:
        """No request lost and every load counter back to zero."""
        return all(run.row.failed == 0 and not run.leftovers for run in self.runs)


async def run_demo(settings: DemoSettings, console: Console) -> DemoResult:
    """Runs all parts, writes report.json and report.html below `settings.out`, prints the table.

    Raises `TraceError` for an unreadable trace, `StartError` or `ScrapeError` when a program
    fails; all programs have ended then.
    """
    parts = acts(settings.workers, settings.speed, settings.quick, settings.trace)
    runs: list[RunResult] = []
    with Board(console, sum(len(part.policies) for part in parts)) as board:
        for part in parts:
            stack = part.settings
            for policy in part.policies:
                run = await _run_steady(
                    part.workload, replace(stack, policy=policy), settings.out / "logs", board
                )
                # A machine too slow for one policy is so for the next: do not find out again.
                stack = replace(stack, speed=run.row.speed)
                runs.append(run)
    result = DemoResult(tuple(runs), tuple(claims([run.row for run in runs])))
    _write(settings.out, parts, result)
    _print(console, settings.out, result)
    return result


async def _run_steady(
    workload: Workload, settings: StackSettings, logs: Path, board: Board
) -> RunResult:
    """One run, repeated slower until the workers keep their model's time."""
    for attempt in range(1, TRIES + 1):
        label = f"{workload.name} / {settings.policy}"
        # How many turns a closed loop takes depends on the answers.
        board.start_run(label, len(workload.jobs) if workload.ends_s is None else None)
        log_dir = logs / f"{workload.name}-{settings.policy}"
        result = await run_scenario(workload, settings, log_dir, board.note)
        overruns = result.row.overrun_steps_share or 0.0
        if overruns <= OVERRUN_LIMIT or attempt == TRIES:
            break
        settings = replace(settings, speed=settings.speed * SLOWER)
        board.console.print(
            f"[yellow]{label}: {overruns:.1%} of steps overran (limit {OVERRUN_LIMIT:.0%}): this "
            f"machine was too slow; again at speed {settings.speed:.2f}[/]"
        )
    board.end_run(run_line(result.row))
    for line in result.leftovers:
        board.console.print(f"[bold red]not back to zero:[/] {line}")
    return result


def _write(out: Path, parts: Sequence[Act], result: DemoResult) -> None:
    rows = [run.row for run in result.runs]
    origins = {part.workload.name: part.workload.origin for part in parts}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    out.mkdir(parents=True, exist_ok=True)
    report = as_report(
        rows,
        machine=machine,
        workloads=origins,
        programs={part.workload.name: part.settings for part in parts},
        claims=result.claims,
        not_back_to_zero=[line for run in result.runs for line in run.leftovers],
    )
    (out / "report.json").write_bytes(report)
    notes = [_how(part) for part in parts] + [f"Measured on {machine}. {PACE_NOTE}"]
    (out / "report.html").write_text(render_page(result.runs, story(rows), result.claims, notes))


def _how(part: Act) -> str:
    stack = part.settings
    cache = f"{stack.kv_tokens:,} tokens" if stack.kv_tokens else "what the GPUs hold"
    return (
        f"{part.workload.name}: {part.workload.origin}. {stack.workers} timed workers "
        f"({stack.profile}, blocks of {stack.block_size} tokens, KV cache {cache} each) and a "
        f"router, separate processes on loopback, started afresh for every policy."
    )


def _print(console: Console, out: Path, result: DemoResult) -> None:
    console.print(*results_tables([run.row for run in result.runs]))
    for line in claim_lines(result.claims):
        console.print(line)
    console.print(f"report: {out / 'report.html'} and {out / 'report.json'}")
    if not result.sound:
        console.print("[bold red]requests were lost or load counters leaked: see above[/]")
