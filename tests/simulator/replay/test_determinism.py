"""Tests that the same set-up gives the same hash in any process, on any processor and with any
numpy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from policies import POLICIES
from simulator.cli import main
from tests.effort import QUICK
from tests.simulator.processors import NO_VECTORS, environment

ROOT = Path(__file__).parents[3]
TOOLAGENT = ROOT.parent / "shared" / "traces" / "toolagent_surrogate.jsonl.gz"
REQUESTS = 40 if QUICK else 300  # of each workload
LONG = 3000  # requests of each workload in the full tests

# Two processes of 7 s of CPU each took more than the usual two minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


def hashed(folder: Path, requests: int = REQUESTS, **settings: str) -> dict[str, Any]:
    """Return the output of `tests.simulator.hashed` in a fresh process with these environment
    variables.
    """
    command = [sys.executable, "-m", "tests.simulator.hashed", str(folder / "faults.yaml")]
    variables = {**os.environ, "PYTHONHASHSEED": "0", **settings}
    done = subprocess.run(
        [*command, str(requests)], cwd=ROOT, env=variables, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the hashes that the first process printed, with which those of other processes are
    compared.
    """
    return hashed(tmp_path_factory.mktemp("first"))


def test_results_do_not_depend_on_the_process_or_the_hash_seed(
    first: dict[str, Any], tmp_path: Path
) -> None:
    hashes = first["hashes"]
    assert POLICIES.keys() <= hashes.keys()
    assert len(set(hashes.values())) == len(hashes), "replays apart"
    assert hashed(tmp_path, PYTHONHASHSEED="4242") == first


@pytest.mark.full  # `make test-native` compares replays under each BLAS kernel
def test_results_do_not_depend_on_vector_instructions(
    first: dict[str, Any], tmp_path: Path
) -> None:
    assert hashed(tmp_path, **without_vectors()) == first


def without_vectors() -> dict[str, str]:
    """Return the environment of a process that does not use numpy's vector code; skip the test if
    numpy has none.
    """
    found = environment(NO_VECTORS)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def oldest_numpy() -> str:
    """Return the lowest version of numpy that the package allows, as pip names it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    lowest = re.match(r"numpy>=([0-9.]+)", next(d for d in dependencies if d.startswith("numpy")))
    assert lowest is not None
    return ".".join([*lowest[1].split("."), "0", "0"][:3])


@pytest.fixture
def old_numpy(tmp_path: Path) -> tuple[str, Path]:
    """Return (version, folder) of the oldest numpy that is allowed; skip the test if pip cannot
    install it.
    """
    version, folder = oldest_numpy(), tmp_path / "numpy"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--target", str(folder), f"numpy=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"pip cannot fetch numpy {version} for this Python: {last}")
    return version, folder


@pytest.mark.full
def test_the_oldest_numpy_gives_the_same_result(
    old_numpy: tuple[str, Path], tmp_path: Path
) -> None:
    version, folder = old_numpy
    searched = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    now, then = hashed(tmp_path, LONG), hashed(tmp_path, LONG, PYTHONPATH=searched)
    assert then["numpy"] == version
    assert then["hashes"] == now["hashes"]


def replayed(path: Path, source: Path, jobs: int, *more: str) -> dict[tuple[str, int], str]:
    """Run the replay command once; return the hashes by policy and seed."""
    policies = [word for policy in ("hybrid", "kv_load", "random") for word in ("--policy", policy)]
    seeds = ["--seed", "0", "--seed", "5"]
    pool = ["--workers", "4", "--kv-tokens", "100k", *more]
    command = ["replay", str(source), *policies, *seeds, *pool]
    assert main([*command, "--jobs", str(jobs), "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    return {(row["policy"], row["seed"]): row["report_hash"] for row in rows}


@pytest.mark.full
def test_a_whole_trace_gives_the_same_result_in_any_number_of_processes(tmp_path: Path) -> None:
    if not TOOLAGENT.exists():
        pytest.skip(f"{TOOLAGENT.name} does not lie beside the checkout")
    one = replayed(tmp_path / "one.json", TOOLAGENT, 1, "--speed", "2")
    assert replayed(tmp_path / "three.json", TOOLAGENT, 3, "--speed", "2") == one


@pytest.mark.full
def test_long_replays_do_not_depend_on_hash_seed_or_vector_instructions(tmp_path: Path) -> None:
    long = hashed(tmp_path, LONG)
    assert hashed(tmp_path, LONG, PYTHONHASHSEED="77", **without_vectors()) == long
