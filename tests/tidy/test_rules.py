"""Tests that each style rule finds a violation that is planted for it and accepts the
correct form.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tidy import rules

FACE = """One line.

Owns: things.
Gives: `thing`.
Never imports: policies, the router, engine.server; clocks, torch. A sentence about
why.
Start reading at: `start.py`, then the rest.
"""


def source(problems: Iterable[str]) -> list[str]:
    return list(problems)


def test_lines_over_the_limit_are_found() -> None:
    assert not source(rules.long_lines("x" * 100 + "\n"))
    assert source(rules.long_lines("\n" + "x" * 101)) == [
        "line 2 has 101 columns, the limit is 100"
    ]


def test_functions_over_the_limit_are_found() -> None:
    body = "    x = 1\n"
    assert not source(rules.long_functions(ast.parse("def f():\n" + body * 59)))
    assert source(rules.long_functions(ast.parse("async def f():\n" + body * 60)))


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "seen: set[int] = set()",
        "workers = [1]",
        "by_name = {n: 1 for n in 'ab'}",
        "queue = collections.deque()",
        "a = b = []",
    ],
)
def test_mutable_module_state_is_found(text: str) -> None:
    assert source(rules.module_state(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    ["POLICIES = {}", "_FORMATS = {1: 2}", "__all__ = ['a']", "name = 'a'", "def f():\n    x = []"],
)
def test_constants_do_not_count_as_module_state(text: str) -> None:
    assert not source(rules.module_state(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "from tests.router.test_a import b",
        "from tests.router import a, test_a as b",
        "from .test_a import b",
        "def f():\n    import tests.router.test_a",
    ],
)
def test_imports_of_test_modules_are_found(text: str) -> None:
    assert len(source(rules.imported_tests(ast.parse(text)))) == 1
    assert not source(rules.imported_tests(ast.parse("from tests.router.support import tested")))


@pytest.mark.parametrize(
    "text",
    ["import time", "def f():\n    from random import choice", "x = np.random.default_rng()"],
)
def test_clocks_and_randomness_in_pure_packages_are_found(text: str) -> None:
    tree = ast.parse(text)
    assert source(rules.impurities("policies/a.py", tree))
    assert source(rules.impurities("engine/scheduler/scheduler.py", tree))
    assert not source(rules.impurities("router/http/a.py", tree))


def test_imports_with_similar_names_are_accepted() -> None:
    assert not source(rules.impurities("policies/a.py", ast.parse("import timeit, randomness")))


def test_imports_against_the_layers_are_found() -> None:
    assert source(rules.floor_breaches("policies/a.py", ast.parse("import scipy")))
    assert source(rules.floor_breaches("policies/a.py", ast.parse("from router.core import x")))
    assert source(rules.floor_breaches("kernels/kvkernels/a.py", ast.parse("import engine.wire")))
    good = ast.parse("import math\nimport numpy as np\nfrom policies.contract import Floats")
    assert not source(rules.floor_breaches("policies/a.py", good))
    assert not source(rules.floor_breaches("router/a.py", ast.parse("import aiohttp")))


def test_package_docstrings_with_missing_parts_are_found(tmp_path: Path) -> None:
    assert source(rules.bad_face(None, tmp_path, tmp_path))
    assert source(rules.bad_face(FACE.replace("Gives:", "Has:"), tmp_path, tmp_path)) == [
        "the docstring lacks Gives:"
    ]
    assert source(rules.bad_face(FACE, tmp_path, tmp_path)) == [
        "`Start reading at:` names start.py, which is not there"
    ]
    (tmp_path / "start.py").touch()
    assert not source(rules.bad_face(FACE, tmp_path, tmp_path))
    assert source(rules.bad_face(FACE.replace("`", ""), tmp_path, tmp_path))


def test_imports_that_a_package_docstring_excludes_are_found() -> None:
    assert rules.never_imported(FACE) == ["policies", "router", "engine.server", "torch"]
    assert source(rules.imports_of(ast.parse("from engine import server"), "engine.server"))
    assert source(rules.imports_of(ast.parse("import engine.server.app"), "engine.server"))
    assert not source(rules.imports_of(ast.parse("import engine.serverless"), "engine.server"))


def test_import_cycles_are_found() -> None:
    ring = {
        "router/a.py": ast.parse("from router import b"),
        "router/b.py": ast.parse("try:\n    from router.c import x\nexcept ImportError:\n    pass"),
        "router/c.py": ast.parse("import router.a"),
    }
    assert {"router.a", "router.b", "router.c"} == set(rules.import_cycle(ring))
    for harmless in (
        "def f():\n    import router.a",
        "if TYPE_CHECKING:\n    from router.a import x",
        "import router.c, os",
    ):
        assert not rules.import_cycle(ring | {"router/c.py": ast.parse(harmless)})


def test_todo_comments_are_found() -> None:
    assert source(rules.unfinished("x = 1  # TO" + "DO: later"))
    assert not source(rules.unfinished("todos = 1"))
