"""Coefficients of the policy `learned`, searched for in replays."""

from __future__ import annotations

import copy
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from math import exp, fsum, log
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from cmaes import CMA
from rich.console import Console
from rich.table import Table

from policies.contract import Floats
from policies.published.choice_features import FEATURES
from simulator import DATA
from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.runs.executor import LocalProcesses
from simulator.runs.runs import RunsBoard
from simulator.runs.runs import evaluate as evaluate_replay
from simulator.runs.sheet import parse_sheet, setups_of
from simulator.runs.store import LockedFile
from simulator.runs.sweep import writable
from simulator.runs.task import GENERATOR, Evaluate, Keys, SweepError, Task, unknown
from simulator.yaml_file import YamlFileError, read_yaml

Theta = tuple[float, ...]  # one number per feature
PINNED = FEATURES.index("log_ptok")
LMETRIC: Theta = tuple(-1.0 if name in ("log_ptok", "log_batch") else 0.0 for name in FEATURES)
# Features that differ by much more than 1 between workers, and by how much: the search steps in
# coefficients divided by these, so that one step along any of them changes choices about as much.
SPREAD = {
    "default_cost": 5.0,
    "new_prefill": 5.0,
    "active_prefill": 5.0,
    "prompt_x_active_prefill": 50.0,
    "active_prefill_ratio": 3.0,
    "active_prefill_excess": 5.0,
    "new_prefill_x_requests": 5.0,
    "prefill_attn": 50.0,
}
_STEPS = np.array([1.0 / SPREAD.get(name, 1.0) for n, name in enumerate(FEATURES) if n != PINNED])
DIGITS = 6  # of a coefficient: what is replayed is what is written down


class Search:
    """Asks for coefficients and is told their scores. Lifetime: one learning run."""

    def __init__(self, sigma: float, seed: int, population: int | None) -> None:
        self._cma = CMA(_free(LMETRIC), sigma, seed=seed, population_size=population)
        self.population: int = self._cma.population_size
        self.best, self.best_score = LMETRIC, 0.0  # the start scores 0 by definition

    def ask(self) -> list[Theta]:
        """The coefficients of the next generation."""
        return [_whole(self._cma.ask()) for _ in range(self.population)]

    def tell(self, thetas: Sequence[Theta], scores: Sequence[float]) -> None:
        """The scores of a generation, lower is better."""
        self._cma.tell([(_free(theta), s) for theta, s in zip(thetas, scores, strict=True)])
        for theta, found in zip(thetas, scores, strict=True):
            if found < self.best_score:
                self.best, self.best_score = theta, found

    @property
    def mean(self) -> Theta:
        """Where the search stands: often better elsewhere than the best of one draw."""
        return _whole(self._cma.mean)


def spec_of(theta: Theta) -> str:
    """The policy with these coefficients."""
    return "learned?theta=" + ",".join(str(number) for number in theta)


def _free(theta: Theta) -> Floats:
    free: Floats = np.array(theta[:PINNED] + theta[PINNED + 1 :]) / _STEPS
    return free


def _whole(free: Floats) -> Theta:
    numbers = [round(float(number), DIGITS) for number in free * _STEPS]
    return (*numbers[:PINNED], LMETRIC[PINNED], *numbers[PINNED:])


# What a request that was turned away or lost counts as, in seconds to its first and to its last
# token: longer than anything that would still be waited for.
LOST_S = 600.0


class Figures(msgspec.Struct, frozen=True):
    """One replay in two numbers: means over all requests, lost ones at `LOST_S`."""

    ttft_s: float
    e2e_s: float
    lost: int


def figures(row: ReplayRow | None) -> Figures:
    """Of a replay that ended; None: of one that failed, as if all of it were lost."""
    if row is None or not row.requests:
        return Figures(LOST_S, LOST_S, row.requests if row else 0)
    lost = row.requests - row.completed
    means_s = [
        ((spread.mean or 0.0) / 1e3 * row.completed + LOST_S * lost) / row.requests
        for spread in (row.ttft_ms, row.e2e_ms)
    ]
    return Figures(means_s[0], means_s[1], lost)


