"""Tests of `warmroute-sim instances`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.cli_support import Run, run, trace

__all__ = ["run"]
SIZES = [{"batch": b, "count": 40, "seconds": 0.010 + 0.002 * b} for b in (1, 2, 4, 8)]
PAGE = Path(__file__).parents[3] / "docs" / "triton.md"
LINE = ("--base-s", 0.010, "--per-request-s", 0.002)


def measured(folder: Path, name: str = "measured.json", **changes: Any) -> Path:
    """Write a file as `warmroute doctor --probe --measure` does; return its path."""
    path = folder / name
    told = {"model": "resnet", "max_batch_size": 8, "instances": 1, "sizes": SIZES}
    path.write_text(json.dumps(told | changes))
    return path


def test_instances_prints_and_writes_its_plan(run: Run, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    said = run(
        *("instances", measured(tmp_path), "--rate", 600, "--p99-ms", 40),
        *("--json", plan, "--html", page),
    )
    assert said.status == 0, said.err
    found = json.loads(plan.read_text())
    needed = found["plan"]["needed"]
    assert f"Take {needed}: p99" in said.out
    assert f"With {needed - 1}: p99" in said.out
    assert "where one may fail" in said.out
    assert "10 + 2 x b ms" in said.out
    assert "seen: 1, 2, 4, 8, beside 1" in said.out
    assert "Queue delay:" in said.out
    assert "Knee of an instance: 4 requests" in said.out
    shown = {row["instances"]: row for row in found["plan"]["rows"]}
    assert shown[needed]["p99_s"] <= 0.040
    assert found["models"][0]["seconds"] == pytest.approx([0.010 + 0.002 * b for b in range(1, 9)])
    text = page.read_text()
    assert text.count("data:image/svg+xml") == 5
    assert 'src="http' not in text


def test_the_arrival_rate_comes_from_a_log_unless_it_is_given(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    log = trace(tmp_path, "requests")
    said = run("instances", *LINE, "--log", log, "--json", out)
    assert said.status == 0, said.err
    load = json.loads(out.read_text())["load"]
    assert load["rate_per_s"] == pytest.approx(20.0, rel=0.01)
    said = run("instances", *LINE, "--log", log, "--rate", 7, "--json", out)
    assert json.loads(out.read_text())["load"]["rate_per_s"] == 7


def test_several_measurements_need_different_numbers_of_instances(run: Run, tmp_path: Path) -> None:
    slow = [one | {"seconds": 3 * one["seconds"]} for one in SIZES]
    files = (measured(tmp_path), measured(tmp_path, "three.json", instances=3, sizes=slow))
    said = run("instances", *files, "--rate", 500, "--p99-ms", 200)
    assert said.status == 0, said.err
    assert "beside 1" in said.out
    assert "beside 3" in said.out
    said = run("instances", files[0], files[0], "--rate", 500)
    assert said.status == 2
    assert "beside another number of instances" in said.err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--p99-ms", 10, "--rate", 10), "a request alone takes 12 ms"),
        (("--rate", 1e5), "instances are too few: full batches take"),
        (("--rate", 240, "--p99-ms", 27, "--most-instances", 1), "1 instances miss the target"),
        (
            ("--rate", 900, "--p99-ms", 60, "--device-gib", 16, "--instance-gib", 6),
            "2 instances are too few",
        ),
    ],
)
def test_unreachable_targets_exit_with_1_and_the_reason(
    run: Run, more: tuple[object, ...], told: str
) -> None:
    said = run("instances", *LINE, *more)
    assert said.status == 1, said.err
    assert told in said.out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty; measure again: warmroute doctor URL --probe --measure FILE"),
        ("{", "measure again"),
        ('{"model": "m", "max_batch_size": 8, "instances": 1, "sizes": []}', "no batch was seen"),
        ("[4]", "Expected `object`"),
    ],
)
def test_the_error_for_a_file_that_is_no_measurement_names_the_problem(
    run: Run, tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    said = run("instances", path, "--rate", 10)
    assert said.status == 2
    assert told in said.err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sizes": SIZES[:1]}, "only batches of 1 were seen, and a line needs two sizes"),
        ({"sizes": [SIZES[0] | {"seconds": -0.1}]}, "$.sizes[0].seconds"),
        ({"sizes": [SIZES[0] | {"seconds": float("nan")}]}, "NaN or Infinity where a time"),
        ({"sizes": [SIZES[0] | {"batch": 0}]}, "$.sizes[0].batch"),
        ({"sizes": [SIZES[0] | {"count": 0}]}, "$.sizes[0].count"),
        ({"instances": 0}, "$.instances"),
        ({"max_batch_size": 10**9}, "$.max_batch_size"),
    ],
)
def test_the_error_for_wrong_times_names_them(
    run: Run, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    said = run("instances", measured(tmp_path, **changes), "--rate", 10)
    assert said.status == 2
    assert told in said.err
    assert "doctor" in said.err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--rate", 5), "say how long batches take"),
        ((*LINE,), "say how much comes"),
        (("--base-s", 0, "--per-request-s", 0, "--rate", 5), "a request takes time"),
        ((*LINE, "--rate", "nan"), "not a number above 0"),
        ((*LINE, "--rate", 5, "--base-s", -1), "not a number of 0 or more"),
        ((*LINE, "--rate", 5, "--device-gib", 16), "--device-gib and --instance-gib"),
        (
            (*LINE, "--rate", 5, "--device-gib", 4, "--instance-gib", 3.5),
            "take a larger device, a smaller --max-batch, or less --headroom",
        ),
        ((*LINE, "--rate", 5, "--max-batch", 5000), "4096 at most"),
        ((*LINE, "--rate", 5, "--variability", 1000), "100 at most"),
        (("nowhere.json", "--rate", 5), "No such file"),
    ],
)
def test_the_error_for_wrong_usage_names_the_remedy(
    run: Run, more: tuple[object, ...], told: str
) -> None:
    said = run("instances", *more)
    assert said.status == 2
    assert told in said.err


def test_the_triton_page_shows_the_commands_output(run: Run) -> None:
    """The page on Triton shows the command's output word for word, without the legend."""
    page = PAGE.read_text().split("## How many instances?")[1]
    command, _, told = page.split("```\n")[1].partition("\n")
    said = run(*shlex.split(command.removeprefix("$ warmroute-sim ")))
    assert said.status == 0, said.err
    shown = [" ".join(line.split()) for line in said.out.splitlines()]
    missing = [line for line in told.splitlines() if " ".join(line.split()) not in shown]
    assert not missing


def test_help_explains_the_answer_and_shows_a_measurement_command(run: Run) -> None:
    said = run("instances", "--help")
    assert "what an answer means" in said.out
    assert "warmroute doctor http://gpu1:8000 --probe --measure" in said.out
