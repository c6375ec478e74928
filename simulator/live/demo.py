"""The demo: it compares policies on virtual time, and then shows a hot spot and its cure over real
HTTP.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter, process_time

from rich.console import Console

from simulator import DATA
from simulator.capacity.pools import Shapes, drawn, gain, pareto, speeds
from simulator.capacity.rates import Link, Shape, WaitTargets, measure
from simulator.live.console import LoadBoard, claim_lines, print_rows, run_line
from simulator.live.load import opened
from simulator.live.outcome import LiveVerdict, Outcome, ResultRow, as_report, hot_share, summarize
from simulator.live.page import render_page
from simulator.live.scrape import WorkerCounters
from simulator.live.stack import RunResult, StackSettings, run_scenario
from simulator.replay.result import NEVER, ReplayResult, RequestTable
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.figures import NOTHING, seconds
from simulator.report.page import Claim, Picture, Section
from simulator.report.plots import DRAWS, MISSING
from simulator.report.row import new_ones
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs

SAMPLE_PATH = DATA / "conversation_sample.jsonl.gz"
PROFILE = "qwen3-32b-h100-tp2"
BLOCK_SIZE = 64
POPULAR = "gen:sglang?groups=1&prompts={requests}&system=6000&question=700&output=24&rate=60"
# Memory binds, prefill does not: six agents a worker at once, and one more every 13 seconds.
AGENTS = (
    "gen:agentic?sessions=84&burst=24&rate=0.3&turns=4..12&context=8000*0.5&question=1000*0.5"
    "&output=60*0.5&pause_s=0.5&think_s=1.5"
)
SPLIT_TITLE = "Prefill here, decode there: would it pay?"
SPLIT_CACHES, FRONT_POINTS = 4, 16  # of the front of split pools
SEED = 1
LIVE = "live"  # the name of the workload of the live part
LIVE_POLICIES = ("kv_prefix", "hybrid")
# (workers, requests) of the live part, and what a busy machine gets.
FULL, LESS = (8, 500), (4, 240)
BUSY_SHARE = 0.6  # of a core: a process that gets less while it computes runs on a busy machine
LAST_REPLAY_S = 45.0  # from the start; later no further replay begins
LIMIT_S = 210.0  # from the start; then the live part is stopped
OVERRUN_LIMIT = 0.02  # share of steps that ended late; beyond it live times are the machine's

HOT_SHARE = 0.95  # of requests on one worker: a hot spot
SKEW_MAX = 1.25  # max / mean of requests that counts as even
HIT_RATE_MIN = 0.80
TAIL_GAIN_MIN = 4.0  # kv_prefix's TTFT p99 over hybrid's
MEAN_LOSS_MAX = 0.15  # hybrid's mean TTFT over round robin's, at most this much above
WARM_MEAN_MAX = 0.75  # warmset's mean TTFT over hybrid's
MARKS = "In brackets: what each line must show at least, or at most."
PRICED = ("mean", "p50", "p90", "p99")  # figures of the TTFT that a price is looked for in
NOTE = (
    "On virtual time the router's decision core and the workers' scheduler and caches run as they "
    "are, and the clock jumps from event to event: figures are exact, the same on every machine. "
    "Live, all are programs of their own that speak HTTP; a timed worker sleeps as long as a model "
    "of the GPU says a step takes, and everything else about it is real."
)

Rows = Mapping[tuple[str, str], ResultRow]  # by (workload, policy)


@dataclass(frozen=True, slots=True)
class Act:
    """One workload of the demo on virtual time, and the policies it is replayed for. Lifetime:
    process.
    """

    name: str
    policies: tuple[str, ...]
    spec: WorkloadSpec
    description: str
    workers: int = 8
    kv_tokens: int | None = None  # None: what the profile's GPUs hold
    closed_loop: bool = False

    def setup(self, policy: str) -> Setup:
        """Return the setup of a replay with one policy."""
        pool = (WorkerGroup(self.workers, PROFILE, self.kv_tokens),)
        return Setup(self.spec, policy, pool, BLOCK_SIZE, seed=SEED, closed_loop=self.closed_loop)


@dataclass(slots=True)
class DemoRuns:
    """The results of all runs so far, and the demo's notes on them. Lifetime: process."""

    runs: list[RunResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a busy machine left out

    @property
    def rows(self) -> list[ResultRow]:
        """The row of results of each run."""
        return [run.row for run in self.runs]

    @property
    def sound(self) -> bool:
        """True if no live run lost a request and every load counter is back at zero."""
        return all(run.row.failed == 0 and not run.leftovers for run in self.runs)


def acts(trace: Path | None = None) -> tuple[Act, ...]:
    """Return the demo's workloads: a popular prompt, conversations, and agents whose memory is
    tight.
    """
    return (
        Act(
            "shared_prompt",
            ("round_robin", "kv_prefix", "kv_load", "hybrid", "warmset"),
            WorkloadSpec(POPULAR.format(requests=FULL[1])),
            "500 requests with 6,000 shared and 700 own tokens, 60 per second",
        ),
        Act(
            "conversation",
            ("round_robin", "hybrid", "warmset"),
            WorkloadSpec(str(trace or SAMPLE_PATH), seconds=120.0, strict=True),
            f"the first 120 s of {(trace or SAMPLE_PATH).name}",
            kv_tokens=1_000_000,
        ),
        Act(
            "agents",
            ("hybrid", "warmset"),
            WorkloadSpec(AGENTS),
            "84 agents that share a prompt of 10,000 tokens and have some 9,000 of their own, 4 to "
            "12 turns of some 1,100 more; 24 begin at once, then one every 3 s",
            workers=4,
            kv_tokens=94_000,  # the agents' prompt and the contexts of some six of them
            closed_loop=True,
        ),
    )


async def run_demo(
    out: Path, console: Console, quick: bool = False, trace: Path | None = None
) -> DemoRuns:
    """Run the demo, write report.json and report.html below `out`, and print the table.

    With `quick`, only the parts run that a busy machine has time for. `trace` is a file of
    conversations; None means the sample in the package. Raises `TraceError` for an unreadable
    trace, `StartError` or `ScrapeError` if a program fails; all programs have ended then.
    """
    started_s = perf_counter()
    parts, demo = acts(trace), DemoRuns()
    count = sum(len(part.policies) for part in parts) + len(LIVE_POLICIES)
    with LoadBoard(console, count) as board:
        core_share = await _virtual(parts, demo, board, started_s)
        workers, requests = FULL
        if quick or core_share < BUSY_SHARE:
            workers, requests = LESS
            if not quick:
                _note(demo, board, (
                    f"This machine is busy (the replays got {core_share:.0%} of a core): live, "
                    f"{requests} requests on {workers} workers instead of {FULL[1]} on {FULL[0]}."
                ))  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_S - (perf_counter() - started_s)):
                await _live(out, workers, requests, demo, board)
        except TimeoutError:
            _note(demo, board, "This machine is too busy: the live part was ended early.")
    told = [f"{part.name}: {part.description}; {part.workers} workers." for part in parts]
    told.append(f"{LIVE}: as shared_prompt, {requests} requests on {workers} workers.")
    _report(out, demo, told, split_front(parts[1].spec), console, perf_counter() - started_s)
    return demo