def score(lessons: Sequence[Sequence[Figures]], start: Sequence[Sequence[Figures]]) -> float:
    """Mean over lessons of ln(TTFT / TTFT of the start) + ln(end-to-end / that of the start).

    Both by lesson and, inside, by seed: the same replays in the same order. Lower is better; the
    start has 0. Common random numbers make the difference of two scores that of the policies.
    """
    means = [
        fsum(_ratio(one, base) for one, base in zip(found, at_start, strict=True)) / len(found)
        for found, at_start in zip(lessons, start, strict=True)
    ]
    return fsum(means) / len(means)


def _ratio(one: Figures, base: Figures) -> float:
    return log(one.ttft_s / base.ttft_s) + log(one.e2e_s / base.e2e_s)


PARTS = ("train", "held_out")
MAX_LESSONS = 100  # of each part
POLICY = "learned"


@dataclass(frozen=True, slots=True)
class Lesson:
    """One workload on one fleet. Lifetime: process."""

    name: str
    setups: tuple[Setup, ...]  # one per seed; the policy is `POLICY` without coefficients


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a learning run replays. Lifetime: process."""

    train: tuple[Lesson, ...]
    held_out: tuple[Lesson, ...]  # may be none


def read_lessons(path: Path, traces: Path) -> Lessons:
    """The lessons in a file; sources that are relative files lie in the folder `traces`.

    Raises `SweepError` naming what is wrong by its place in the file, and what would be right.
    """
    try:
        given = read_yaml(path)
    except YamlFileError as error:
        raise SweepError(error.problems) from error
    if not isinstance(given, dict) or not given.get("train"):
        raise SweepError([f"{path}: must be a mapping with a list train, and held_out if wanted"])
    problems = [f"{path}: {unknown('the file', key, PARTS)}" for key in given if key not in PARTS]
    found: dict[str, tuple[Lesson, ...]] = {}
    for part in PARTS:
        entries = given.get(part) or []
        if not isinstance(entries, list) or len(entries) > MAX_LESSONS:
            problems.append(f"{path}: {part}: must be a list of at most {MAX_LESSONS} lessons")
            continue
        lessons = []
        for number, entry in enumerate(entries):
            try:
                lessons.append(_lesson(entry, traces))
            except SweepError as error:
                problems += [f"{path}: {part}[{number}]: {line}" for line in error.problems]
        names = [lesson.name for lesson in lessons]
        if len(set(names)) < len(names):
            problems.append(f"{path}: {part}: two lessons have one name: {', '.join(names)}")
        found[part] = tuple(lessons)
    if problems:
        raise SweepError(problems)
    return Lessons(found["train"], found["held_out"])


def _lesson(entry: Any, traces: Path) -> Lesson:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise SweepError(["must be a mapping with name, workload, fleet and seeds"])
    plain = copy.deepcopy(entry)
    name, seeds = plain.pop("name"), plain.pop("seeds", [0])
    if isinstance(plain.get("workload"), dict):
        _place(plain["workload"], traces)
    search = {"policies": [POLICY], "seeds": seeds}
    return Lesson(name, tuple(setups_of(parse_sheet({**plain, "grid": search}))))


def _place(workload: dict[str, Any], traces: Path) -> None:
    source = workload.get("source")
    if isinstance(source, str) and not source.startswith(GENERATOR):
        workload["source"] = str(traces / source)


class LessonFound(msgspec.Struct, frozen=True):
    """A lesson with the coefficients found and with those of the start; means over its seeds."""

    name: str
    part: str  # "train" or "held_out"
    source: str
    seeds: list[int]
    ttft_s: float
    ttft_start_s: float
    e2e_s: float
    e2e_start_s: float
    lost: int
    lost_start: int


class Found(msgspec.Struct, frozen=True):
    """Where the coefficients come from."""

    command: str
    date: str  # when the run ended, UTC
    version: str  # of this program
    lessons_file: str
    seed: int
    sigma: float
    population: int
    generations: int
    replays: int
    start: str  # the policy that everything is compared with
    score_train: float  # mean of ln(TTFT ratio) + ln(end-to-end ratio); below 0 is better
    score_held_out: float | None
    lessons: list[LessonFound]


class LearnedFile(msgspec.Struct, frozen=True):
    """The file of coefficients."""

    theta: dict[str, float]
    policy: str  # the same, as --policy takes it
    found: Found


def learned_file(theta: Theta, found: Found) -> LearnedFile:
    """Coefficients by name, with where they come from."""
    return LearnedFile(dict(zip(FEATURES, theta, strict=True)), spec_of(theta), found)


def write(path: Path, learned: LearnedFile) -> None:
    """Writes the file whole, or leaves the one that is there."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(learned), indent=1) + b"\n")
    os.replace(draft, path)


