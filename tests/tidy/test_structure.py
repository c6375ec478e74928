"""Tests that the pages a newcomer reads first are short and name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The operator's page is not among these: it has a section for each alert, and alerts may be added.
LINES_MAX = {"README.md": 80, "docs/structure.md": 80}
QUOTED = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S))
PATHS = [name for name in QUOTED if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|cpp))", name)]
CLASSES = [name for name in QUOTED if re.fullmatch(r"[A-Z]\w+(\.\w+)?", name) and name not in PATHS]


@pytest.mark.parametrize("name", LINES_MAX)
def test_a_page_for_newcomers_is_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= LINES_MAX[name]


def test_each_command_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    made = re.findall(r"^make ([\w-]+)", README, re.MULTILINE)
    benches = re.findall(r"python -m (tests[\w.]+)", README)
    assert len(made) >= 2
    assert len(benches) >= 2
    assert [name for name in made if name not in targets] == []
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in benches]
    assert [path for path in files if not path.is_file()] == []


def test_each_path_on_the_structure_page_exists() -> None:
    assert len(PATHS) > 50
    assert [path for path in PATHS if not (ROOT / path).exists()] == []


def test_each_class_and_method_on_the_structure_page_exists() -> None:
    files = [path for name in ("router", "policies") for path in (ROOT / name).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert len(CLASSES) > 10
    assert [name for name in CLASSES if not any(defines(text, name) for text in texts)] == []


def defines(text: str, name: str) -> bool:
    """Return whether a module's text defines the class, or the class with the method."""
    owner, _, method = name.partition(".")
    body = re.search(rf"^class {owner}\b.*?(?=^class |\Z)", text, re.MULTILINE | re.DOTALL)
    return body is not None and (not method or f"def {method}(" in body[0])
