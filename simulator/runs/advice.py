"""Advice on the pool as data, in words and in a file: a change, its forecast gain, and what it
gained when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from policies.load import PolicyError, load, name_of
from router.config.paths import unreadable
from simulator.replay.setup import Setup
from simulator.report.board import span
from simulator.report.figures import (
    Interval,
    Ratio,
    fine,
    interval,
    marks,
    percent,
    points_text,
    ratio_text,
    seconds,
)
from simulator.report.page import Table
from simulator.runs.task import SweepError
from simulator.traces.request_log import Recorded
from simulator.traces.spec import WorkloadSpec

Kind = Literal["policy", "threshold", "block size", "roles", "workers"]
FORMAT: Literal["warmroute-advice"] = "warmroute-advice"
VERSION: Literal[1] = 1
MAX_STATE_BYTES = 16 << 20


class Change(msgspec.Struct, frozen=True):
    """One change of the pool that can be made without any other."""

    kind: Kind
    title: str
    do: str  # the command or line of configuration that changes it
    setup: Setup  # the pool with it


class Forecast(msgspec.Struct, frozen=True):
    """The expected effect of a change, compared with the set-up that ran: paired draws, 95 %
    intervals.
    """

    ttft: Ratio  # of mean TTFT over the draws; it decides
    next_ttft: Interval  # the same, expected in one more recording
    good: Interval  # difference of the shares of good answers over the draws
    next_good: Interval
    task: Ratio | None = None  # of the mean time of tasks; None: the log names no groups
    fairness: Interval | None = None  # likewise, difference of Jain's index of tasks


class Finding(msgspec.Struct, frozen=True):
    """A recommended change: it is clearly better, or it is enough to keep the targets."""

    change: Change
    forecast: Forecast
    why: str  # the target that it keeps; "": the forecast alone is the reason


class Tried(msgspec.Struct, frozen=True):
    """The score of one candidate on the draws that choose; a score below 0 is better than the
    set-up that ran.
    """

    kind: Kind
    title: str
    draws: int
    score: float | None  # None: it could not be replayed
    note: str = ""


class Check(msgspec.Struct, frozen=True):
    """A comparison of an earlier forecast with the figures that the later log measured."""

    kind: Kind
    title: str
    forecast: Interval  # `Forecast.next_ttft`
    measured_ms: float | None  # mean TTFT in the later log; None: no request streamed
    replayed_ms: float | None  # mean TTFT in a replay of the same requests with the change
    before_ms: float | None  # mean TTFT in a replay of the same requests without the change
    happened: float | None  # the change's TTFT, measured where it was, over `before_ms`

    @property
    def within(self) -> bool | None:
        """Whether the measured figure lies in the forecast's interval; None if there is nothing to
        compare.
        """
        low, high = self.forecast.low, self.forecast.high
        if self.happened is None or low is None or high is None:
            return None
        return low <= self.happened <= high


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The whole advice for one log; `findings` come in the order in which to make the changes."""

    format: Literal["warmroute-advice"] = FORMAT
    version: Literal[1] = VERSION
    log: str
    recorded: Recorded
    running: Setup
    draws: int  # half of them choose, half judge
    replayed_ms: float | None  # mean TTFT of the log's own requests, as they were served
    replayed_hits: float | None
    replayed_task_ms: float | None  # mean time of tasks; None: the log names no groups
    replayed_fairness: float | None  # likewise, Jain's index of their mean TTFTs
    targets: str
    keeps: bool | None  # whether what ran keeps the targets; None: uncertain
    tried: tuple[Tried, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


class ForecastLine(msgspec.Struct, frozen=True):
    """One line of the file that keeps forecasts."""

    log: str
    first_s: float  # of the log that it was made from, unix seconds
    last_s: float
    before: Setup
    change: Change
    forecast: Forecast


def another(sample: Sequence[float], least: float = -math.inf) -> Interval | None:
    """Return the mean of `sample` (one value per draw) and an interval for the value of one more
    recording.

    A draw differs from the recording that it was drawn from as that recording differs from the next
    one (the bootstrap): their difference has twice the variance of a draw, and the mean itself has
    a variance of 1 / n of a draw's. So the interval is Student's interval of the mean, wider by the
    root of 2 n + 1.
    """
    found = interval(sample)
    if found is None or found.high is None:
        return found
    half = (found.high - found.mean) * math.sqrt(2 * len(sample) + 1)
    low, high = round(max(found.mean - half, least), 6), round(found.mean + half, 6)
    return msgspec.structs.replace(found, low=low, high=high)


def short(spec: str) -> str:
    """Return the policy's specification without the parameters that have their default values."""
    try:
        return "|".join(_short(part, wraps=number > 0) for number, part in enumerate(_parts(spec)))
    except PolicyError:
        return spec


def _parts(spec: str) -> list[str]:
    return spec.split("|")


def _short(part: str, *, wraps: bool) -> str:
    name, _, query = part.partition("?")
    whole = load(f"round_robin|{name}" if wraps else name).spec.rpartition("|")[2]
    defaults = whole.partition("?")[2].split("&")
    own = [pair for pair in query.split("&") if pair and pair not in defaults]
    return f"{name}?{'&'.join(own)}" if own else name_of(part)


def advice_parts(advice: Advice, width: int) -> Iterator[object]:
    """Yield the lines and tables to print for the advice."""
    recorded = advice.recorded
    workers = sum(group.count for group in advice.running.groups)
    took = span(max(recorded.last_s - recorded.first_s, 0.0))
    yield (
        f"{advice.log}: {recorded.requests:,} requests of {recorded.sessions:,} sessions in "
        f"{took}, served by {workers} workers under {short(advice.running.policy)}"
    )
    yield _fit(advice)
    yield f"target: {advice.targets}; {_KEEPS[advice.keeps]}"
    yield from advice.notes
    for check in advice.checks:
        yield check_line(check)
    if advice.tried:
        yield ""
        yield from _tried_table(advice.tried).in_terminal(width)
    lines = [line for n, one in enumerate(advice.findings, 1) for line in _finding(n, one)]
    yield from lines
    if legend := marks([*lines, *map(check_line, advice.checks)], "--draws N"):
        yield legend
    if not advice.findings:
        yield "Change nothing: nothing that was tried is clearly better."
    elif len(advice.findings) > 1:
        yield "Each of these by itself. After the first one, log anew and ask again."


_KEEPS = {True: "kept", False: "missed", None: "kept or missed, within the draws' spread"}


def _fit(advice: Advice) -> str:
    measured, hits = advice.recorded.ttft_ms, advice.recorded.hit_rate
    line = f"replayed as it ran: mean TTFT {seconds(advice.replayed_ms)}"
    line += ", not measured in the log" if measured is None else f", measured {seconds(measured)}"
    line += f"; hits {percent(advice.replayed_hits)}"
    line += "" if hits is None else f", measured {percent(hits)}"
    if advice.replayed_task_ms is None:
        return line
    task, jain = seconds(advice.replayed_task_ms), fine(advice.replayed_fairness)
    return f"{line}; mean task {task}, Jain's index {jain}"


def _tried_table(tried: Sequence[Tried]) -> Table:
    """Return a table with the best candidate of each kind, among those that ran on the
    most draws.
    """
    rows = []
    for kind in dict.fromkeys(one.kind for one in tried):
        own = [one for one in tried if one.kind == kind]
        ranked = sorted((-one.draws, one.score, one.title) for one in own if one.score is not None)
        _, score, best = ranked[0] if ranked else (0, None, "")
        how = "none could be replayed" if score is None else f"{score:+.2f}"
        rows.append((kind, str(len(own)), best, how))
    return Table(("tried", "candidates", "best", "score"), rows)


def _finding(number: int, finding: Finding) -> Iterator[str]:
    change, forecast = finding.change, finding.forecast
    yield f"{number}. {change.kind}: {change.title}{finding.why}"
    yield (
        f"   mean TTFT x {ratio_text(forecast.ttft)}; of one more recording such as this x "
        f"{_plain(forecast.next_ttft)}; good answers, points: {points_text(forecast.good)}"
    )
    if forecast.task is not None:
        yield (
            f"   mean task x {ratio_text(forecast.task)}; Jain's index, points: "
            f"{points_text(forecast.fairness)}"
        )
    yield f"   do: {change.do}"


def _plain(ratio: Interval) -> str:
    return ratio_text(Ratio(ratio.mean, ratio.low, ratio.high, ratio.seeds))


def check_line(check: Check) -> str:
    """Return one line with a forecast and the gain that was measured later."""
    head = f"forecast of {check.kind} {check.title}: TTFT x {_plain(check.forecast)}"
    if check.happened is None:
        return f"{head}; nothing to hold it against: neither a measured nor a replayed TTFT"
    now = "replayed" if check.measured_ms is None else "measured"
    ms = check.replayed_ms if check.measured_ms is None else check.measured_ms
    verdict = "within" if check.within else "NOT within"
    return (
        f"{head}; since then {now} {seconds(ms)}, as it ran before these requests would have had "
        f"{seconds(check.before_ms)}: x {check.happened:.2f}, {verdict}"
    )


def state_path(log: str) -> Path:
    """Return the path of the file of forecasts: beside the log, under a name that no trace has."""
    path = Path(log)
    if any(sign in log for sign in "*?["):
        path = path.parent
    return path.with_name(f"{path.name}.advice") if path.name else Path("log.advice")


def read_forecasts(path: Path) -> list[ForecastLine]:
    """Return the kept forecasts in the order in which they were made; [] without a file.

    Raises `SweepError` if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_STATE_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SweepError([unreadable(path, error)]) from error
    if len(data) > MAX_STATE_BYTES:
        raise SweepError([f"{path}: more than {MAX_STATE_BYTES} bytes; move it away"])
    kept = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            kept.append(msgspec.json.decode(line, type=ForecastLine))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SweepError(
                [f"{path}:{number}: not a forecast ({error}); move it away, or name another"]
            ) from error
    return kept


def keep(path: Path, advice: Advice) -> None:
    """Add the first finding's forecast to the file; an equal forecast is kept only once.

    Raises OSError if the file cannot be written.
    """
    if not advice.findings:
        return
    recorded, first = advice.recorded, advice.findings[0]
    line = ForecastLine(
        advice.log,
        recorded.first_s,
        recorded.last_s,
        _bare(advice.running),
        msgspec.structs.replace(first.change, setup=_bare(first.change.setup)),
        first.forecast,
    )
    if line in read_forecasts(path):
        return
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _bare(setup: Setup) -> Setup:
    """Return the set-up without workload and seed, for comparisons, because another log has other
    requests.
    """
    return msgspec.structs.replace(setup, workload=WorkloadSpec(""), seed=0)


def same_pool(one: Setup, other: Setup) -> bool:
    """Return True if two set-ups have the same workers under the same policy."""
    try:
        policies = load(one.policy).spec == load(other.policy).spec
    except PolicyError:
        policies = one.policy == other.policy
    pools = [(each.groups, each.block_size, each.router) for each in (one, other)]
    return policies and pools[0] == pools[1]