def lesson_found(
    part: str, lesson: Lesson, figures: Sequence[Figures], start: Sequence[Figures]
) -> LessonFound:
    """One lesson's figures side by side."""
    return LessonFound(
        lesson.name,
        part,
        Path(lesson.setups[0].workload.source).name,
        [setup.seed for setup in lesson.setups],
        ttft_s=_mean([one.ttft_s for one in figures]),
        ttft_start_s=_mean([one.ttft_s for one in start]),
        e2e_s=_mean([one.e2e_s for one in figures]),
        e2e_start_s=_mean([one.e2e_s for one in start]),
        lost=sum(one.lost for one in figures),
        lost_start=sum(one.lost for one in start),
    )


def table(found: Found) -> Table:
    """For a terminal."""
    shown = Table("lesson", "part", title="found, against LMetric's coefficients")
    for title in ("TTFT", "LMetric", "ratio", "end-to-end", "LMetric", "ratio", "lost"):
        shown.add_column(title, justify="right")
    for one in found.lessons:
        times_s = ((one.ttft_s, one.ttft_start_s), (one.e2e_s, one.e2e_start_s))
        figures = (
            text
            for now, before in times_s
            for text in (f"{now:.3f} s", f"{before:.3f} s", f"{now / before:.3f}")
        )
        lost = f"{one.lost} / {one.lost_start}"
        shown.add_row(one.name, one.part.replace("_", " "), *figures, lost)
    return shown


def told(score: float) -> str:
    """A score in words: it is the sum of two logarithms."""
    return f"{score:+.4f} (TTFT and end-to-end x {exp(score / 2):.3f})"


def _mean(values: Sequence[float]) -> float:
    return round(fsum(values) / len(values), 6)


FORMAT, VERSION = "warmroute-learn", 1


class Head(msgspec.Struct, frozen=True):
    """The first line: what the run is, and what the start gave, by lesson and seed."""

    format: str
    version: int
    run: str  # stands for lessons, files, settings and program: another one cannot go on from here
    start: list[list[Figures]]


class Generation(msgspec.Struct, frozen=True):
    """A further line: coefficients and their scores."""

    thetas: list[Theta]
    scores: list[float]


