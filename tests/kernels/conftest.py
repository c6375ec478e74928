"""What the kernel tests share."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def sanitized_replay() -> Path:
    """The script that builds and runs the sanitized C++ program."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the sanitized C++ program cannot be built")
    return Path(__file__).parents[2] / "kernels" / "tests" / "sanitize.sh"
