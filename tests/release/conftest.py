"""Makes one wheel and one environment for all tests of the installed product, which run in one
process.

The wheel is the one that pip builds here; `make test-all` also builds the one for other machines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release.bare import Bare, built_wheel, installed


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of this checkout for this Python and processor."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Return an environment with only the wheel and its dependencies."""
    return installed(wheel, tmp_path_factory.mktemp("bare"))