def split_front(spec: WorkloadSpec) -> Section:
    """Return a section on pools that separate prefill workers from decode workers, for the
    conversations.
    """
    shape, stream = Shape.of(PROFILE), open_jobs(spec)
    mix = measure(stream.jobs, stream.block_tokens, SPLIT_CACHES, shape.kv_tokens).mix
    shapes = Shapes((shape,), (shape,), (shape,))
    split, alike = pareto(
        mix, shapes, speeds(shapes, FRONT_POINTS), WaitTargets(1.0, inf, False), Link(), None
    )
    told = (
        f"By arithmetic, for the conversations above on {PROFILE}: what a GPU gives at the speed "
        "that each user gets, and any time to the first token. Roles pay where the time per token "
        "is near the shortest step: docs/disaggregation.md has a table, and "
        "warmroute-sim rate-match how many workers of each your own log wants."
    )
    if not (split or alike):  # their prompts fit into no worker
        return Section(SPLIT_TITLE, told)
    caption = " ".join(gain(split, alike))
    picture = Picture(drawn(split, alike), "output tokens per GPU against speed", caption)
    return Section(SPLIT_TITLE, told, pictures=[picture])


async def _virtual(
    parts: Sequence[Act], demo: DemoRuns, board: LoadBoard, started_s: float
) -> float:
    """Replay each workload of the demo, and return the share of a processor core that this process
    got meanwhile.
    """
    cpu_s, wall_s = process_time(), perf_counter()
    for part in parts:
        for policy in part.policies:
            if perf_counter() - started_s > LAST_REPLAY_S:
                _note(demo, board, f"This machine is busy: {part.name} / {policy} was left out.")
                continue
            board.start_run(f"{part.name} / {policy}", None)
            result = await asyncio.to_thread(replay, part.setup(policy))
            demo.runs.append(as_run(result, part))
            board.end_run(run_line(demo.rows[-1]))
    return (process_time() - cpu_s) / (perf_counter() - wall_s)


