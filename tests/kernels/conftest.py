"""Fixtures that the kernel tests share."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def sanitized_replay() -> Path:
    """Return the script that builds and runs the sanitized C++ program; skip the test if g++ is
    missing.
    """
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the sanitized C++ program cannot be built")
    return Path(__file__).parents[2] / "kernels" / "tests" / "sanitize.sh"
