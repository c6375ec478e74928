"""The table of tiers speaks of files that are there, and says of each what it should."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from tests import tiers
from tests.tidy.test_tidy import tree

FILES = [path.removeprefix("tests/") for path in tree() if path.startswith("tests/")]
PATTERNS = {*tiers.NATIVE, *tiers.NOT_NATIVE, *tiers.LIVE, *tiers.NOT_LIVE}


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_a_pattern_matches_a_file(pattern: str) -> None:
    assert any(fnmatch(path, pattern) for path in FILES), f"{pattern}: renamed?"


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("live/test_chaos.py", "live"),
        ("live/test_first_light.py", None),
        ("kernels/test_cuda_decode.py", "native"),
        ("kernels/test_cuda_decode_plan.py", None),
        ("kernels/test_head_fuzz.py", "native"),
        ("router/test_core.py", None),
        ("somewhere/test_new.py", None),
    ],
)
def test_a_path_tells_the_tier(path: str, tier: str | None) -> None:
    assert tiers.tier_of(path) == tier
