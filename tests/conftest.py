"""Property tests that do not say how many examples they want get a hundred, times the effort."""

from __future__ import annotations

from hypothesis import settings

from tests.effort import EFFORT

settings.register_profile("effort", max_examples=100 * EFFORT, deadline=None)
settings.load_profile("effort")
