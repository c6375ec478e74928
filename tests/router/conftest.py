"""Provides the fixture that chooses between the two implementations of the relay."""

from __future__ import annotations

import pytest

from tests.router.relay_support import BOTH_PATHS, use_implementation


@pytest.fixture(params=BOTH_PATHS)
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: with the relay in Python, then with the native relay thread."""
    use_implementation(str(request.param), monkeypatch)
    return str(request.param)
