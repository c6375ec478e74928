"""Tests that the same facts and seed give the same actions in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.router.core.random_world import POLICIES, digest

ROOT = Path(__file__).parents[3]


def digests_with(hash_seed: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.router.core.random_world"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_actions_do_not_depend_on_the_python_hash_seed() -> None:
    first = digests_with("0")
    assert [line.split()[0] for line in first] == list(POLICIES)
    assert digests_with("1") == digests_with("4242") == first


def test_different_seeds_give_different_histories() -> None:
    for name in POLICIES:
        assert digest(name, 1)[0] != digest(name, 2)[0]


def test_the_random_world_contains_each_kind_of_event() -> None:
    seen = {"dispatched": 0, "held": 0, "retried": 0, "rejected": 0}
    for number, name in enumerate(POLICIES):
        for what, count in digest(name, number)[1].items():
            seen[what] += count
    assert all(count > 10 for count in seen.values()), seen
