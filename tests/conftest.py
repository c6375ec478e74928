"""Property tests that do not say how many examples they want get a hundred, times the effort.

Run in parallel (`make test`: pytest-xdist), a file stays with one process, which makes its module's
programs once. Folders with long files go first, so that short ones end the run together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import EFFORT
from tests.forks.starting import forking

settings.register_profile("effort", max_examples=100 * EFFORT, deadline=None)
settings.load_profile("effort")

LONGEST_FIRST = ("kernels", "live", "grafana", "simulator", "engine", "router", "policies", "door")
TESTS = Path(__file__).parent
KERNELS = ("test_cuda_", "test_kernel_")  # files whose first test may have to build the emulator
BUILD_S = 900


@pytest.fixture(scope="session", autouse=True)
def forked_programs() -> Iterator[None]:
    """Starts nothing: the first program does."""
    with forking():
        yield


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A group of each file, and one of all that must not run beside each other; time to build."""
    for item in items:
        group = "alone" if _alone(item) else str(item.path.relative_to(TESTS))
        item.add_marker(pytest.mark.xdist_group(group))
        if item.path.name.startswith(KERNELS):
            item.add_marker(pytest.mark.timeout(BUILD_S))
    items.sort(key=_order)  # stable: a file's tests keep their order


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run torn apart: not every pytest takes the groups that pytest-xdist gives it."""
    if getattr(session.config.option, "loadgroup", False):
        lost = [item.nodeid for item in session.items if "@" not in item.nodeid]
        if lost:
            raise pytest.UsageError(
                f"groups of tests are lost, of {lost[0]} and {len(lost)} in all"
            )


def _alone(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("alone", "full"))


def _order(item: pytest.Item) -> tuple[bool, int]:
    folder = item.path.relative_to(TESTS).parts[0]
    place = LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
    return not _alone(item), place
