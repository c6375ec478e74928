"""`warmroute-sim learn` from options to the file of coefficients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

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
HALVES = Path(__file__).with_name("halves.yaml")


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
    sigma: float = 0.02
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
        _announce(command, lessons, search, journal, replays, console)
        _train(command, lessons, search, journal, replays, console)
        theta, found = _conclude(command, lessons, search, journal, replays, now)
    write(command.out, as_file(theta, found))
    console.print(table(found))
    console.print(f"train: {told(found.score_train)}", highlight=False)
    if found.score_held_out is not None:
        console.print(f"held out: {told(found.score_held_out)}", highlight=False)
    console.print(f"{command.out}: coefficients and where they come from", highlight=False)
    return found.score_train < 0.0


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


def _announce(
    command: LearnCommand,
    lessons: Lessons,
    search: Search,
    journal: Journal,
    replays: Replays,
    console: Console,
) -> None:
    left = max(command.generations - len(journal.generations), 0)
    each = search.population * _runs(lessons.train)
    ends = 2 * _runs(lessons.train) + 2 * _runs(lessons.held_out)
    total = left * each + ends + (_runs(lessons.train) if journal.start is None else 0)
    replays.expect(total)
    there = f"; {len(journal.generations)} are there already" if journal.generations else ""
    console.print(
        f"{command.generations} generations of {search.population}, {each} replays each{there}; "
        f"{total} replays in all, {replays.jobs} at a time",
        highlight=False,
    )


def _train(
    command: LearnCommand,
    lessons: Lessons,
    search: Search,
    journal: Journal,
    replays: Replays,
    console: Console,
) -> None:
    """Generation after generation; those of the journal are told again, not replayed."""
    for generation in journal.generations:
        search.ask()  # what it draws is used up as it was then
        search.tell(generation.thetas, generation.scores)
    if journal.start is None:
        journal.begin(replays.run([LMETRIC], lessons.train)[0])
    start = _of(journal)
    for number in range(len(journal.generations), command.generations):
        thetas = search.ask()
        scores = [score(found, start) for found in replays.run(thetas, lessons.train)]
        journal.add(Generation(thetas, scores))
        search.tell(thetas, scores)
        console.print(
            f"generation {number + 1} of {command.generations}: best {min(scores):+.4f}, "
            f"middle {sorted(scores)[len(scores) // 2]:+.4f}; so far {told(search.best_score)}",
            highlight=False,
        )


def _conclude(
    command: LearnCommand,
    lessons: Lessons,
    search: Search,
    journal: Journal,
    replays: Replays,
    now: Callable[[], datetime],
) -> tuple[Theta, Found]:
    """The better of the best and the mean, chosen in training; then shown on what was held out."""
    start = _of(journal)
    tried = [search.best, search.mean]
    in_training = replays.run(tried, lessons.train)
    scores = [score(found, start) for found in in_training]
    if min(scores) < 0.0:
        chosen = scores.index(min(scores))
        theta, trained, train_score = tried[chosen], in_training[chosen], scores[chosen]
    else:
        theta, trained, train_score = LMETRIC, start, 0.0
    held, held_start = replays.run([theta, LMETRIC], lessons.held_out)
    rows = [
        *zip(["train"] * len(trained), lessons.train, trained, start, strict=True),
        *zip(["held_out"] * len(held), lessons.held_out, held, held_start, strict=True),
    ]
    return theta, Found(
        command=command.line,
        date=now().strftime("%Y-%m-%d %H:%M"),
        version=version("warmroute"),
        lessons_file=command.lessons.name,
        seed=command.seed,
        sigma=command.sigma,
        population=search.population,
        generations=len(journal.generations),
        replays=len(journal.generations) * search.population * _runs(lessons.train),
        start=spec_of(LMETRIC),
        score_train=round(train_score, 6),
        score_held_out=round(score(held, held_start), 6) if held else None,
        lessons=[
            lesson_found(
                lesson.name,
                part,
                Path(lesson.setups[0].workload.source).name,
                [setup.seed for setup in lesson.setups],
                found,
                before,
            )
            for part, lesson, found, before in rows
        ],
    )


def _of(journal: Journal) -> list[list[Figures]]:
    assert journal.start is not None
    return journal.start
