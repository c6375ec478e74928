"""Live runs in the terminal, and the demo's claims checked against what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simulator.live.outcome import Outcome, ResultRow, Verdict
from simulator.report.figures import percent, ratio, seconds, whole

Rows = Mapping[tuple[str, str], ResultRow]  # by (workload, policy)

AGENTS_SHOWN = ("kv_prefix", "hybrid", "warmset")
HOT_SHARE = 0.95  # of requests on one worker: a hot spot
SKEW_MAX = 1.25  # max / mean of requests that counts as even
HIT_RATE_MIN = 0.80
TAIL_GAIN_MIN = 4.0  # kv_prefix's TTFT p99 over hybrid's
MEAN_LOSS_MAX = 0.15  # hybrid's mean TTFT over round robin's, at most this much above
WARM_HITS_MIN = 0.15  # warmset's token hit rate above hybrid's
WARM_MEAN_MAX = 0.75  # warmset's mean TTFT over hybrid's
WARM_LATER_MAX = 0.5  # the same of turns that go on with a session
WARM_GOOD_MIN = 1.5  # warmset's share of good answers over hybrid's


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that should be seen, with the figures that say whether it was."""

    text: str
    holds: bool


def claims(results: Sequence[ResultRow]) -> list[Claim]:
    """The claims that `results` can decide, in the order of the story."""
    rows = {(row.workload, row.policy): row for row in results}
    found = []
    acts = (_hot_spot, _even, _tail, _mean, _conversation, _kept, _waits, _good)
    for judge in acts:
        try:
            found.append(judge(rows))
        except KeyError:
            continue  # that workload or policy was not run
    if results:
        found.append(_nothing_lost(results))
    return found


def story(results: Sequence[ResultRow]) -> list[str]:
    """What the rows show, a sentence an act for a reader who knows nothing yet."""
    rows = {(row.workload, row.policy): row for row in results}
    told = []
    hot, cured = rows.get(("shared_prompt", "kv_prefix")), rows.get(("shared_prompt", "hybrid"))
    if hot and cured:
        told.append(
            f"Sending each request to the warmest cache put {hot_share(hot):.0%} of the requests "
            f"for one popular prompt on a single worker, and its slowest 1 % waited "
            f"{seconds(hot.ttft_ms.p99)} for their first token; weighing that worker's load "
            f"against its cache (hybrid) kept the busiest worker at {cured.load_skew or 0:.2f} "
            f"times the mean, {cured.hit_rate_tokens or 0:.0%} of prompt tokens in the cache, and "
            f"the slowest 1 % at {seconds(cured.ttft_ms.p99)}."
        )
    plain, warm = rows.get(("conversation", "round_robin")), rows.get(("conversation", "hybrid"))
    if plain and warm:
        told.append(
            f"On conversations, hybrid found {warm.hit_rate_tokens or 0:.1%} of prompt tokens in "
            f"the cache against {plain.hit_rate_tokens or 0:.1%} for round robin, and the mean "
            f"time to the first token went from {seconds(plain.ttft_ms.mean)} to "
            f"{seconds(warm.ttft_ms.mean)}."
        )
    full, kept = rows.get(("agents", "hybrid")), rows.get(("agents", "warmset"))
    if full and kept:
        told.append(
            f"Where the caches do not hold the contexts of all agents at work, hybrid computed "
            f"{1 - (full.hit_rate_tokens or 0):.0%} of prompt tokens, most of them anew, and a "
            f"turn waited {seconds(full.ttft_ms.mean)} at the mean; warmset let new agents wait "
            f"until there was room to keep their contexts, computed "
            f"{1 - (kept.hit_rate_tokens or 0):.0%}, and a turn waited "
            f"{seconds(kept.ttft_ms.mean)}, that wait counted."
        )
    return told


def hot_share(row: ResultRow) -> float:
    """Share of requests that the busiest worker got."""
    counts = row.requests_per_worker
    return max(counts, default=0) / max(1, sum(counts))


