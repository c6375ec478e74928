"""Finds changes of a pool to recommend: it replays draws of a log as it ran and under candidate
changes.

Every candidate differs from the set-up that ran in one thing. Half of the draws choose the best
candidate of each kind. The other half judges only these, paired by seed with the set-up that ran,
so that trying many candidates does not make one of them look good by chance. The number of workers
is a separate question, because more workers are always faster: the answer is the least number that
keeps the targets, with room to spare before any worker is given up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

import msgspec

from engine.profiles import profile
from policies.facts import Role
from policies.load import PolicyError, load
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.figures import (
    FAIRNESS,
    TASK,
    counted,
    figure,
    interval,
    paired,
    paired_ratio,
    seconds,
)
from simulator.report.row import ReplayRow
from simulator.runs.advice import (
    Advice,
    Change,
    Check,
    Finding,
    Forecast,
    ForecastLine,
    Kind,
    Tried,
    another,
    same_pool,
    short,
)
from simulator.runs.plan import (
    LIMITS,
    PlanRequest,
    Targets,
    check_limits,
    check_targets,
    plan,
    shown,
)
from simulator.runs.runs import RunResults
from simulator.runs.task import SweepError
from simulator.traces.request_log import Recorded

# Candidates: the policies that lead on one workload or another (docs/notes/policy-study.md) ...
POLICIES = (
    "warmset", "lmetric", "lpwl", "hybrid", "hybrid?load_factor=0.5", "session_sticky",
    "cache_aware", "least_requests",
)  # fmt: skip
# ... thresholds of a worker where there are none, and factors where there are some, ...
UNSET = {"max_requests": 64.0, "worker_requests": 64.0}
FACTORS = (0.5, 4.0)
# ... and tokens of a block. Larger ones than the log's are never better here: neither blocks nor
# their events cost anything in a replay.
BLOCKS = (64, 16)

DRAWS, LEAST_DRAWS, MOST_DRAWS = 16, 6, 200
FIRST_DRAWS = 2  # on which all candidates run; ...
GOING_ON = 2  # ... so many of each kind, if they were better there, run on the others that choose
LEAST_GAIN = 0.05  # of mean TTFT, or ...
LEAST_POINTS = 0.02  # ... of all requests, good ones: less is not worth a change
POINT = 2.0  # one more good answer in a hundred is worth two percent of TTFT
ROOM = 1.25  # times the traffic at which fewer workers must still keep the targets
TARGETS = Targets(goodput_share=0.9, max_lost_share=0.01)  # the default targets
MISFIT = 2.0  # beyond this factor between replayed and logged TTFT, the model does not fit
LEAST_REQUESTS, LEAST_SESSIONS, LEAST_S = 200, 20, 60.0


class AdviceRequest(msgspec.Struct, frozen=True):
    """The question to the adviser: a log, the set-up that ran, and how much to try."""

    base: Setup  # what ran, on the log, with the block size written out
    recorded: Recorded
    policies: tuple[str, ...] = ()  # candidates besides `POLICIES`
    targets: Targets | None = None  # None: `TARGETS`
    draws: int = DRAWS
    seed: int = 0
    seconds: float | None = None  # to spend; None: as long as it takes
    kept: tuple[ForecastLine, ...] = ()  # forecasts of earlier logs
    check_only: bool = False
    any_fit: bool = False  # advise although the replay is unlike the log


def candidates(base: Setup, more: Sequence[str] = ()) -> list[Change]:
    """Return all changes to try, in a fixed order."""
    made = (_policies(base, more), _thresholds(base), _block_sizes(base), _roles(base))
    return [change for changes in made for change in changes]


def _policies(base: Setup, more: Sequence[str]) -> Iterator[Change]:
    """Yield changes to other policies: to each built-in one, to those in `more`, and to the running
    one with its default parameters.
    """
    if sum(group.count for group in base.groups) == 1:
        return  # there is nothing to choose between
    running = load(base.policy).spec
    seen = {running}
    for spec in (base.policy.partition("?")[0], *POLICIES, *more):
        whole = load(spec).spec
        if whole not in seen:
            seen.add(whole)
            title = f"{short(spec)} instead of {short(base.policy)}"
            do = f"`policy: {short(spec)}` in the configuration, or --policy; then SIGHUP"
            yield Change("policy", title, do, msgspec.structs.replace(base, policy=spec))


def _thresholds(base: Setup) -> Iterator[Change]:
    """Yield changes of each load threshold: lower, higher and removed, or some values if it is not
    set.
    """
    for name in ("max_requests", "max_queued_tokens", "max_kv_fraction"):
        given = sorted({v for g in base.groups if (v := getattr(g, name)) is not None})
        for value in _values(name, given):
            do = f"`URL,{name}={value:g}` for each worker; then SIGHUP" if value else ""
            groups = tuple(msgspec.structs.replace(group, **{name: value}) for group in base.groups)
            yield Change(
                "threshold",
                _instead(name, value, given),
                do or f"leave out {name}= behind each worker's URL; then SIGHUP",
                msgspec.structs.replace(base, groups=groups),
            )
    for name in ("worker_requests", "worker_queued_tokens"):
        set_to = getattr(base.router, name)
        given = [] if set_to is msgspec.UNSET else [float(set_to)]
        for value in _values(name, given):
            new = msgspec.UNSET if value is None else int(value)
            router = msgspec.structs.replace(base.router, **{name: new})
            do = f"`limits.{name}: {new}` in the configuration" if value else ""
            yield Change(
                "threshold",
                _instead(f"limits.{name}", value, given),
                f"{do or f'leave out limits.{name}'}; restart the router",
                msgspec.structs.replace(base, router=router),
            )


def _instead(name: str, value: float | None, given: Sequence[float]) -> str:
    was = ", ".join(f"{one:g}" for one in given) or "none"
    return f"no {name} instead of {was}" if value is None else f"{name}={value:g} instead of {was}"


def _values(name: str, given: Sequence[float]) -> list[float | None]:
    if not given:
        return [UNSET[name]] if name in UNSET else []
    if name == "max_kv_fraction":
        return [None, *([0.9] if given[-1] < 0.9 else [])]
    return [None, *(max(1.0, given[-1] * factor) for factor in FACTORS)]


def _block_sizes(base: Setup) -> Iterator[Change]:
    size = base.block_size
    assert size is not None, "whoever asks writes it out"
    for other in BLOCKS:
        if other < size and size % other == 0:
            do = f"start the engines with --block-size {other} (SGLang: --page-size)"
            setup = msgspec.structs.replace(base, block_size=other)
            yield Change("block size", f"{other} tokens instead of {size}", do, setup)


def _roles(base: Setup) -> Iterator[Change]:
    """Yield changes that move one worker from one role to another, or drop all roles."""
    place = {group.role: number for number, group in enumerate(base.groups) if group.count}
    if not {"prefill", "decode"} <= place.keys():
        return
    told = _counts(base.groups)
    ways: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for giver, taker in ways:
        groups = list(base.groups)
        if groups[place[giver]].count < 2:
            continue
        for number, step in ((place[giver], -1), (place[taker], 1)):
            count = groups[number].count + step
            groups[number] = msgspec.structs.replace(groups[number], count=count)
        do = f"`warmroute workers role N {taker}` for one worker N that does {giver}"
        setup = msgspec.structs.replace(base, groups=tuple(groups))
        yield Change("roles", f"{_counts(setup.groups)} instead of {told}", do, setup)
    groups = [msgspec.structs.replace(group, role="both") for group in base.groups]
    do = "`warmroute workers role N both` for each worker N"
    setup = msgspec.structs.replace(base, groups=tuple(groups))
    yield Change("roles", f"all of a request at one worker instead of {told}", do, setup)


def _counts(groups: Sequence[WorkerGroup]) -> str:
    return " + ".join(f"{group.count} {group.role}" for group in groups if group.count)


def check_request(request: AdviceRequest) -> None:
    """Raise `SweepError` for a log or targets that no advice can be given on."""
    recorded, problems = request.recorded, []
    if recorded.cut:
        problems.append(
            "its last line ends in the middle: the log was cut off, or is being written; copy it "
            "again, or take that line off"
        )
    if len(recorded.models) > 1:
        of = ", ".join(f"{name} ({count:,})" for name, count in sorted(recorded.models.items()))
        if recorded.requests == sum(recorded.models.values()):
            problems.append(f"holds requests of several models: {of}; choose one: --model NAME")
    took_s = recorded.last_s - recorded.first_s
    told = (recorded.requests, recorded.sessions or recorded.requests, took_s)
    if any(a < b for a, b in zip(told, (LEAST_REQUESTS, LEAST_SESSIONS, LEAST_S), strict=True)):
        problems.append(
            f"too short to tell: {recorded.requests:,} requests of {recorded.sessions:,} sessions "
            f"in {took_s:.0f} s; {LEAST_REQUESTS} of {LEAST_SESSIONS} in {LEAST_S:.0f} s are the "
            "least"
        )
    if not LEAST_DRAWS <= request.draws <= MOST_DRAWS:
        problems.append(f"draws: {request.draws}; expected {LEAST_DRAWS} to {MOST_DRAWS}")
    for spec in (request.base.policy, *request.policies):
        try:
            load(spec)
        except PolicyError as error:
            problems.append(f"policy {spec}: {error}; --policy says what ran")
    if problems:
        raise SweepError(problems)
    _check_reach(request.targets or TARGETS, request.base)


def _check_reach(targets: Targets, base: Setup) -> None:
    """Raise `SweepError` for targets that limit nothing, contradict, or are out of any worker's
    reach.
    """
    check_targets(targets)
    problems = []
    fastest_ms = 1e3 * min(profile(g.profile).step_time.decode_step_s(1, 1) for g in base.groups)
    for limit in LIMITS:
        bound = getattr(targets, limit.field)
        if limit.field.endswith("_ms") and bound is not None and bound < fastest_ms:
            problems.append(
                f"{limit.field}: {bound:g}; nobody can keep it: the profile's shortest step takes "
                f"{fastest_ms:.3g} ms"
            )
    if problems:
        raise SweepError(problems)


class _TimeOverError(SweepError):
    """Raised when the time budget of the advice is spent."""

    def __init__(self, seconds: float) -> None:
        super().__init__([f"{seconds:g} s do not suffice; give more --budget"])


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The rows of a candidate and of the set-up that ran, paired by draw. Lifetime: one advice."""

    own: Sequence[ReplayRow]
    base: Sequence[ReplayRow]

    def forecast(self) -> Forecast | None:
        """Return the forecast of the candidate against the set-up that ran, or None if there is
        nothing to compare.
        """
        pairs = list(zip(self.own, self.base, strict=True))
        times = [(a.ttft_ms.mean, b.ttft_ms.mean) for a, b in pairs]
        points = [_good(a) - _good(b) for a, b in pairs]
        ttft = paired_ratio(lambda row: row.ttft_ms.mean, self.own, self.base)
        next_ttft = another([own / other for own, other in times if own and other], least=0.0)
        good, next_good = interval(points), another(points)
        if ttft is None or next_ttft is None or good is None or next_good is None:
            return None
        task = paired_ratio(figure(TASK).of, self.own, self.base)
        fairness = paired(figure(FAIRNESS), self.own, self.base)
        return Forecast(ttft, next_ttft, good, next_good, task, fairness)

    def score(self) -> float:
        """Return the candidate's score: the mean logarithm of the TTFT ratio, less a bonus for more
        good answers. A score below 0 is better than the set-up that ran.
        """
        return fmean(
            math.log(max(a.ttft_ms.mean or math.inf, 1e-6) / max(b.ttft_ms.mean or 1e-6, 1e-6))
            - POINT * (_good(a) - _good(b))
            for a, b in zip(self.own, self.base, strict=True)
        )