async def _live(out: Path, workers: int, requests: int, demo: DemoRuns, board: LoadBoard) -> None:
    """Run the workload with the popular prompt on real programs, which are started anew for each
    policy.
    """
    spec = WorkloadSpec(POPULAR.format(requests=requests))
    workload = opened(spec, LIVE, f"{requests} requests for one popular prompt", SEED)
    for policy in LIVE_POLICIES:
        board.start_run(f"live / {policy}", requests)
        settings = StackSettings(policy, workers, PROFILE, block_size=BLOCK_SIZE)
        result = await run_scenario(workload, settings, out / "logs" / policy, board.note)
        demo.runs.append(result)
        board.end_run(run_line(result.row))
        late = result.row.overrun_steps_share or 0.0
        if late > OVERRUN_LIMIT:
            _note(demo, board, (
                f"live / {policy}: {late:.1%} of the workers' steps ended late, for this machine "
                "was busy: times are longer than the model's."
            ))  # fmt: skip
        for line in result.leftovers:
            board.console.print(f"[bold red]not back to zero:[/] {line}")


def _note(demo: DemoRuns, board: LoadBoard, text: str) -> None:
    demo.notes.append(text)
    board.console.print(f"[yellow]{text}[/]")


def as_run(result: ReplayResult, part: Act) -> RunResult:
    """Return the result of a replay in the form of a live run's result."""
    names = tuple(f"worker {number}" for number in range(len(result.workers)))
    outcomes = tuple(_outcomes(result.table, names, part.closed_loop))
    # Without counted steps none was late: on virtual time no step can be late.
    after = [
        WorkerCounters(one.hit_tokens, one.query_tokens, 0, 0, one.busy_ns / 1e9, 0, 0)
        for one in result.workers
    ]
    before = [WorkerCounters(0, 0, 0, 0, 0, 0, 0) for _ in after]
    row = summarize(result.setup.policy, part.name, outcomes, names, before, after)
    return RunResult(row, outcomes, result.samples, names, ())


