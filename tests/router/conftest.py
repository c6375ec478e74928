"""Which way the bytes of a relay go."""

from __future__ import annotations

import pytest

from tests.router.relay_support import BOTH_PATHS, go_by


@pytest.fixture(params=BOTH_PATHS)
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every relay that a test makes goes the Python way (live), then by the thread."""
    go_by(str(request.param), monkeypatch)
    return str(request.param)