def _good(row: ReplayRow) -> float:
    return row.goodput.share or 0.0


def is_clear(forecast: Forecast) -> bool:
    """Return True if TTFT or the share of good answers is clearly better and the other one is not
    worse. Clearly better means beyond the interval and by at least `LEAST_GAIN` or `LEAST_POINTS`.
    """
    ttft, good = forecast.ttft, forecast.good
    if ttft.low is None or ttft.high is None or good.low is None or good.high is None:
        return False
    sooner = ttft.high < 1 and ttft.mean <= 1 - LEAST_GAIN
    more = good.low > 0 and good.mean >= LEAST_POINTS
    return (sooner and good.high >= 0) or (more and ttft.low <= 1)


class Adviser:
    """Replays the candidate changes and judges them. Lifetime: one advice."""

    def __init__(
        self,
        advice_request: AdviceRequest,
        runs: RunResults,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._advice_request, self._runs, self._clock_s = advice_request, runs, clock_s
        self._began_s = clock_s()
        self._targets = advice_request.targets or TARGETS
        self._notes: list[str] = []
        self._tried: list[Tried] = []
        self._draws = advice_request.draws

    def advise(self) -> Advice:
        """Return the advice on the log. Raises `SweepError` if the log does not allow any."""
        asked = self._advice_request
        check_request(asked)
        recorded = asked.recorded
        if len(recorded.policies) > 1:
            ran = ", ".join(map(short, recorded.policies))
            self._notes.append(
                f"the log was written under several policies ({ran}), the last now: what was "
                f"measured is of its {counted(recorded.under_last, 'request')}"
            )
        whole = self._whole(asked.base)
        self._check_fit(whole)
        checks = tuple(filter(None, map(self._check, asked.kept)))
        findings: list[Finding] = []
        keeps: bool | None = None
        if not asked.check_only:
            self._plan_draws()
            changes = candidates(asked.base, asked.policies)
            self._notes.append(f"{self._draws} draws, half of them to choose, half to judge")
            try:
                base = self._rows(asked.base, self._judging())
                keeps = self._keeps(asked.base, base)
                findings = self._judged(self._chosen(changes), base, keeps)
            except _TimeOverError:
                self._notes.append(
                    f"time is up after {asked.seconds:g} s, so not all was judged; give it more "
                    "--budget"
                )
        return Advice(
            log=asked.base.workload.source,
            recorded=recorded,
            running=asked.base,
            draws=self._draws,
            replayed_ms=whole.ttft_ms.mean,
            replayed_hits=whole.hit_rate_tokens,
            replayed_task_ms=figure(TASK).of(whole),
            replayed_fairness=figure(FAIRNESS).of(whole),
            targets=", ".join(shown(self._targets)),
            keeps=keeps,
            tried=tuple(self._tried),
            findings=tuple(findings),
            notes=tuple(self._notes),
            checks=checks,
        )

    # --- replays ----------------------------------------------------------------------------

    def _rows(self, setup: Setup, seeds: Sequence[int]) -> list[ReplayRow]:
        rows = self._all_rows([setup], seeds)[0]
        if isinstance(rows, str):
            raise SweepError([f"{short(setup.policy)}: {rows}"])
        return rows

    def _all_rows(
        self, setups: Sequence[Setup], seeds: Sequence[int]
    ) -> list[list[ReplayRow] | str]:
        """Return for each set-up its rows for all draws, or the error text of a run that failed."""
        if self._left_s() < 0:
            raise _TimeOverError(self._advice_request.seconds or 0.0)
        wave = [msgspec.structs.replace(one, seed=seed) for one in setups for seed in seeds]
        outcomes = iter(self._runs.outcomes(wave))
        found: list[list[ReplayRow] | str] = []
        for _ in setups:
            own = [next(outcomes) for _ in seeds]
            failed = next((one.error for one in own if one.error is not None), None)
            found.append(failed or [one.row for one in own if one.row is not None])
        return found

    def _left_s(self) -> float:
        given = self._advice_request.seconds
        return math.inf if given is None else self._began_s + given - self._clock_s()

    def _whole(self, setup: Setup) -> ReplayRow:
        """Return the results of a replay of the log's own requests, without resampling."""
        workload = msgspec.structs.replace(setup.workload, resample=msgspec.UNSET)
        return self._rows(msgspec.structs.replace(setup, workload=workload), [0])[0]

    def _choosing(self) -> list[int]:
        return [self._advice_request.seed + number for number in range(self._draws // 2)]

    def _judging(self) -> list[int]:
        return [
            self._advice_request.seed + number for number in range(self._draws // 2, self._draws)
        ]

    def _plan_draws(self) -> None:
        """Reduce the number of draws so that they fit the time budget. Raises `SweepError` if the
        budget is too short for any.
        """
        given = self._advice_request.seconds
        if given is None:
            return
        began_s = self._clock_s()
        with suppress(_TimeOverError):
            self._rows(self._advice_request.base, self._choosing()[:FIRST_DRAWS])
        run_s = (self._clock_s() - began_s) / FIRST_DRAWS
        tried = len(candidates(self._advice_request.base, self._advice_request.policies))

        def about_s(draws: int) -> float:
            half = draws // 2
            choosing = tried * FIRST_DRAWS + (half - FIRST_DRAWS) * 2 * GOING_ON + half
            return run_s * (choosing + half * (1 + 2 + 4))  # base, judged changes, worker counts

        while about_s(self._draws) > self._left_s() and self._draws > LEAST_DRAWS:
            self._draws -= 2
        if not 0 <= about_s(self._draws) <= self._left_s():
            raise SweepError(
                [
                    f"{given:g} s do not suffice: {self._left_s():.0f} s are left and some "
                    f"{about_s(LEAST_DRAWS):.0f} s are needed; give more --budget, or a shorter "
                    "part of the log (--requests N)"
                ]
            )

    # --- judgement ----------------------------------------------------------------------------

    def _check_fit(self, whole: ReplayRow) -> None:
        """Raise `SweepError` if the replayed mean TTFT is unlike the one measured in the log."""
        measured_ms, replayed_ms = self._advice_request.recorded.ttft_ms, whole.ttft_ms.mean
        if (
            measured_ms is None
            or self._advice_request.any_fit
            or len(self._advice_request.recorded.policies) > 1
        ):
            return
        if replayed_ms is None or not 1 / MISFIT <= replayed_ms / measured_ms <= MISFIT:
            raise SweepError(
                [
                    f"the model does not fit: the log's mean TTFT is {seconds(measured_ms)}, a "
                    f"replay of it as it ran has {seconds(replayed_ms)}; say which engines these "
                    "are (--profile, --kv-tokens, --group; `warmroute-sim calibrate` measures a "
                    "profile), or --any-fit"
                ]
            )

    def _keeps(self, setup: Setup, rows: Sequence[ReplayRow]) -> bool | None:
        """Return True if the targets are kept at both ends of the rows' intervals, False if at
        neither end. Returns None if they are kept at one end only.
        """
        runs = [(setup, row) for row in rows]
        if all(one.met for one in check_limits(self._targets, runs, "interval")):
            return True
        for limit in LIMITS:
            bound = getattr(self._targets, limit.field)
            found = interval([v for row in rows if (v := limit.of(row)) is not None])
            if bound is None or found is None:
                continue
            best = found.high if limit.at_least else found.low
            best = found.mean if best is None else best
            if best < bound if limit.at_least else best > bound:
                return False
        return None

    def _chosen(self, changes: Sequence[Change]) -> list[Change]:
        """Return the best change of each kind by the draws that choose, if it is better than the
        set-up that ran.
        """
        choosing = self._choosing()
        base = self._rows(self._advice_request.base, choosing)
        first, rest = choosing[:FIRST_DRAWS], choosing[FIRST_DRAWS:]
        rows: dict[int, list[ReplayRow]] = {}
        found = self._all_rows([change.setup for change in changes], first)
        for number, (change, own) in enumerate(zip(changes, found, strict=True)):
            if isinstance(own, str):
                self._tried.append(Tried(change.kind, change.title, len(first), None, own))
            else:
                rows[number] = own

        def score(number: int) -> float:
            return _Pairs(rows[number], base[: len(rows[number])]).score()

        going: list[int] = []
        for kind in dict.fromkeys(change.kind for change in changes):
            own_kind = sorted((n for n in rows if changes[n].kind == kind), key=score)
            going += [n for n in own_kind[:GOING_ON] if score(n) < 0]
        for number, more in zip(
            going, self._all_rows([changes[n].setup for n in going], rest), strict=True
        ):
            if not isinstance(more, str):
                rows[number] = rows[number] + more
        for number, own in rows.items():
            change = changes[number]
            self._tried.append(Tried(change.kind, change.title, len(own), round(score(number), 4)))
        best: dict[Kind, int] = {}
        for number in sorted(going, key=score):
            if len(rows[number]) == len(choosing) and score(number) < -LEAST_GAIN / 2:
                best.setdefault(changes[number].kind, number)
        return [changes[number] for number in best.values()]

    def _judged(
        self, chosen: Sequence[Change], base: Sequence[ReplayRow], keeps: bool | None
    ) -> list[Finding]:
        """Return the changes that the judging draws confirm, in the order in which to make them."""
        judging = self._judging()
        found: list[tuple[float, Finding]] = []
        restores = False
        for change, rows in zip(
            chosen, self._all_rows([one.setup for one in chosen], judging), strict=True
        ):
            if isinstance(rows, str):
                continue
            pairs = _Pairs(rows, base)
            forecast = pairs.forecast()
            if forecast is not None and is_clear(forecast):
                found.append((pairs.score(), Finding(change, forecast, "")))
                restores |= self._keeps(change.setup, rows) is not False
        findings = [finding for _, finding in sorted(found, key=lambda pair: pair[0])]
        if len(self._advice_request.base.groups) != 1:
            return findings
        if keeps is False and not restores:
            return [*self._more(base), *findings]
        return findings if findings or not keeps else self._fewer(base)

    def _more(self, base: Sequence[ReplayRow]) -> list[Finding]:
        """Return the finding with the least number of workers that keeps the targets, or []. It is
        used if the pool misses its targets and no other change keeps them.
        """
        count = self._advice_request.base.groups[0].count
        number = self._least(self._with(count + 1), max(4 * count, count + 8))
        if number is None or number <= count:
            self._notes.append("no number of workers that was tried keeps the target")
            return []
        do = f"`warmroute workers add URL` for {number - count} more"
        return self._count_finding(
            number, do, base, f", the least that keeps {self._targets_text()}"
        )

    def _fewer(self, base: Sequence[ReplayRow]) -> list[Finding]:
        """Return the finding with the least number of workers that keeps the targets even under
        `ROOM` times the load, or [].
        """
        count = self._advice_request.base.groups[0].count
        if count == 1:
            return []
        work = self._advice_request.base.workload
        rated = None if work.rate_per_s is None else work.rate_per_s * ROOM
        speed = work.speed if rated is not None else work.speed * ROOM
        work = msgspec.structs.replace(work, speed=speed, rate_per_s=rated)
        setup = msgspec.structs.replace(self._with(count), workload=work)
        number = self._least(setup, count)
        if number is None or number >= count:
            return []
        do = f"`warmroute workers drain N` for {count - number} workers N"
        why = f", which keep {self._targets_text()} under {ROOM:g} times these requests, too"
        return self._count_finding(number, do, base, why)

    def _targets_text(self) -> str:
        return " and ".join(shown(self._targets))

    def _with(self, count: int) -> Setup:
        base = self._advice_request.base
        group = msgspec.structs.replace(base.groups[0], count=count)
        return msgspec.structs.replace(base, groups=(group,))

    def _least(self, setup: Setup, most: int) -> int | None:
        if self._left_s() < 0:
            raise _TimeOverError(self._advice_request.seconds or 0.0)
        request = PlanRequest(
            base=setup,
            policies=(setup.policy,),
            targets=self._targets,
            seeds=tuple(self._judging()),
            most_workers=most,
            rule="interval",
        )
        answer = plan(request, self._runs).rows[0].answer
        return None if answer is None else int(answer)

    def _count_finding(
        self, number: int, do: str, base: Sequence[ReplayRow], why: str
    ) -> list[Finding]:
        setup, count = self._with(number), self._advice_request.base.groups[0].count
        forecast = _Pairs(self._rows(setup, self._judging()), base).forecast()
        if forecast is None:
            return []
        change = Change("workers", f"{number} instead of {count}", do, setup)
        return [Finding(change, forecast, why)]

    # --- what became of forecasts ---------------------------------------------------------------

    def _check(self, made: ForecastLine) -> Check | None:
        """Return a comparison of an earlier forecast with this log. Returns None if this log is not
        later than the forecast, or ran without the change.
        """
        base, recorded = self._advice_request.base, self._advice_request.recorded
        if recorded.first_s < made.last_s or not same_pool(made.change.setup, base):
            return None
        before = msgspec.structs.replace(made.before, workload=base.workload)
        try:
            before_ms = self._whole(before).ttft_ms.mean
        except SweepError as error:
            self._notes.append(f"forecast of {made.change.title} cannot be held: {error}")
            return None
        replayed_ms = self._whole(base).ttft_ms.mean
        now_ms = replayed_ms if recorded.ttft_ms is None else recorded.ttft_ms
        happened = now_ms / before_ms if now_ms and before_ms else None
        change, forecast = made.change, made.forecast.next_ttft
        return Check(
            change.kind,
            change.title,
            forecast,
            recorded.ttft_ms,
            replayed_ms,
            before_ms,
            None if happened is None else float(f"{happened:.6g}"),
        )
