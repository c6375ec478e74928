"""Tests that docs/reference/configuration.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from router.cli.config import with_table
from router.cli.main import main
from router.config.keys import keys_of
from router.engines.spec import KEYS
from router.settings.reload import REMOVED
from router.settings.rules import check_value
from router.settings.schema import Config

CHANGELOG = Path(__file__).parents[3] / "CHANGELOG.md"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def test_the_table_of_keys_is_current():
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, f"run: python -m router.cli.config {PAGE}"


def test_the_table_of_worker_keys_is_complete():
    section = PAGE.read_text(encoding="utf-8").partition("## A worker")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[: len(KEYS)]) == (
        "url",
        *KEYS[1:],
    )


def test_the_example_is_valid():
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    keys = keys_of(Config)
    for name, value in yaml.safe_load(example).items():
        leaves = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {}
        for path, leaf in (leaves or {name: value}).items():
            check_value(keys[path], leaf)


def test_the_changelog_lists_every_removed_key():
    table = CHANGELOG.read_text(encoding="utf-8").partition("### Renamed and removed")[2]
    told = set(re.findall(r"`([\w.*]+)`", table))
    assert [key for key in REMOVED if not {key, f"{key.partition('.')[0]}.*"} & told] == []


def test_a_page_without_table_marks_is_refused():
    with pytest.raises(ValueError, match="marks"):
        with_table("nothing")


def test_the_example_errors_equal_the_output_of_the_check(tmp_path, capsys, monkeypatch):
    file = ["seed: 1", "", "hold_s: 30", "", "workers:", "  - http://10.0.0.11:8000"]
    file += ["  - http://10.0.0.12:8000,max_kv_fraction=90"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARMROUTE_PORT", "high")
    Path("router.yaml").write_text("\n".join(file), encoding="utf-8")
    assert main(["config", "--check", "router.yaml"]) == 2
    told = re.findall(r"^    (error: .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert capsys.readouterr().err.splitlines() == told
