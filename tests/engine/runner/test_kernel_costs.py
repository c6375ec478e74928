"""Tests of the measured costs of attention plans: the program writes them, a worker reads them and
refuses those of another device.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli import main as cli
from engine.model.backends import ALL_KERNELS, FLASHINFER, KVKERNELS, SHAPES, TORCH, KernelChoice
from engine.model.batch import Piece, flat_batch
from engine.model.config import ModelError, read_config
from engine.model.tiny import make_tiny
from engine.runner.kernel_costs import (
    MAX_BYTES,
    TimedWay,
    WayTimer,
    fastest,
    read_costs,
    write_costs,
)
from engine.runner.needs import StepSettings
from kvkernels.ops import calibration
from kvkernels.ops.calibration import NEVER, Calibration, Measured, Mix
from kvkernels.ops.shared_costs import AttentionShape, Costs, Work
from tests.engine.real import Reference, computing, greedy, ids_of, loaded
from tests.engine.runner.failing import failing

FEW = tuple(Mix(requests, 1, 16, 16 * requests) for requests in (1, 2, 3))
COSTS = Costs(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def written(folder: Path, **changes: Any) -> Path:
    """Write a valid file of costs, with `changes` to its fields; return its path."""
    work = Work(1, 2, 3, 4, 5)
    made = Calibration(COSTS, True, [Measured(FEW[0], work, work, 2000.0, 1000.0)])
    write_costs(folder / "costs.json", made, "cpu")
    said = json.loads((folder / "costs.json").read_text())
    (folder / "costs.json").write_text(json.dumps(said | changes))
    return folder / "costs.json"


def test_written_costs_are_read_back(tmp_path: Path) -> None:
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
        ({"ways": {"decode_short": "cudnn"}}, "has cudnn for decode_short"),
        ({"ways": {"decode": "torch"}}, "has torch for decode"),
        ({"device": "x" * MAX_BYTES}, "has more than 65536 bytes"),
    ],
)
def test_an_invalid_or_foreign_file_of_costs_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="measure again") as refused:
        read_costs(written(tmp_path, **changes), "cpu")
    assert says in str(refused.value)


@pytest.mark.parametrize(("name", "shapes"), [("prefill", "prefill"), ("shared_decode", "decode")])
def test_a_kernel_with_wrong_results_is_refused_by_name(
    name: str, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(torch.ops.warmroute, name)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[9 if name == "prefill" else 10][0] *= 1.001

    make_tiny(tmp_path / "model")
    monkeypatch.setattr(torch.ops.warmroute, name, wrong)
    config = read_config(tmp_path / "model")
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, 4)
    timed = WayTimer(config, shape, Costs(), torch.float32, "cpu").times()
    for one in timed:
        if one.way == KVKERNELS:
            is_wrong = one.shape.startswith(shapes)
            assert (one.us is None) == is_wrong
            assert one.why_not.startswith("a trial: ") == is_wrong
            assert "off, 0.0001 is right" in one.why_not or not is_wrong
    assert {way for shape, way in fastest(timed).items() if shape.startswith(shapes)} == {TORCH}
    broken = [TimedWay("prefill_hit", KVKERNELS, None, "a trial: x")]
    assert fastest(broken) == ALL_KERNELS


async def test_a_worker_uses_torch_for_the_shapes_in_the_file_of_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker uses torch for the shapes that the file of costs says, with several ranks too. Ranks
    get no plans for those shapes, which does not count as a failed kernel.
    """
    make_tiny(tmp_path / "model")
    ways = {shape: TORCH for shape in SHAPES if shape != "decode_shared"}
    steps = StepSettings(kernel_costs=written(tmp_path, ways=ways))
    prompt = list(range(30, 60))
    for ranks in ((1, 1), (2, 1)):
        model = loaded(tmp_path / "model", attention=KVKERNELS, steps=steps, ranks=ranks)
        try:
            told = "; ".join(f"{shape} by torch" for shape in ways)
            assert str(model.attention) == f"kvkernels; {told.replace('decode_shared', '')}"
            with failing("append", 1 << 20, ValueError()) as calls:  # counts them
                async with computing(model) as worker:
                    wanted = Reference(tmp_path / "model").greedy(prompt, 9)
                    assert await ids_of(worker, greedy(prompt, 9)) == wanted
            assert model.model.fell_back == {}
            assert set(calls) == {"append"}
        finally:
            model.model.close()


def test_kernels_compute_the_shapes_of_an_unavailable_flashinfer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny(tmp_path / "model")
    steps = StepSettings(kernel_costs=written(tmp_path, ways={"decode_long": FLASHINFER}))
    model = loaded(tmp_path / "model", attention=KVKERNELS, steps=steps)
    assert model.attention == KernelChoice(KVKERNELS)
    assert "the kernels compute what FlashInfer was faster at, because of a CPU" in caplog.text


ONE_KERNEL = "a device that has one kernel of prefill"


@pytest.mark.parametrize("costs", [NEVER, COSTS])
def test_a_worker_plans_by_the_file_of_costs(costs: Costs, tmp_path: Path) -> None:
    path = written(tmp_path, costs=costs._asdict())
    make_tiny(tmp_path / "model")
    steps = StepSettings(kernel_costs=path)
    model = loaded(tmp_path / "model", attention=KVKERNELS, steps=steps)
    trunk = list(range(200))
    pieces = [Piece([7], 200 * 8, [*trunk, 201 + row]) for row in range(3)]
    saving = flat_batch(pieces, 8, planner=model.planner).saving
    assert saving.shared_prefix_groups == (0 if costs is NEVER else 1)


def test_a_bad_file_of_costs_fails_the_start_before_weights_are_read(
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


def test_the_program_measures_and_writes_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program measures and writes the costs, here of the operator's plain CPU implementation on
    a small grid to save time.
    """
    make_tiny(tmp_path / "model")
    monkeypatch.setattr(calibration, "GRID", FEW)
    out = tmp_path / "costs.json"
    flags = ["calibrate-kernels", str(tmp_path / "model"), "--device", "cpu", "--out", str(out)]
    assert cli.main(flags) == 0
    assert min(read_costs(out, "cpu")) >= 0
    file = json.loads(out.read_text())
    for shape, ways in SHAPES.items():
        rows = {one["way"]: one for one in file["timed_ways"] if one["shape"] == shape}
        assert tuple(rows) == ways
        timed = {way: one["us"] for way, one in rows.items() if one["us"]}
        assert set(timed) == {KVKERNELS, TORCH}
        assert file["ways"][shape] == min(timed, key=lambda way: timed[way])
        reasons = {one["why_not"] for way, one in rows.items() if way not in timed}
        assert reasons <= {"a CPU", "a CPU, which has only Triton's interpreter", ONE_KERNEL}
    said = capsys.readouterr()
    assert "timing 3 of 3" in said.err
    assert re.search(r"^prefill_fresh cudnn         not: a CPU$", said.out, re.M)
    assert "3 requests,  1 prefixes of    16, own    48" in said.out
    assert cli.main([*flags[:-1], str(tmp_path / "none" / "costs.json")]) == 1
    assert cli.main([flags[0], str(tmp_path), *flags[2:]]) == 1