def _outcomes(table: RequestTable, names: Sequence[str], sessions: bool) -> list[Outcome]:
    verdicts = list(LiveVerdict)
    new = new_ones(table)
    found = []
    for row in range(len(table)):
        arrival_ns = int(table.arrival_ns[row])
        first_ns, end_ns = int(table.first_token_ns[row]), int(table.finish_ns[row])
        tokens = int(table.output_tokens[row])
        answered = first_ns != NEVER
        found.append(
            Outcome(
                serial=row,
                scheduled_s=arrival_ns / 1e9,
                sent_s=arrival_ns / 1e9,
                verdict=verdicts[table.verdict[row]],
                status=200 if answered else 0,
                worker=None if table.worker[row] == NEVER else names[table.worker[row]],
                e2e_ms=(end_ns - arrival_ns) / 1e6,
                prompt_tokens=int(table.prompt_tokens[row]),
                output_tokens=tokens,
                ttft_ms=(first_ns - arrival_ns) / 1e6 if answered else None,
                itl_ms=(end_ns - first_ns) / 1e6 / (tokens - 1)
                if answered and tokens > 1
                else None,
                turn=None if not sessions else 0 if new[row] else 1,
            )
        )
    return found


def claims(results: Sequence[ResultRow]) -> list[Claim]:
    """Return the claims that `results` support or refute, in the order of the demo's page."""
    rows = {(row.workload, row.policy): row for row in results}
    found = []
    for judge in (_hot, _cure_claim, _mean, _conversation, _agents, _hot_live, _live_cure_claim):
        try:
            found.append(judge(rows))
        except KeyError:
            continue  # that workload or policy was not run
    if results:
        lost = sum(row.failed for row in results)
        rejected = sum(row.rejected for row in results)
        text = f"No request is lost: {lost} lost, {rejected} rejected in all runs."
        found.append(Claim(text, lost == 0))
    return found


def _hot(rows: Rows, workload: str = "shared_prompt", where: str = "") -> Claim:
    row = rows[workload, "kv_prefix"]
    share = hot_share(row)
    return Claim(
        f"{where}Hot spot: always going where the cache is warmest (kv_prefix) puts {share:.0%} of "
        f"the requests for one popular prompt on one worker (at least {HOT_SHARE:.0%}); the "
        f"slowest 1 % wait {seconds(row.ttft_ms.p99)} for their first token.",
        share >= HOT_SHARE,
    )


def _cure_claim(rows: Rows, workload: str = "shared_prompt", where: str = "") -> Claim:
    hot, row = rows[workload, "kv_prefix"], rows[workload, "hybrid"]
    skew, hits = row.load_skew or inf, row.hit_rate_tokens or 0.0
    gain = (hot.ttft_ms.p99 or 0.0) / (row.ttft_ms.p99 or inf)
    return Claim(
        f"{where}Cure: hybrid weighs load against cache: the busiest worker has {skew:.2f} times "
        f"the mean (at most {SKEW_MAX}), {hits:.0%} of prompt tokens are cached (at least "
        f"{HIT_RATE_MIN:.0%}), and the slowest 1 % wait {seconds(row.ttft_ms.p99)}, {gain:.0f} "
        f"times less (at least {TAIL_GAIN_MIN:g}).",
        skew <= SKEW_MAX and hits >= HIT_RATE_MIN and gain >= TAIL_GAIN_MIN,
    )


def _hot_live(rows: Rows) -> Claim:
    return _hot(rows, LIVE, "Live. ")


def _live_cure_claim(rows: Rows) -> Claim:
    return _cure_claim(rows, LIVE, "Live. ")


def _mean(rows: Rows) -> Claim:
    even, ours = (
        rows["shared_prompt", "round_robin"].ttft_ms,
        rows["shared_prompt", "hybrid"].ttft_ms,
    )
    return Claim(
        f"Where round robin is best, hybrid is as good: mean TTFT {seconds(ours.mean)} against "
        f"{seconds(even.mean)} (at most {MEAN_LOSS_MAX:.0%} above).",
        (ours.mean or inf) <= (even.mean or 0.0) * (1 + MEAN_LOSS_MAX),
    )


