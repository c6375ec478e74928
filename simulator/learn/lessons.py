"""The file that says what is replayed to learn from, and what to show the result on.

train:
  - name: conversation
    workload: {source: conversation.jsonl.gz, seconds: 1800, rate_per_s: 4, requests: 1000}
    fleet: {profile: qwen3-32b-h100-tp2, count: 8}
    seeds: [1, 2]
held_out:
  - ...

An entry is a sweep file without a search (`simulator.sweep.sheet`), with a name and seeds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.replay.setup import Setup
from simulator.sweep.errors import SweepError, unknown
from simulator.sweep.sheet import parse_sheet, setups_of
from simulator.sweep.task import GENERATOR
from simulator.yaml_file import YamlFileError, read_yaml

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