class Journal(LockedFile):
    """Lines in a file. Lifetime: the `with` block, during which nobody else may write it.

    A line is on the disk before `add` returns; a last line without its end was torn by a crash,
    and is dropped. Raises `SweepError` for a file that is of another run, or no journal.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._run = run
        self.start: list[list[Figures]] | None = None
        self.generations: list[Generation] = []
        super().__init__(path, "run", self._read)

    def begin(self, start: list[list[Figures]]) -> None:
        """Notes what the start gave."""
        self._write(_line(Head(FORMAT, VERSION, self._run, start)))
        self.start = start

    def add(self, generation: Generation) -> None:
        """Notes a generation."""
        self._write(_line(generation))
        self.generations.append(generation)

    def _read(self) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        for number, line in enumerate(lines, 1):
            try:
                if number == 1:
                    self._take_head(msgspec.json.decode(line, type=Head))
                else:
                    self.generations.append(msgspec.json.decode(line, type=Generation))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                where = f"{self.path}:{number}: no line of a learning run"
                raise SweepError([f"{where} ({error}); name another file"]) from error

    def _take_head(self, head: Head) -> None:
        if (head.format, head.version, head.run) != (FORMAT, VERSION, self._run):
            raise SweepError(
                [
                    f"{self.path}: is of other lessons, traces or settings, or of another version; "
                    "name another file (--state), or remove it to begin anew"
                ]
            )
        self.start = head.start


def _line(of: msgspec.Struct) -> bytes:
    return msgspec.json.encode(of) + b"\n"


class Replays:
    """Processes that replay. Lifetime: the `with` block, which leaves none behind."""

    def __init__(self, evaluate: Evaluate, jobs: int | None, console: Console) -> None:
        self._processes = LocalProcesses(evaluate, jobs)
        self._board = RunsBoard(console, time.monotonic)
        self._block = ExitStack()
        self.jobs = self._processes.jobs
        self.done = 0

    def __enter__(self) -> Self:
        with ExitStack() as block:
            block.enter_context(self._processes)
            block.enter_context(self._board)
            self._block = block.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    def expect(self, runs: int) -> None:
        """So many replays are to come in all."""
        self._board.expect(runs)

    def run(self, thetas: Sequence[Theta], lessons: Sequence[Lesson]) -> list[list[list[Figures]]]:
        """Figures by coefficients, lesson and seed. A replay that failed counts as all lost."""
        tasks = [
            Task(f"{one} {two} {three}", msgspec.structs.replace(setup, policy=spec_of(theta)))
            for one, theta in enumerate(thetas)
            for two, lesson in enumerate(lessons)
            for three, setup in enumerate(lesson.setups)
        ]
        found: dict[str, Figures] = {}
        for outcome in self._processes.run(tasks):
            self._board.note(outcome)
            self.done += 1
            found[outcome.task.key] = figures(outcome.row)
        return [
            [
                [found[f"{one} {two} {three}"] for three in range(len(lesson.setups))]
                for two, lesson in enumerate(lessons)
            ]
            for one in range(len(thetas))
        ]


STATE_SUFFIX = ".state.jsonl"
HALVES = DATA / "learn_halves.yaml"


@dataclass(frozen=True, slots=True)
class LearnCommand:
    """What the command line asks of a learning run. Lifetime: process."""

    line: str  # as it was typed, for the record
    out: Path
    lessons: Path = HALVES
    traces: Path = Path()
    state: Path | None = None  # None: beside `out`, with `STATE_SUFFIX`
    generations: int = 20
    population: int | None = None
    sigma: float = 0.1
    seed: int = 1
    jobs: int | None = None


def run_learn(
    command: LearnCommand,
    console: Console,
    evaluate: Evaluate = evaluate_replay,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> bool:
    """Searches, shows what was found, writes it; whether it is better than the start in training.

    Raises `SweepError` before anything runs for what cannot be read, run or written. Ctrl-C
    (`KeyboardInterrupt`) ends all processes; the same command goes on from the last generation.
    """
    state = command.state or command.out.with_name(command.out.name + STATE_SUFFIX)
    writable(command.out, state)
    if command.population is not None and command.population < 4:
        raise SweepError([f"--population {command.population}: give 4 or more"])
    lessons = read_lessons(command.lessons, command.traces)
    search = Search(command.sigma, command.seed, command.population)
    with (
        Journal(state, _fingerprint(command, lessons, search)) as journal,
        Replays(evaluate, command.jobs, console) as replays,
    ):
        run = _Run(command, lessons, search, journal, replays, console)
        run.announce()
        run.train()
        theta, found = run.conclude(now())
    write(command.out, learned_file(theta, found))
    console.print(table(found))
    console.print(f"train: {told(found.score_train)}", highlight=False)
    if found.score_held_out is not None:
        console.print(f"held out: {told(found.score_held_out)}", highlight=False)
    console.print(f"{command.out}: coefficients and where they come from", highlight=False)
    return found.score_train < 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    """The parts of one learning run, wired. Lifetime: process."""

    command: LearnCommand
    lessons: Lessons
    search: Search
    journal: Journal
    replays: Replays
    console: Console

    def announce(self) -> None:
        """Says how many replays are to come."""
        train, held_out = _runs(self.lessons.train), _runs(self.lessons.held_out)
        wanted, there = self.command.generations, len(self.journal.generations)
        each = self.search.population * train
        total = max(wanted - there, 0) * each + 2 * (train + held_out)
        total += train if self.journal.start is None else 0
        self.replays.expect(total)
        kept = f"; {there} are there already" if there else ""
        self.console.print(
            f"{wanted} generations of {self.search.population}, {each} replays each{kept}; "
            f"{total} replays in all, {self.replays.jobs} at a time",
            highlight=False,
        )

    def train(self) -> None:
        """Generation after generation; those of the journal are told again, not replayed."""
        search, journal = self.search, self.journal
        for generation in journal.generations:
            search.ask()  # what it draws is used up as it was then
            search.tell(generation.thetas, generation.scores)
        if journal.start is None:
            journal.begin(self.replays.run([LMETRIC], self.lessons.train)[0])
        for number in range(len(journal.generations), self.command.generations):
            thetas = search.ask()
            scores = self._scores(self.replays.run(thetas, self.lessons.train))
            journal.add(Generation(thetas, scores))
            search.tell(thetas, scores)
            self.console.print(
                f"generation {number + 1} of {self.command.generations}: best {min(scores):+.4f}, "
                f"middle {sorted(scores)[len(scores) // 2]:+.4f}; so far {told(search.best_score)}",
                highlight=False,
            )

    def conclude(self, at: datetime) -> tuple[Theta, Found]:
        """The better of the best and the mean in training, shown on what was held out."""
        train, held_out = self.lessons.train, self.lessons.held_out
        tried = [self.search.best, self.search.mean]
        in_training = self.replays.run(tried, train)
        scores = self._scores(in_training)
        theta, trained, train_score = LMETRIC, self._start, 0.0
        if min(scores) < 0.0:
            chosen = scores.index(min(scores))
            theta, trained, train_score = tried[chosen], in_training[chosen], scores[chosen]
        held, held_start = self.replays.run([theta, LMETRIC], held_out)
        rows = [
            *zip(["train"] * len(train), train, trained, self._start, strict=True),
            *zip(["held_out"] * len(held_out), held_out, held, held_start, strict=True),
        ]
        told_of = len(self.journal.generations)
        return theta, Found(
            command=self.command.line,
            date=at.strftime("%Y-%m-%d %H:%M"),
            version=version("warmroute"),
            lessons_file=self.command.lessons.name,
            seed=self.command.seed,
            sigma=self.command.sigma,
            population=self.search.population,
            generations=told_of,
            replays=told_of * self.search.population * _runs(train),
            start=spec_of(LMETRIC),
            score_train=round(train_score, 6),
            score_held_out=round(score(held, held_start), 6) if held else None,
            lessons=[lesson_found(part, lesson, *figures) for part, lesson, *figures in rows],
        )

    @property
    def _start(self) -> list[list[Figures]]:
        assert self.journal.start is not None
        return self.journal.start

    def _scores(self, found: list[list[list[Figures]]]) -> list[float]:
        return [score(one, self._start) for one in found]


def _fingerprint(command: LearnCommand, lessons: Lessons, search: Search) -> str:
    """Stands for all that decides what a generation is asked and told."""
    keys, said = Keys(), hashlib.sha256()
    for lesson in (*lessons.train, *lessons.held_out):
        for setup in lesson.setups:
            said.update(f"{lesson.name} {keys.task(setup).key}\n".encode())
    settings = (command.sigma, command.seed, search.population, spec_of(LMETRIC))
    said.update(repr((len(lessons.train), *settings)).encode())
    return said.hexdigest()[:20]


def _runs(lessons: tuple[Lesson, ...]) -> int:
    return sum(len(lesson.setups) for lesson in lessons)
