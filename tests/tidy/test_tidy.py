"""Tests that hold all files to the project's style; a failure lists every breach, one per line."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterable, Iterator

from tests.tidy import rules
from tests.tidy.checkout import ROOT, code, parsed, python, text_of, tree

TOP_LEVEL = {
    *("pyproject.toml", "router", "engine", "kernels", "policies", "simulator", "tests"),
    *("grafana", "README.md", "LICENSE", "Makefile", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("docs", ".ci", ".github", ".gitignore", "constraints.txt", "release", ".dockerignore"),
}


def faces() -> Iterator[tuple[str, str | None]]:
    """Yield each of our packages as (folder, docstring)."""
    for path in python():
        folder, _, name = path.rpartition("/")
        if name == "__init__.py" and not folder.startswith("tests"):
            yield folder, ast.get_docstring(parsed(path))


def assert_none(problems: Iterable[tuple[str, str]]) -> None:
    found = [f"{path}: {problem}" for path, problem in problems]
    assert not found, "\n" + "\n".join(found)


def test_no_line_is_too_long() -> None:
    assert_none((path, p) for path in code() for p in rules.long_lines(text_of(path)))


def test_no_function_is_too_long() -> None:
    assert_none((path, p) for path in python() for p in rules.long_functions(parsed(path)))


def test_no_module_has_mutable_state() -> None:
    assert_none((path, p) for path in python() for p in rules.module_state(parsed(path)))


def test_no_module_imports_a_test_module() -> None:
    assert_none((path, p) for path in python() for p in rules.imported_tests(parsed(path)))


def test_pure_packages_use_no_clock_and_no_randomness() -> None:
    assert_none((path, p) for path in python() for p in rules.impurities(path, parsed(path)))


def test_the_lowest_layer_imports_nothing_above_it() -> None:
    assert_none((path, p) for path in python() for p in rules.floor_breaches(path, parsed(path)))


def test_no_todo_comment_is_left() -> None:
    assert_none((path, p) for path in code() for p in rules.unfinished(text_of(path)))


def test_every_package_has_a_complete_docstring() -> None:
    assert_none(
        (folder, p)
        for folder, docstring in faces()
        for p in rules.bad_face(docstring, ROOT / folder, ROOT)
    )


def test_no_package_imports_modules_that_its_docstring_excludes() -> None:
    assert_none(
        (path, p)
        for folder, docstring in faces()
        for banned in rules.never_imported(docstring)
        for path in python()
        if path.startswith(f"{folder}/")
        for p in rules.imports_of(parsed(path), banned)
    )


def test_the_top_level_has_exactly_the_listed_folders_and_files() -> None:
    there = {path.partition("/")[0] for path in tree()}
    assert there == TOP_LEVEL, f"too many: {there - TOP_LEVEL}, missing: {TOP_LEVEL - there}"


def test_no_other_distribution_uses_the_products_import_names() -> None:
    """No other installed distribution uses our import names. They are plain words, and two owners
    of one folder would overwrite each other's files.
    """
    owners = importlib.metadata.packages_distributions()
    others = {name: set(owners.get(name, ())) - {"warmroute"} for name in rules.OURS}
    assert not any(others.values()), others
