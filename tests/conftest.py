"""Settings of all tests: their tiers, the effort of properties, and which tests may run at the same
time.

In parallel runs (pytest-xdist) a file stays with one process, so its module's programs are started
once. Folders with long files go first, so that short files end the run together.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import settings

from simulator.live.processes import log_tail
from tests.effort import examples
from tests.forks.starting import forking
from tests.tiers import NOT_LIVE, QUICK_TIER, TIERS, lacks_of_ci, tier_of

# The models of tests are tiny: more threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("effort", max_examples=examples(100), deadline=None)
settings.load_profile("effort")

LONGEST_FIRST = (
    "release",  # one group: one wheel, one environment
    "kernels",
    "live",
    "grafana",
    "simulator",
    "engine",
    "router",
    "policies",
)
VLLM_GROUP = "vllm"  # the longest group that comes before real engines
TESTS = Path(__file__).parent
BUILD_S = 1200  # the first test of a kind builds, or starts, what it runs
FOLDER = pytest.StashKey[Path]()  # the folder of this run's temporary files
LOGS = 8  # most logs of programs that a failure shows


@pytest.fixture(scope="session", autouse=True)
def forked_programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Allow forked programs for the whole run; the first program starts the fork server."""
    request.config.stash[FOLDER] = tmp_path_factory.getbasetemp()
    with forking():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=(QUICK_TIER, *TIERS), help="run this tier only")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have no test of the tier, so that they are not even imported."""
    wanted = config.getoption("tier")
    if wanted is None or collection_path.suffix != ".py":
        return None
    tier = tier_of(collection_path.relative_to(TESTS).as_posix()) or QUICK_TIER
    # A quick file may have tests with the mark `live`.
    return None if wanted == tier or (wanted, tier) == ("live", QUICK_TIER) else True


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier (the make target that runs it) and its group: one group for each
    file, and one for all tests that must not run at the same time.
    """
    wanted = config.getoption("tier")
    kept, left = list[tuple[tuple[bool, bool, int], pytest.Item]](), list[pytest.Item]()
    for item in items:
        path, marks = _path(item.path), {mark.name for mark in item.iter_markers()}
        is_alone = not marks.isdisjoint(("alone", "full"))
        group = "alone" if is_alone else _group(item, path)
        item.add_marker(pytest.mark.xdist_group(group))
        tier = next((name for name in TIERS if name in marks), _tier(path))
        if tier is not None:
            item.add_marker(tier)
        if tier in ("native", "engines") and "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(BUILD_S))
        # A test that only runs at full length belongs to no tier.
        if wanted is None or (wanted == (tier or QUICK_TIER) and "full" not in marks):
            kept.append(((not is_alone, group != VLLM_GROUP, _place(path)), item))
        else:
            left.append(item)
    config.hook.pytest_deselected(items=left)
    kept.sort(key=itemgetter(0))  # stable: a file's tests keep their order
    items[:] = [item for _, item in kept]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a run in which pytest ignores the groups that pytest-xdist gives it.

    Imported objects are frozen, so that the garbage collector need not visit them in each test.
    """
    gc.freeze()
    if getattr(session.config.option, "loadgroup", False):
        lost = [item.nodeid for item in session.items if "@" not in item.nodeid]
        if lost:
            raise pytest.UsageError(
                f"groups of tests are lost, of {lost[0]} and {len(lost)} in all"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the programs logged meanwhile to the report of a failure. Under CI, count a skip as
    a failure if it names a program that CI installs, since a missing test would not be noticed
    otherwise.
    """
    report = yield
    if report.failed and FOLDER in item.config.stash:
        report.sections += _said_since(call.start, item.config.stash[FOLDER])
    skip = call.excinfo.value if call.excinfo else None
    if isinstance(skip, pytest.skip.Exception) and os.environ.get("CI") == "true":
        lacking = lacks_of_ci(str(skip))
        if lacking:
            report.outcome = "failed"
            report.longrepr = f"{', '.join(lacking)}: .ci/run installs it ({skip})"
    return report


def _said_since(began_s: float, folder: Path) -> list[tuple[str, str]]:
    """Return (title, last lines) of the logs under a folder that have been written to
    since then.
    """
    written: dict[Path, float] = {}
    for path in folder.rglob("*.log"):
        with suppress(FileNotFoundError):  # its program may take it away
            written[path] = path.stat().st_mtime
    latest = sorted((path for path in written if written[path] >= began_s), key=written.__getitem__)
    return [(f"end of {path.relative_to(folder)}", log_tail(path)) for path in latest[-LOGS:]]


def _group(item: pytest.Item, path: str) -> str:
    if "vllm" in getattr(item, "fixturenames", ()):
        return VLLM_GROUP  # one pool of real servers
    if path.startswith("release/"):
        return "release"  # one wheel, one environment
    return "shared stack" if path in NOT_LIVE and path.startswith("live/") else path


@cache
def _path(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


@cache
def _tier(path: str) -> str | None:
    return tier_of(path)


def _place(path: str) -> int:
    folder = path.partition("/")[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
