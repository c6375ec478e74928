"""Tests that the table of test tiers names files that exist and says the right things
about each.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import tiers
from tests.tidy.checkout import ROOT, tree

FILES = [path.removeprefix("tests/") for path in tree() if path.startswith("tests/")]
PATTERNS = {*tiers.NATIVE, *tiers.LIVE, *tiers.NOT_LIVE, *tiers.ENGINES}


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_each_pattern_matches_a_file(pattern: str) -> None:
    assert any(fnmatch(path, pattern) for path in FILES), f"{pattern}: renamed?"


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("live/test_chaos.py", "live"),
        ("engines/test_vllm.py", "engines"),
        ("live/test_first_light.py", None),
        ("kernels/cuda/test_decode.py", "native"),
        ("kernels/ops/test_shared_plan.py", None),
        ("kernels/fuzz/test_heads.py", "native"),
        ("router/test_core.py", None),
        ("somewhere/test_new.py", None),
    ],
)
def test_each_path_has_its_tier(path: str, tier: str | None) -> None:
    assert tiers.tier_of(path) == tier


def test_ci_installs_the_programs_that_its_tests_require() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    asked_for = set(re.findall(r"command -v (\S+)", script)) - {"apt-get"}
    assert asked_for | {"prometheus"} == set(tiers.INSTALLED_BY_CI)  # which comes with promtool


def test_missing_programs_are_read_from_skip_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert tiers.lacks_of_ci("clang++ is not installed: no fuzzer can be built") == ["clang++"]
    both = tiers.lacks_of_ci("ip (Debian package: iproute2) or redis-server is not on this machine")
    assert both == ["ip", "redis-server"]
    assert tiers.lacks_of_ci("nvcc is not installed, nor is a chip") == []


def test_installed_programs_do_not_count_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ip").write_text("#!/bin/sh\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tiers.lacks_of_ci("needs root and the program ip") == []
