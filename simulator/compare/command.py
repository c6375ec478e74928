"""`warmroute-sim compare` from options to what is printed and written."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console

from policies.load import name_of
from simulator.compare.figures import SceneFigures, compare_scene
from simulator.compare.page import render_page
from simulator.compare.results import Scene, read_scenes
from simulator.compare.saturation import Ladder, ladder
from simulator.compare.shown import as_markdown, print_scenes
from simulator.replay.setup import Setup
from simulator.sweep.command import writable
from simulator.sweep.errors import SweepError

FORMAT: Literal["warmroute-compare"] = "warmroute-compare"
VERSION: Literal[1] = 1


class CompareReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole JSON file. `version` grows when a field changes."""

    format: Literal["warmroute-compare"]
    version: Literal[1]
    base: str
    scenes: tuple[SceneFigures, ...]
    ladders: tuple[Ladder, ...]
    failed: tuple[str, ...]  # runs without figures


@dataclass(frozen=True, slots=True)
class CompareCommand:
    """What the command line asks. Lifetime: process."""

    results: tuple[Path, ...]
    base: str  # a specification as it was run, or a name that one rule has
    policies: tuple[str, ...] = ()  # these only, and the base; empty: all
    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None


def run_compare(command: CompareCommand, console: Console) -> bool:
    """Prints the tables and writes what is asked; whether every run had figures.

    Raises `SweepError` for files that cannot be read or written, and for an unknown rule.
    """
    writable(command.json, command.html, command.markdown)
    scenes = read_scenes(command.results)
    base = _chosen(command.base, scenes)
    kept = {base, *(_chosen(one, scenes) for one in command.policies)}
    if command.policies:
        for scene in scenes:
            scene.rows = {policy: rows for policy, rows in scene.rows.items() if policy in kept}
    found = [compare_scene(scene, base) for scene in scenes if scene.rows]
    steps = ladders_of(scenes, found)
    failed = [f"{scene.name}: {line}" for scene in scenes for line in scene.failed]
    print_scenes(console, found, steps)
    for line in failed:
        console.print(f"failed: {line}", markup=False, highlight=False)
    report = CompareReport(FORMAT, VERSION, base, tuple(found), tuple(steps), tuple(failed))
    if command.json is not None:
        command.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    if command.markdown is not None:
        command.markdown.write_text(as_markdown(found, steps))
    if command.html is not None:
        command.html.write_text(render_page(found, steps, f"Rules beside {base}", failed))
    return not failed


def ladders_of(scenes: Sequence[Scene], found: Sequence[SceneFigures]) -> list[Ladder]:
    """Of the scenes that differ by their load alone, where there are two loads or more."""
    by_name = {figures.name: figures for figures in found}
    groups: dict[tuple[str, str, Setup], list[SceneFigures]] = {}
    for scene in scenes:
        if scene.name in by_name:
            key = (scene.file, scene.load.unit, scene.load.of)
            groups.setdefault(key, []).append(by_name[scene.name])
    several = [
        (file, own) for (file, _, _), own in groups.items() if len({s.load for s in own}) > 1
    ]
    files = [file for file, _ in several]
    return [
        ladder(file if files.count(file) == 1 else f"{file}, as {own[0].name}", own)
        for file, own in several
    ]


def _chosen(asked: str, scenes: Sequence[Scene]) -> str:
    """The specification that was run; `SweepError` where none or several answer to it."""
    run = list(dict.fromkeys(policy for scene in scenes for policy in scene.rows))
    if asked in run:
        return asked
    same = [policy for policy in run if name_of(policy) == asked]
    if len(same) == 1:
        return same[0]
    if same:
        raise SweepError([f"{asked}: was run as {', '.join(same)}; name one of them"])
    close = difflib.get_close_matches(asked, run, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise SweepError([f"{asked}: no result is of it{hint}; there are {', '.join(run) or 'none'}"])
