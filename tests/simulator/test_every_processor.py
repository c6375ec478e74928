"""Tests that fits and replays give the same numbers on every processor, in each way that this one
can compute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import QUICK
from tests.simulator.processors import NO_VECTORS, WAYS, environment

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "simulator" / "data" / "conversation_sample.jsonl.gz"
# Tests of code whose results depend on how numpy and scipy add: fits, comparisons, statistics.
NUMERIC = ["calibrate/test_validate.py", "report/test_aggregate.py", "report/test_row.py"]
if not QUICK:
    NUMERIC.append("calibrate/test_calibrate.py")  # fits, once more
# The oldest kernel, which has no fused products, and numpy's own sums differ most from others.
IN_CI = ("Prescott", NO_VECTORS)
CLOSE = 1e-6  # of predicted step times, relative


@pytest.fixture(
    scope="module",
    params=[way if way in IN_CI else pytest.param(way, marks=pytest.mark.full) for way in WAYS],
)
def way(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment variables of a process that computes in one way; the fixture goes
    through all ways.
    """
    found = environment(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def output_of(command: list[str], settings: dict[str, str]) -> str:
    """Return the output of `python -m command` with these environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fitted(settings: dict[str, str]) -> dict[str, list[float]]:
    predicted: dict[str, list[float]] = json.loads(output_of(["tests.simulator.fitted"], settings))
    return predicted


@pytest.fixture(scope="module")
def usual_fits() -> dict[str, list[float]]:
    """Return the fits that this processor computes by default."""
    return fitted({})


def replayed(folder: Path, settings: dict[str, str]) -> list[str]:
    """Return the lines of a replay's file of results, without those on the time that it took."""
    file = folder / "results.json"
    arguments = ["--policy", "warmset", "--policy", "hybrid", "--workers", "4", "--requests", "100"]
    output_of(["simulator", "replay", str(SAMPLE), *arguments, "--json", str(file)], settings)
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        line
        for line in lines
        if not line.lstrip().startswith(('"wall_s"', '"requests_per_wall_s"'))
    ]


@pytest.fixture(scope="module")
def usual_replay(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return replayed(tmp_path_factory.mktemp("usual"), {})


def test_fits_predict_the_same_step_times(
    way: dict[str, str], usual_fits: dict[str, list[float]]
) -> None:
    for name, predicted in fitted(way).items():
        assert predicted == pytest.approx(usual_fits[name], rel=CLOSE), name


def test_replays_write_the_same_bytes(
    way: dict[str, str], usual_replay: list[str], tmp_path: Path
) -> None:
    assert replayed(tmp_path, way) == usual_replay


def test_numeric_tests_pass_on_every_processor(way: dict[str, str]) -> None:
    files = [f"tests/simulator/{name}" for name in NUMERIC]
    options = ["-q", "-n", "0", "--tier", "quick", "-m", "not alone", "-p", "no:cacheprovider"]
    assert " passed" in output_of(["pytest", *options, *files], way)
