"""What a learning run found, as the file that the policy `learned` reads, and as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import exp, fsum
from pathlib import Path

import msgspec
from rich.table import Table

from policies.published.choice_features import FEATURES
from simulator.learn.lessons import Lesson
from simulator.learn.objective import Figures
from simulator.learn.search import Theta, spec_of


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
