"""Tests of `warmroute-sim profiles`: the list, a comparison with the user's own table,
wrong usage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.profiles import PROFILES
from tests.simulator.cli_support import Run, run
from tests.simulator.step_times.tables_at_hand import unpacked

__all__ = ["run"]


def test_all_profiles_are_listed_with_their_sources(run: Run) -> None:
    said = run("profiles")
    assert said.status == 0
    for name in PROFILES:
        assert name in said.out
    assert "AIConfigurator 0.12.0" in said.out


def test_profiles_are_compared_with_a_users_table(run: Run, tmp_path: Path) -> None:
    table = unpacked(tmp_path)
    svg, found = tmp_path / "errors.svg", tmp_path / "errors.json"
    said = run("profiles", "--against", table, "--svg", svg, "--json", found)
    assert said.status == 0, said.out + said.err
    assert "glm-5-fp4-b200-tp8: 58 of 109 rows are off by more than 10%" in said.out
    assert svg.read_text().lstrip().startswith("<")
    figures = json.loads(found.read_text())
    assert [one["name"] for one in figures][1] == "llama-3.1-8b-h100"
    assert len(figures[0]["errors"]) == 109


def test_selected_profiles_are_compared_with_a_table(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "again.csv"
    said = run("profiles", "llama-3.1-8b-h100", "--against", unpacked(tmp_path), "--rows", rows)
    assert said.status == 0
    assert "qwen3" not in said.out
    assert len(rows.read_text().splitlines()) == 110


def test_rows_with_unexplained_errors_exit_with_1(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(
        "profile,prefill_tokens,cached_tokens,decodes,context_tokens,seconds\n"
        "llama-3.1-8b-h100,8192,0,0,0,0.5\n"
    )
    said = run("profiles", "--against", table)
    assert said.status == 1
    assert "1 of 1 rows are off by more than 10% (no reason is known)" in said.out
    assert "prefill 8,192: 500.0 ms, -6" in said.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against-aic", "--against", "x.csv"], "exclude each other"),
        (["--svg", "x.svg"], "add --against-aic"),
        (["--refit", "x.json"], "--refit needs the tables: add --against-aic"),
        (["--against", "missing.csv"], "missing.csv: cannot be read"),
        (["nonsense"], "unknown profile 'nonsense'"),
    ],
)
def test_wrong_usage_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("profiles", *arguments)
    assert said.status == 2
    assert says in said.err


def test_the_error_for_a_profile_without_rows_names_the_profile(run: Run, tmp_path: Path) -> None:
    said = run("profiles", "deepseek-r1-gb200-ep8", "--against", unpacked(tmp_path))
    assert said.status == 2
    assert "no row for deepseek-r1-gb200-ep8" in said.err


def test_the_error_for_missing_tables_names_the_package_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    said = run("profiles", "--against-aic")
    assert said.status == 1
    assert "pip install 'aiconfigurator-core==0.12.0'" in said.err