def _hot_spot(rows: Rows) -> Claim:
    share = hot_share(rows["shared_prompt", "kv_prefix"])
    return Claim(
        f"kv_prefix sends one shared prompt to one worker: {share:.1%} of requests "
        f"(at least {HOT_SHARE:.0%})",
        share >= HOT_SHARE,
    )


def _even(rows: Rows) -> Claim:
    row = rows["shared_prompt", "hybrid"]
    skew, hits = row.load_skew or 0.0, row.hit_rate_tokens or 0.0
    return Claim(
        f"hybrid spreads it: max/mean {skew:.2f} (at most {SKEW_MAX}) "
        f"with token hit rate {hits:.3f} (at least {HIT_RATE_MIN})",
        0 < skew <= SKEW_MAX and hits >= HIT_RATE_MIN,
    )


def _tail(rows: Rows) -> Claim:
    hot = rows["shared_prompt", "kv_prefix"].ttft_ms.p99 or 0.0
    cured = rows["shared_prompt", "hybrid"].ttft_ms.p99 or float("inf")
    return Claim(
        f"hybrid's TTFT p99 is {hot / cured:.1f} times better than kv_prefix's "
        f"(at least {TAIL_GAIN_MIN:g})",
        hot / cured >= TAIL_GAIN_MIN,
    )


def _mean(rows: Rows) -> Claim:
    even = rows["shared_prompt", "round_robin"].ttft_ms.mean or 0.0
    ours = rows["shared_prompt", "hybrid"].ttft_ms.mean or float("inf")
    return Claim(
        f"hybrid's mean TTFT is {ours:.0f} ms, round robin's {even:.0f} ms "
        f"(at most {MEAN_LOSS_MAX:.0%} above)",
        ours <= even * (1 + MEAN_LOSS_MAX),
    )


def _conversation(rows: Rows) -> Claim:
    plain, warm = rows["conversation", "round_robin"], rows["conversation", "hybrid"]
    hits = (warm.hit_rate_tokens or 0.0, plain.hit_rate_tokens or 0.0)
    means = (warm.ttft_ms.mean or float("inf"), plain.ttft_ms.mean or 0.0)
    return Claim(
        f"in conversations hybrid beats round robin: hit rate {hits[0]:.3f} against {hits[1]:.3f}, "
        f"mean TTFT {means[0]:.0f} against {means[1]:.0f} ms",
        hits[0] > hits[1] and means[0] < means[1],
    )


def _kept(rows: Rows) -> Claim:
    hits = [rows["agents", name].hit_rate_tokens or 0.0 for name in AGENTS_SHOWN]
    return Claim(
        f"in tight memory warmset keeps caches: token hit rate {hits[2]:.3f}, hybrid {hits[1]:.3f} "
        f"(at least {WARM_HITS_MIN:g} below), kv_prefix {hits[0]:.3f}",
        hits[2] >= hits[1] + WARM_HITS_MIN and hits[2] > hits[0],
    )


def _waits(rows: Rows) -> Claim:
    alone, full, kept = (rows["agents", name] for name in AGENTS_SHOWN)
    mean = (kept.ttft_ms.mean or inf) / (full.ttft_ms.mean or inf)
    later = (kept.continuation_ttft_ms.mean or inf) / (full.continuation_ttft_ms.mean or inf)
    return Claim(
        f"warmset's mean TTFT is {seconds(kept.ttft_ms.mean)}, hybrid's "
        f"{seconds(full.ttft_ms.mean)}, kv_prefix's {seconds(alone.ttft_ms.mean)} (at most "
        f"{WARM_MEAN_MAX:g} of hybrid's); of turns that go on with a session "
        f"{seconds(kept.continuation_ttft_ms.mean)}, {seconds(full.continuation_ttft_ms.mean)}, "
        f"{seconds(alone.continuation_ttft_ms.mean)} (at most {WARM_LATER_MAX:g}); its price is "
        f"the first turn: {seconds(kept.new_ttft_ms.mean)}, {seconds(full.new_ttft_ms.mean)}, "
        f"{seconds(alone.new_ttft_ms.mean)}",
        mean <= WARM_MEAN_MAX and later <= WARM_LATER_MAX,
    )


