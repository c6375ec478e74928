"""One wheel and one environment for all tests of what is installed (they stay with one process).

The wheel is as pip builds it here; `make test-all` builds the one for others' machines, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release.bare import Bare, built_wheel, installed


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, Python and processor."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """The wheel alone in an environment, with what it depends on."""
    return installed(wheel, tmp_path_factory.mktemp("bare"))