def _conversation(rows: Rows) -> Claim:
    plain, warm = rows["conversation", "round_robin"], rows["conversation", "hybrid"]
    hits = (warm.hit_rate_tokens or 0.0, plain.hit_rate_tokens or 0.0)
    return Claim(
        f"Conversations: hybrid finds {hits[0]:.1%} of prompt tokens cached, round robin "
        f"{hits[1]:.1%}; mean TTFT {seconds(warm.ttft_ms.mean)} against "
        f"{seconds(plain.ttft_ms.mean)} (both better).",
        hits[0] > hits[1] and (warm.ttft_ms.mean or inf) < (plain.ttft_ms.mean or 0.0),
    )


def _agents(rows: Rows) -> Claim:
    full, kept = rows["agents", "hybrid"], rows["agents", "warmset"]
    shares = [f"{row.hit_rate_tokens or 0.0:.0%}" for row in (kept, full)]
    good = [NOTHING if row.good_share is None else f"{row.good_share:.0%}" for row in (kept, full)]
    ratio = (kept.ttft_ms.mean or inf) / (full.ttft_ms.mean or inf)
    return Claim(
        f"Agents whose contexts do not all fit: warmset lets new ones wait until there is room. "
        f"{shares[0]} of prompt tokens are cached against hybrid's {shares[1]}, mean TTFT is "
        f"{seconds(kept.ttft_ms.mean)} against {seconds(full.ttft_ms.mean)} (at most "
        f"{WARM_MEAN_MAX:g} of it), {good[0]} against {good[1]} of answers are good. "
        f"{_price(kept, full)}",
        ratio <= WARM_MEAN_MAX and (kept.hit_rate_tokens or 0.0) > (full.hit_rate_tokens or 0.0),
    )


def _price(kept: ResultRow, full: ResultRow) -> str:
    """Return a sentence on the price of `kept` against `full`: the TTFT figure that grew most.

    It gives that figure for all requests and for first turns. The figure is the one of mean, p50,
    p90 and p99 that grew by the largest factor over all requests.
    """
    grown = {
        name: (getattr(kept.ttft_ms, name) or 0.0) / (getattr(full.ttft_ms, name) or inf)
        for name in PRICED
    }
    worst = max(grown, key=lambda name: grown[name])
    if grown[worst] <= 1.0:
        return "It has no price here: mean, p50, p90 and p99 of the TTFT are no longer."
    waits = [
        f"{seconds(getattr(a, worst))} against {seconds(getattr(b, worst))}"
        for a, b in ((kept.ttft_ms, full.ttft_ms), (kept.new_ttft_ms, full.new_ttft_ms))
    ]
    return f"Its price: TTFT {worst} is {waits[0]}, of first turns {waits[1]}."


def _report(
    out: Path,
    demo: DemoRuns,
    workloads: Sequence[str],
    front: Section,
    console: Console,
    took_s: float,
) -> None:
    shown = claims(demo.rows)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    out.mkdir(parents=True, exist_ok=True)
    leftovers = [line for run in demo.runs for line in run.leftovers]
    (out / "report.json").write_bytes(
        as_report(
            demo.rows,
            machine=machine,
            took_s=round(took_s, 1),
            workloads=workloads,
            claims=shown,
            notes=demo.notes,
            not_back_to_zero=leftovers,
        )
    )
    notes = [*demo.notes, *workloads, f"{NOTE} Measured on {machine}, in {took_s:.0f} s."]
    page = render_page(demo.runs, [], shown, notes, more=[front], marks=MARKS)
    (out / "report.html").write_text(page)
    print_rows(console, demo.rows)
    for line in claim_lines(shown):
        console.print(line)
    console.print(MARKS, style="dim")
    console.print(f"report: {out / 'report.html'} and {out / 'report.json'}")
    if not DRAWS:
        console.print(f"the page has no pictures: {MISSING}", markup=False)
    if not demo.sound:
        console.print("[bold red]requests were lost or load counters leaked: see above[/]")