def _good(rows: Rows) -> Claim:
    alone, full, kept = (rows["agents", name] for name in AGENTS_SHOWN)
    good = [row.good_share or 0.0 for row in (alone, full, kept)]
    return Claim(
        f"agents get more done with warmset in the same time: {kept.completed} turns, "
        f"{good[2]:.0%} of them good (TTFT up to 2 s, 50 ms a token); hybrid {full.completed}, "
        f"{good[1]:.0%}; kv_prefix {alone.completed}, {good[0]:.0%} (good: at least "
        f"{WARM_GOOD_MIN:g} times hybrid's share)",
        kept.completed > full.completed and good[2] >= WARM_GOOD_MIN * max(good[:2]),
    )


def _nothing_lost(results: Sequence[ResultRow]) -> Claim:
    lost = sum(row.requests - row.completed - row.rejected for row in results)
    rejected = sum(row.rejected for row in results)
    return Claim(f"no request is lost: {lost} lost, {rejected} rejected in all runs", lost == 0)


COLUMNS = ("rej.", "lost", "max/avg", "hits", "TTFT", "p99", "e2e", "overrun")
# Drawing takes milliseconds of a core that the measured programs need.
REFRESHES_PER_S = 2


class Board:
    """A progress bar for the runs and one for the requests of this run. Lifetime: process."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
        )
        self._runs = self._progress.add_task("runs", total=runs, note="")
        self._requests = self._progress.add_task("starting", total=None, note="")
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start_run(self, label: str, requests: int | None) -> None:
        """Begins the requests' bar anew; None: nobody knows how many they will be."""
        self._failed = 0
        self._progress.reset(self._requests, total=requests, description=label, note="")

    def note(self, outcome: Outcome) -> None:
        """Counts one request; a lost one is shown at once, and its error the first time."""
        if outcome.verdict is Verdict.FAILED:
            self._failed += 1
            if self._failed == 1:
                self.console.print(f"[bold red]lost[/] request {outcome.serial}: {outcome.error}")
            self._progress.update(self._requests, note=f"[bold red]{self._failed} lost[/]")
        self._progress.advance(self._requests)

    def end_run(self, line: str) -> None:
        """Counts one run and leaves a line about it."""
        self.console.print(line)
        self._progress.advance(self._runs)


def run_line(row: ResultRow) -> str:
    """One run in one line."""
    return (
        f"{row.workload} / {row.policy}: {row.completed} of {row.requests} completed, "
        f"TTFT mean {whole(row.ttft_ms.mean)}, p99 {whole(row.ttft_ms.p99)} ms, "
        f"hit rate {percent(row.hit_rate_tokens)}, max/mean {ratio(row.load_skew)}, "
        f"overruns {percent(row.overrun_steps_share)}"
    )


def results_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """One table a workload, narrow enough for 80 columns."""
    workloads = dict.fromkeys(row.workload for row in rows)
    return [_table([row for row in rows if row.workload == name]) for name in workloads]


def _table(rows: Sequence[ResultRow]) -> Table:
    counts = [row.requests for row in rows]  # a closed loop's depend on the answers
    requests = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    title = f"{rows[0].workload}: {requests} requests, times in ms"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ttft, e2e = row.ttft_ms, row.e2e_ms
        times = [whole(value) for value in (ttft.mean, ttft.p99, e2e.mean)]
        table.add_row(
            row.policy,
            str(row.rejected),
            str(row.failed),
            ratio(row.load_skew),
            percent(row.hit_rate_tokens),
            *times,
            percent(row.overrun_steps_share),
        )
    return table


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """The claims, each marked."""
    return [
        f"[green]shown[/]      {claim.text}" if claim.holds else f"[red]not shown[/]  {claim.text}"
        for claim in claims
    ]
