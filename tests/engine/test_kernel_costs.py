"""Measured costs of plans: written by the program, read by a worker, refused where they are not
this device's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.model.batch import Piece, flat_batch
from engine.model.config import ModelError
from engine.model.kernel_choice import KVKERNELS
from engine.model.tiny import make_tiny
from engine.runner.kernel_costs import MAX_BYTES, read_costs, write_costs
from engine.runner.needs import StepSettings
from kvkernels.ops import calibration
from kvkernels.ops.calibration import NEVER, Calibration, Measured, Mix
from kvkernels.ops.shared_costs import Costs, Work
from tests.engine.real import loaded

FEW = tuple(Mix(requests, 1, 16, 16 * requests) for requests in (1, 2, 3))
COSTS = Costs(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def written(folder: Path, **changes: Any) -> Path:
    """A good file, but for `changes`."""
    work = Work(1, 2, 3, 4, 5)
    made = Calibration(COSTS, True, [Measured(FEW[0], work, work, 2000.0, 1000.0)])
    write_costs(folder / "costs.json", made, "cpu")
    said = json.loads((folder / "costs.json").read_text())
    (folder / "costs.json").write_text(json.dumps(said | changes))
    return folder / "costs.json"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_costs(path, "cpu") == COSTS
    assert json.loads(path.read_text())["measured"][0]["plain_us"] == 2.0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "NVIDIA H200"}, "was measured on NVIDIA H200 with operators, this is cpu"),
        ({"library": "libwarmroute-1.so"}, "was measured on cpu with libwarmroute-1.so"),
        ({"costs": COSTS._asdict() | {"item": -1.0}}, "says -1.0 for item"),
        ({"costs": COSTS._asdict() | {"item": 1e300}}, "says 1e+300 for item"),
        ({"costs": {"item": 1.0}}, "has costs item"),
        ({"costs": 7}, "is no file of kernel costs"),
        ({"device": "x" * MAX_BYTES}, "has more than 65536 bytes"),
    ],
)
def test_what_is_not_this_devices_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="measure again") as refused:
        read_costs(written(tmp_path, **changes), "cpu")
    assert says in str(refused.value)


@pytest.mark.parametrize("costs", [NEVER, COSTS])
def test_a_worker_plans_by_them(costs: Costs, tmp_path: Path) -> None:
    path = written(tmp_path, costs=costs._asdict())
    make_tiny(tmp_path / "model")
    steps = StepSettings(kernel_costs=path)
    model = loaded(tmp_path / "model", attention=KVKERNELS, steps=steps)
    trunk = list(range(200))
    pieces = [Piece([7], 200 * 8, [*trunk, 201 + row]) for row in range(3)]
    saving = flat_batch(pieces, 8, planner=model.planner).saving
    assert saving.shared_prefix_groups == (0 if costs is NEVER else 1)


def test_a_bad_file_ends_a_start_before_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path / "model")
    for path, says in (
        (written(tmp_path, device="NVIDIA H200"), "was measured on NVIDIA H200"),
        (tmp_path / "none.json", "none.json"),
    ):
        flags = ["--attention-backend", KVKERNELS, "--kernel-costs", str(path), "--port", "0"]
        assert cli.main(["serve", str(tmp_path / "model"), *flags]) == 1
        assert says in capsys.readouterr().err


def test_the_program_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, the operator's plain implementation; a smaller grid, which takes less time."""
    make_tiny(tmp_path / "model")
    monkeypatch.setattr(calibration, "GRID", FEW)
    out = tmp_path / "costs.json"
    flags = ["calibrate-kernels", str(tmp_path / "model"), "--device", "cpu", "--out", str(out)]
    assert cli.main(flags) == 0
    assert min(read_costs(out, "cpu")) >= 0
    said = capsys.readouterr()
    assert "timing 3 of 3" in said.err
    assert "3 requests,  1 prefixes of    16, own    48" in said.out
    assert cli.main([*flags[:-1], str(tmp_path / "none" / "costs.json")]) == 1
    assert cli.main([flags[0], str(tmp_path), *flags[2:]]) == 1
