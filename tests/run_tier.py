"""Runs a tier of tests, then each failed test once more, alone, so that flaky tests differ from
broken ones.

    python -m tests.run_tier quick [options of pytest]

A test that fails and then passes alone is listed as FLAKY, here and in build/flaky.txt, which
`.ci/run` shows at its end with the error of each. A test that fails twice fails the run. So do more
than three flaky tests, because then the cause is not in single tests. Tests whose common fixture
could not be set up count as one failure and run together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import QUICK_TIER, TIERS

FLAKY_AT_MOST = 3
ALONE_AT_MOST = 12  # if more tests fail, the cause is not flakiness
FLAKY_LIST = Path("build/flaky.txt")
MESSAGE_LENGTH = 300  # characters of an error that are kept
FAILED_FIRST = "failed_first"  # a report's property: the test that met the same exception first


@dataclass(frozen=True, slots=True)
class Failure:
    """One test that failed, with its error."""

    test: str
    first: str  # the test that met the same exception first: itself, or one of the same fixture
    error: str  # the beginning of the exception's text, in one line


class FailedTests:
    """Writes each test that fails to a file, also if its set-up or its end fails. Lifetime: run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            first = dict(report.user_properties).get(FAILED_FIRST, report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            error = " ".join(str(report.longrepr if crash is None else crash.message).split())
            failure = Failure(
                without_group(report.nodeid), without_group(str(first)), error[:MESSAGE_LENGTH]
            )
            with self._path.open("a") as file:
                print(json.dumps(asdict(failure)), file=file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Record which test met an exception first. If a fixture cannot be set up, pytest raises its
    exception for each test that wants the fixture.
    """
    report = yield
    if call.excinfo is not None and report.failed:
        first = vars(call.excinfo.value).setdefault("_failed_first", item.nodeid)
        report.user_properties.append((FAILED_FIRST, first))
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag of this module, which is itself the plug-in of the pytest that it runs."""
    parser.addoption("--failed-list", type=Path, help="a file for the names of tests that fail")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("failed_list")
    # With pytest-xdist all reports come to its controller.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedTests(path))


def without_group(node_id: str) -> str:
    """Return a test's name without the `@GROUP` that pytest-xdist appends to it."""
    name, at, _ = node_id.rpartition("@")
    return name if at and "::" in name and not node_id.endswith("]") else node_id


def run(arguments: list[str], folder: Path, name: str = "tests") -> int:
    """Run pytest with these options in a folder; return its exit code, or 0 if all failed tests
    pass alone.

    build/`name`.xml says how long each test took.
    """
    code, failures = _pytest([f"--junitxml=build/{name}.xml", *arguments], folder)
    if code != pytest.ExitCode.TESTS_FAILED or not failures:
        return code
    together = dict[str, list[Failure]]()
    for failure in failures:
        together.setdefault(failure.first, []).append(failure)
    if len(together) > ALONE_AT_MOST:
        print(f"{len(together)} tests failed: too many to try each alone")
        return code
    flaky = list[str]()
    is_broken = False
    for first, failed in together.items():
        tests = list(dict.fromkeys(failure.test for failure in failed))
        code_alone, failed_again = _pytest([*arguments, "--numprocesses=0", *tests], folder)
        if code_alone != 0:
            is_broken = True
            for test in dict.fromkeys(failure.test for failure in failed_again) or tests:
                print(f"BROKEN, failed twice: {test}")
            continue
        others = f" and {len(tests) - 1} more by the same fixture" if len(tests) > 1 else ""
        flaky.append(f"{first}{others}: {failed[0].error}")
    for line in flaky:
        print(f"FLAKY, passed alone: {line}")
    if flaky:
        with (folder / FLAKY_LIST).open("a") as file:
            print(*flaky, sep="\n", file=file)
    if len(flaky) > FLAKY_AT_MOST:
        print(f"{len(flaky)} flaky tests: {FLAKY_AT_MOST} are borne")
    return code if is_broken or len(flaky) > FLAKY_AT_MOST else 0


def _pytest(arguments: list[str], folder: Path) -> tuple[int, list[Failure]]:
    """Run pytest; return its exit code and the failures. A test whose body and whose end fail
    occurs twice.
    """
    path = folder / f"build/failed-{os.getpid()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = ["-p", "tests.run_tier", f"--failed-list={path.absolute()}"]
    try:
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *ours, *arguments], cwd=folder
        ).returncode
        lines = path.read_text().splitlines() if path.exists() else []
    finally:
        path.unlink(missing_ok=True)
    return code, [Failure(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", choices=(QUICK_TIER, *TIERS, "all"))
    tier, arguments = parser.parse_known_args()
    own = [] if tier.tier == "all" else [f"--tier={tier.tier}"]
    sys.exit(run([*own, "-q", *arguments], Path(), tier.tier))


if __name__ == "__main__":
    main()
