"""`tests/bench/gpu/first_run.py` on a bare machine, and what it makes of steps that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from tests.bench.gpu import first_run, table
from tests.bench.gpu.cases import small_cases, speed_cases
from tests.bench.gpu.first_run import Step, judged, kept_lines, run_step, steps
from tests.kernels.emulated import emulate, moved, needs_compiler
from tests.kernels.prefill_cases import case

ROOT = Path(__file__).parents[2]
# torch, what it wants on import, and numpy.
CARRIED = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py")
CARRIED += ("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in an environment of its own that has torch and numpy."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False)
    packages = next((home / "lib").glob("python*")) / "site-packages"
    for found in (Path(torch.__file__).parents[1] / name for name in CARRIED):
        if found.exists():
            (packages / found.name).symlink_to(found)
    return home / "bin" / "python"


def run(python: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script as a stranger runs it: from elsewhere, without compilers or settings of ours."""
    return subprocess.run(
        [python, ROOT / "tests" / "bench" / "gpu" / "first_run.py", "--out", out, *options],
        cwd=out.parent,
        env={"PATH": os.fspath(out.parent), "HOME": os.fspath(out.parent)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run it all")
def test_a_bare_machine_runs_what_a_cpu_can_and_names_what_is_missing(
    bare_python: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    done = run(bare_python, out)
    assert done.returncode == first_run.LEFT_OVER, done.stderr
    assert "no CUDA device" in done.stdout
    (cpu,) = kept_lines(out / "results.jsonl")
    assert cpu["step"] == "cpu"
    assert cpu["status"] == "ok"
    kernels = {name.partition(",")[0] for name in cpu["cases"]}
    assert kernels == {"append", "decode", "shared", "prefill", "w8a16", "copy"}
    assert "prefill_wgmma | not yet run" in (out / "report.md").read_text()
    again = run(bare_python, out)
    assert again.returncode == first_run.LEFT_OVER
    assert "ok       cpu" not in again.stdout, "what is done is not done again"


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    done = run(tmp_path / "empty" / "bin" / "python", tmp_path / "results")
    assert done.returncode == first_run.LEFT_OVER
    assert "torch and numpy not installed" in done.stdout


def test_a_step_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(first_run, "command_of", lambda step: sleeping)
    line = run_step(Step("numbers/stuck", 0.2))
    assert line == {
        "step": "numbers/stuck",
        "status": "timeout",
        "note": "nothing within 0.2 s",
    }


def test_what_a_process_said_becomes_a_status() -> None:
    def of(found: dict[str, float] | None, code: int = 0, under: tuple[str, ...] = ()) -> str:
        output = "" if found is None else first_run.PREFIX + json.dumps(found)
        return str(judged(Step("numbers/x", 1, under=under), code, output)["status"])

    assert of({"row_error": 1e-3, "lse_error": 0.0}) == "ok"
    assert of({"row_error": float("nan"), "lse_error": 0.0}) == "wrong"
    assert of({"row_error": 1e-3, "lse_error": 1.0}) == "wrong"
    assert of(None, -11) == "failed"
    assert of({}, 9, under=("compute-sanitizer",)) == "wrong"
    assert of(None, 9, under=("compute-sanitizer",)) == "failed"
    assert judged(Step("tests/x", 1), 1, "1 failed")["status"] == "wrong"


def test_a_torn_line_is_left_out_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"step": "a", "status": "failed"}\n{"step": "a", "status": "ok"}\n{"st')
    assert kept_lines(path) == [{"step": "a", "status": "ok"}]


def test_steps_have_names_of_their_own_and_hopper_comes_last() -> None:
    names = [step.name for step in steps()]
    assert len(set(names)) == len(names)
    numbers = [name for name in names if name.startswith("numbers/")]
    assert "prefill_wgmma" in numbers[-1]
    assert names.index("device") < names.index(numbers[0]) < names.index("ceilings")


def right(case_names: list[str]) -> dict[str, table.Line]:
    return {f"numbers/{name}": {"status": "ok"} for name in case_names}


def test_a_report_tells_what_the_engine_takes() -> None:
    cases = small_cases()
    lines = right([one.name for one in cases])
    assert table.engine_takes(table.right_kernels({})) == ("not known before all kernels have run")
    assert "wgmma (on Hopper)" in table.engine_takes(table.right_kernels(lines))
    hopper = next(one for one in cases if one.kernel == "prefill_wgmma")
    lines[f"numbers/{hopper.name}"] = {"status": "timeout"}
    assert table.engine_takes(table.right_kernels(lines)).endswith("prefill by mma")
    shared = next(one for one in cases if one.kernel == "shared")
    lines[f"numbers/{shared.name}"] = {"status": "wrong"}
    assert table.engine_takes(table.right_kernels(lines)) == "torch, because of shared"


def test_figures_come_of_medians_and_ceilings() -> None:
    one = next(case for case in speed_cases() if case.kernel == "shared")
    assert isinstance(one.shape, table.Attention)
    lines: dict[str, table.Line] = {
        "ceilings": {"ceilings": {"copy": 2e12, "stream": 2e12, "matmul": 5e14}},
        f"speed/{one.name}": {"us": 40.0},
        f"speed/{one.name}, plain": {"us": 100.0},
        f"peer/{one.name}/flashinfer": {"us": 30.0},
    }
    found = table.figures(one, lines)
    assert found["times_plain"] == pytest.approx(2.5)
    assert found["times_flashinfer"] == pytest.approx(0.75)
    assert found["of_ceiling"] == pytest.approx(one.bytes / 40e-6 / 2e12)
    assert found["of_ideal"] == pytest.approx(one.shape.ideal_us(2e12, 5e14) / 40.0)
    assert "times_plain >= 1: met" in table.row_of(one, lines)
    assert "times_flashinfer >= 1.3: MISSED" in table.row_of(one, lines)


@needs_compiler
def test_arguments_move_with_their_strides_and_gaps() -> None:
    made, other = case([(5, 30), (40, 9)]), case([(5, 30), (40, 9)])
    emulate("prefill", *made.arguments())
    with moved(other.arguments(), "cpu") as given:
        assert [x.stride() for x in given if isinstance(x, torch.Tensor)] == [
            x.stride() for x in other.arguments() if isinstance(x, torch.Tensor)
        ]
        emulate("prefill", *given)
    assert torch.equal(other.out.nan_to_num(), made.out.nan_to_num())
