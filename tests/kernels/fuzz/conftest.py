"""Fixtures for building fuzzers."""

from __future__ import annotations

import pytest

from tests.kernels.fuzz.fuzzing import need_clang


@pytest.fixture(scope="module")
def clang(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the test if there is no clang with libFuzzer."""
    need_clang(tmp_path_factory.mktemp("probe"))
