"""The runs that files of sweep results hold, in scenes: what was the same for every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from simulator.compare.load import Load, load_of
from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.sweep.errors import SweepError
from simulator.sweep.points import flat_setup, varied_of
from simulator.sweep.store import Record, read_records

GENERATOR = "gen:"
SUFFIXES = (".jsonl", ".results", ".yaml", ".yml")


@dataclass(slots=True)
class Scene:
    """One workload on one fleet in one world; policies and seeds differ. Lifetime: report."""

    name: str
    file: str  # which results it is of, short
    setup: Setup  # of its first run, without policy and seed
    load: Load
    rows: dict[str, dict[int, ReplayRow]] = field(default_factory=dict)  # policy -> seed -> row
    failed: list[str] = field(default_factory=list)  # runs without a row, and why


def read_scenes(paths: Sequence[Path]) -> list[Scene]:
    """The scenes of all files, in order of first runs.

    A run that stands in a file twice (its policy was changed in between) counts as it is last.
    Raises `SweepError` for a file that cannot be read, is none of results, or holds none.
    """
    names = short_names(paths)
    return [
        scene
        for path, name in zip(paths, names, strict=True)
        for scene in _scenes(name, _latest(path))
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    """What each file is called in a report: without suffixes; in full where two would be alike."""
    short = [_stem(path) for path in paths]
    return [n if short.count(n) == 1 else str(p) for n, p in zip(short, paths, strict=True)]


def _stem(path: Path) -> str:
    name = path.name
    while name.endswith(SUFFIXES) and name.count("."):
        name = name.rpartition(".")[0]
    return name


def _latest(path: Path) -> list[Record]:
    found: dict[Setup, Record] = {}
    for record in read_records(path):
        before = found.get(record.setup)
        if record.row is not None or before is None or before.row is None:
            found[record.setup] = record
    if not found:
        raise SweepError([f"{path}: holds no run yet; let its sweep go on"])
    return list(found.values())


def _scenes(file: str, records: Sequence[Record]) -> list[Scene]:
    bare = [msgspec.structs.replace(record.setup, policy="", seed=0) for record in records]
    different = list(dict.fromkeys(bare))
    varied = varied_of(different)
    scenes = {
        setup: Scene(_name(file, flat_setup(setup), varied), file, setup, load_of(setup))
        for setup in different
    }
    for setup, record in zip(bare, records, strict=True):
        asked = record.setup
        if record.row is None:
            why = record.error or "no reason was given"
            scenes[setup].failed.append(f"{asked.policy}, seed {asked.seed}: {why}")
        else:
            scenes[setup].rows.setdefault(asked.policy, {})[asked.seed] = record.row
    return list(scenes.values())


def _name(file: str, flat: dict[str, Any], varied: Sequence[str]) -> str:
    return " ".join([file, *(_told(name, flat.get(name)) for name in varied)])


def _told(name: str, value: Any) -> str:
    if name == "workload.source":
        text = str(value)
        return text.removeprefix(GENERATOR) if text.startswith(GENERATOR) else Path(text).name
    if name == "groups":
        return "+".join(f"{group['count']} at {group['speed']:g}" for group in value)
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
