"""Tests that a run of tests tells flaky tests from broken ones, with small tests made for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_tier import FLAKY_LIST, run, without_group

WELL = "def test_well(): pass\n"
BROKEN = "def test_broken(): assert False\n"
# Fails the first time only.
FLAKY = """
import pathlib, pytest
@pytest.mark.parametrize("name", [{names}])
def test_flaky(name):
    seen = pathlib.Path("seen-" + name)
    if not seen.exists():
        seen.touch()
        raise OSError("not yet")
"""
NOT_YET = "OSError: not yet"
# No other installed plug-in is imported, because there are many runs here.
ONE_AT_A_TIME = ["-q", "-p", "xdist"]
TWO_AT_A_TIME = [*ONE_AT_A_TIME, "--numprocesses=2", "--dist=loadgroup"]


@pytest.fixture(autouse=True)
def without_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # run from another folder


def flaky(*names: str) -> str:
    return FLAKY.format(names=", ".join(map(repr, names)))


@pytest.mark.parametrize(
    ("text", "code", "listed"),
    [
        pytest.param(WELL, 0, [], id="well"),
        pytest.param(WELL + BROKEN, 1, [], id="broken"),
        pytest.param(flaky("a", "b@c", "d"), 0, ["a", "b@c", "d"], id="three flaky"),
        pytest.param(flaky(*"abcd"), 1, ["a", "b", "c", "d"], id="four flaky"),
        pytest.param(flaky("a") + BROKEN, 1, ["a"], id="both"),
        pytest.param(flaky(*"abcdefghijklm"), 1, [], id="too many"),
    ],
)
def test_only_tests_that_fail_twice_make_the_run_fail(
    tmp_path: Path, text: str, code: int, listed: list[str]
) -> None:
    (tmp_path / "test_it.py").write_text(text)
    assert run(ONE_AT_A_TIME, tmp_path) == code
    path = tmp_path / FLAKY_LIST
    found = path.read_text().splitlines() if path.exists() else []
    assert found == [f"test_it.py::test_flaky[{name}]: {NOT_YET}" for name in listed]


def test_a_file_with_an_import_error_makes_the_run_fail(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name\n")
    assert run(ONE_AT_A_TIME, tmp_path) not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def test_a_test_that_kills_its_process_is_retried_alone(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        flaky("a").replace('raise OSError("not yet")', "import os; os._exit(9)")
    )
    assert run(TWO_AT_A_TIME, tmp_path) == 0
    assert (tmp_path / FLAKY_LIST).read_text().startswith("test_it.py::test_flaky[a]: worker ")


NO_FIXTURE_AT_FIRST = """
import pathlib, pytest
pytestmark = pytest.mark.xdist_group("all")
@pytest.fixture(scope={scope!r})
def it(request):
    seen = pathlib.Path("seen-" + request.node.name)
    if not seen.exists():
        seen.touch()
        raise OSError("not yet")
"""


@pytest.mark.parametrize("by", [ONE_AT_A_TIME, TWO_AT_A_TIME], ids=["one", "two"])
def test_a_failing_shared_fixture_is_listed_once(tmp_path: Path, by: list[str]) -> None:
    tests = "".join(f"def test_{number}(it): pass\n" for number in range(13))
    (tmp_path / "test_it.py").write_text(NO_FIXTURE_AT_FIRST.format(scope="session") + tests)
    assert run(by, tmp_path) == 0
    line = f"test_it.py::test_0 and 12 more by the same fixture: {NOT_YET}\n"
    assert (tmp_path / FLAKY_LIST).read_text() == line


def test_failing_fixtures_of_function_scope_are_listed_per_test(tmp_path: Path) -> None:
    tests = "".join(f"def test_{number}(it): pass\n" for number in range(4))
    (tmp_path / "test_it.py").write_text(NO_FIXTURE_AT_FIRST.format(scope="function") + tests)
    assert run(ONE_AT_A_TIME, tmp_path) == 1
    assert len((tmp_path / FLAKY_LIST).read_text().splitlines()) == 4


def test_of_tests_that_fail_together_only_the_broken_one_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tests = "def test_well(it): pass\ndef test_broken(it): assert False\n"
    (tmp_path / "test_it.py").write_text(NO_FIXTURE_AT_FIRST.format(scope="session") + tests)
    assert run(ONE_AT_A_TIME, tmp_path) == 1
    said = [line for line in capfd.readouterr().out.splitlines() if "BROKEN" in line]
    assert said == ["BROKEN, failed twice: test_it.py::test_broken"]


def test_a_failing_fixture_teardown_makes_the_run_fail(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.fixture\ndef it():\n    yield\n    assert False\n"
        "def test_end(it): pass\n"
    )
    assert run(ONE_AT_A_TIME, tmp_path) == 1


def test_a_run_without_tests_is_no_success(tmp_path: Path) -> None:
    assert run(ONE_AT_A_TIME, tmp_path) == pytest.ExitCode.NO_TESTS_COLLECTED


def test_xdist_groups_are_removed_from_test_names() -> None:
    assert without_group("tests/a.py::test@group of a/b.py") == "tests/a.py::test"
    assert without_group("tests/a.py::test[x@y]@group") == "tests/a.py::test[x@y]"
    assert without_group("tests/a.py::test[x@y]") == "tests/a.py::test[x@y]"
    assert without_group("tests/a@b.py") == "tests/a@b.py"
