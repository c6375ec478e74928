"""The demo: a hot spot and its cure, conversations, and agents whose caches do not all fit.

Three workloads (`acts`) on timed workers behind a router, programs started afresh for every policy,
so caches are cold and arrivals the same. Times are *model time*: what the workers' step-time model
says. The workers run `speed` model seconds in a wall second and arrivals are sped up alike; a
machine that cannot keep up shows it in overrun steps, and the run is repeated slower.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from simulator.acts import Act, acts
from simulator.claims import Claim, claims, story
from simulator.console import Board, claim_lines, results_tables, run_line
from simulator.page import render_page
from simulator.scenario import RunResult, run_scenario
from simulator.stack import StackSettings
from simulator.summary import as_report
from simulator.workload import Workload

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
