"""Run a tier of tests, and what failed once more, alone, at its end: flaky is not broken.

    python -m tests.run_tier quick [options of pytest]

A test that fails, and passes alone, is listed as FLAKY, here and in build/flaky.txt, which
`.ci/run` shows at its end. A test that fails twice fails the run, and so do more than three flaky
ones: then it is not the tests, each on its own, that are at fault.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import QUICK_TIER, TIERS

FLAKY_AT_MOST = 3
ALONE_AT_MOST = 12  # where more fail, it is nothing that comes and goes
FLAKY_LIST = Path("build/flaky.txt")


class FailedTests:
    """Writes the name of each test that fails, in its set-up or its end, too. Lifetime: run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._path.open("a") as file:
                print(without_group(report.nodeid), file=file)


def pytest_addoption(parser: pytest.Parser) -> None:
    """This module is the plug-in of pytest that it runs."""
    parser.addoption("--failed-list", type=Path, help="a file for the names of tests that fail")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("failed_list")
    # With pytest-xdist all reports come to its controller.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedTests(path))


def without_group(node_id: str) -> str:
    """pytest-xdist puts `@GROUP` behind the name of a test."""
    name, at, _ = node_id.rpartition("@")
    return name if at and "::" in name and not node_id.endswith("]") else node_id


def run(arguments: list[str], folder: Path, name: str = "tests") -> int:
    """Run pytest with these options in a folder; its exit code, or 0 where all is well alone.

    build/`name`.xml tells of each test how long it took.
    """
    code, failed = _pytest([f"--junitxml=build/{name}.xml", *arguments], folder)
    if code != pytest.ExitCode.TESTS_FAILED or not failed:
        return code
    if len(failed) > ALONE_AT_MOST:
        print(f"{len(failed)} tests failed: too many to try each alone")
        return code
    broken = [t for t in failed if _pytest([*arguments, "--numprocesses=0", t], folder)[0] != 0]
    flaky = [test for test in failed if test not in broken]
    for test in broken:
        print(f"BROKEN, failed twice: {test}")
    for test in flaky:
        print(f"FLAKY, passed alone: {test}")
    if flaky:
        with (folder / FLAKY_LIST).open("a") as file:
            print(*flaky, sep="\n", file=file)
    if len(flaky) > FLAKY_AT_MOST:
        print(f"{len(flaky)} flaky tests: {FLAKY_AT_MOST} are borne")
    return code if broken or len(flaky) > FLAKY_AT_MOST else 0


def _pytest(arguments: list[str], folder: Path) -> tuple[int, list[str]]:
    """Exit code, and the names of the tests that failed, each once."""
    path = folder / f"build/failed-{os.getpid()}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = ["-p", "tests.run_tier", f"--failed-list={path.absolute()}"]
    try:
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *ours, *arguments], cwd=folder
        ).returncode
        failed = path.read_text().splitlines() if path.exists() else []
    finally:
        path.unlink(missing_ok=True)
    return code, list(dict.fromkeys(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", choices=(QUICK_TIER, *TIERS, "all"))
    tier, arguments = parser.parse_known_args()
    own = [] if tier.tier == "all" else [f"--tier={tier.tier}"]
    sys.exit(run([*own, "-q", *arguments], Path(), tier.tier))


if __name__ == "__main__":
    main()
