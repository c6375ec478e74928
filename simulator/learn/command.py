"""`warmroute-sim learn` from options to the file of coefficients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from simulator import DATA
from simulator.learn.journal import Generation, Journal
from simulator.learn.lessons import Lesson, Lessons, read_lessons
from simulator.learn.objective import Figures, score
from simulator.learn.replays import Replays
from simulator.learn.result import Found, lesson_found, table, told, write
from simulator.learn.result import learned_file as as_file
from simulator.learn.search import LMETRIC, Search, Theta, spec_of
from simulator.sweep.command import writable
from simulator.sweep.errors import SweepError
from simulator.sweep.evaluate import evaluate as evaluate_replay
from simulator.sweep.task import Evaluate, Keys

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
    write(command.out, as_file(theta, found))
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
