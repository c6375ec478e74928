"""Tests of `tests/bench/gpu/first_run.py` on a bare machine, and of how it handles steps
that fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import torch

from tests.bench.gpu import first_run, table
from tests.bench.gpu.cases import small_cases, speed_cases
from tests.bench.gpu.first_run import Step, command_of, is_bad, judged, kept_lines, run_step, steps
from tests.kernels.cuda.prefill_cases import case
from tests.kernels.emulated import emulate, moved, needs_compiler

ROOT = Path(__file__).parents[3]
# torch, the packages that it imports, and numpy.
CARRIED = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py")
CARRIED += ("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec")
TESTING = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
TESTING += ("hypothesis", "_hypothesis_globals.py", "sortedcontainers")
FIRST_RUN = ROOT / "tests" / "bench" / "gpu" / "first_run.py"


def make_bare_python(home: Path, carried: tuple[str, ...]) -> Path:
    """Make a virtual environment that has only these packages; return its Python interpreter."""
    venv.create(home, with_pip=False)
    packages = next((home / "lib").glob("python*")) / "site-packages"
    for found in (Path(torch.__file__).parents[1] / name for name in carried):
        if found.exists():
            (packages / found.name).symlink_to(found)
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("bare"), CARRIED)


def started(command: list[object], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command as on a stranger's machine: from another folder, without our compilers and
    settings.
    """
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={"PATH": os.fspath(folder), "HOME": os.fspath(folder), **more},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(python: Path, out: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    return started([python, FIRST_RUN, "--out", out, *options], out.parent, **more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run it all")
def test_a_bare_machine_runs_the_cpu_steps_and_lists_missing_parts(
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
    assert " cpu: " not in again.stdout, "what is done is not done again"
    # A file that is no library is reported before a GPU is needed.
    named = str(tmp_path / "libwarmroute.so")
    Path(named).write_text("no library")
    wrong = run(bare_python, out, WARMROUTE_CUDA_LIBRARY=named)
    assert wrong.returncode == first_run.LEFT_OVER
    assert "file too short" in wrong.stdout
    assert "device: " not in wrong.stdout


def test_a_bare_machine_collects_the_gpu_tests(tmp_path: Path) -> None:
    python = make_bare_python(tmp_path / "testing", CARRIED + TESTING)
    names = ("tests/cuda/", "in_engine")  # the latter needs what the engine needs
    own = [one for one in steps() if one.name.startswith(names[0]) and names[1] not in one.name]
    files, options = [command_of(one)[-1] for one in own], command_of(own[0])[1:-1]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    more = {"PYTHONPATH": paths, "WARMROUTE_KERNEL_TESTS": "cuda"}
    done = started([python, *options, "--collect-only", *files], tmp_path, **more)
    assert done.returncode == 0, done.stdout
    assert all(Path(file).name in done.stdout for file in files), done.stdout


def test_a_machine_without_torch_reports_missing_packages(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    done = run(tmp_path / "empty" / "bin" / "python", tmp_path / "results")
    assert done.returncode == first_run.LEFT_OVER
    assert "torch and numpy not installed" in done.stdout


def test_a_step_that_hangs_ends_by_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(first_run, "command_of", lambda step: sleeping)
    line = run_step(Step("numbers/stuck", 0.2))
    assert line == {
        "step": "numbers/stuck",
        "status": "timeout",
        "note": "nothing within 0.2 s",
    }
    assert run_step(Step("numbers/stuck", 60), seconds=0.2) is None  # the slice ended: it is left


def test_a_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """A run that is killed leaves no process behind, which would hold the device and disturb the
    timings of the next run.
    """
    beats = tmp_path / "beats"
    code = f"""
import time
from tests.bench.gpu import first_run
def beat(step):
    while True:
        open({os.fspath(beats)!r}, "a").write(".")
        time.sleep(0.02)
first_run.compute = beat
first_run.run_step(first_run.Step("numbers/x", 60))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    for _ in range(600):
        if beats.exists():
            break
        time.sleep(0.1)
    process.kill()
    process.wait()
    time.sleep(0.2)
    size = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == size


def test_the_error_explains_why_results_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out, why in ((tmp_path / "file" / "x", "Not a directory"), (tmp_path, "No space left")):
        (tmp_path / first_run.RESULTS).unlink(missing_ok=True)
        (tmp_path / first_run.RESULTS).symlink_to("/dev/full")
        monkeypatch.setattr(first_run, "run_step", lambda *_: {"step": "cpu", "status": "ok"})
        monkeypatch.setattr(sys, "argv", ["first_run.py", "--out", str(out), "--only", "cpu"])
        assert first_run.main() == first_run.LEFT_OVER
        assert why in capsys.readouterr().out


def test_the_output_of_a_process_becomes_a_status() -> None:
    def of(found: dict[str, float] | None, code: int = 0, under: tuple[str, ...] = ()) -> str:
        output = "" if found is None else first_run.PREFIX + json.dumps(found)
        return str(judged(Step("numbers/x", 1, under=under), code, output)["status"])

    assert of({"row_error": 1e-3, "lse_error": 0.0}) == "ok"
    assert of({"row_error": float("nan"), "lse_error": 0.0}) == "wrong"
    assert of({"row_error": 1e-3, "lse_error": 1.0}) == "wrong"
    assert of(None, -11) == "failed"
    assert judged(Step("numbers/x", 1), -7, "")["note"] == "SIGBUS: "
    assert of({}, 1, under=("ncu",)) == "failed"
    assert of({}, 9, under=("compute-sanitizer",)) == "wrong"
    assert of(None, 9, under=("compute-sanitizer",)) == "failed"
    assert judged(Step("tests/x", 1), 1, "1 failed")["status"] == "wrong"


def test_a_torn_line_is_skipped_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"step": "a", "status": "failed"}\n{"step": "a", "status": "ok"}\n{"st')
    assert kept_lines(path) == [{"step": "a", "status": "ok"}]
    first_run.keep(path, {"step": "b", "status": "ok"})
    first_run.keep(path, {"step": "c", "status": "ok"})
    assert [line["step"] for line in kept_lines(path)] == ["a", "b", "c"]


def test_a_case_that_hung_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that hung is tried again, and the kernel's other cases are run after it if it ends
    this time.
    """
    ran: list[str] = []
    cases = [step.name for step in steps() if "numbers/prefill_wgmma" in step.name]
    statuses = ["ok"] * len(cases) + ["timeout"] * 2

    def run(step: Step, seconds: float) -> table.Line:
        ran.append(step.name)
        return {"step": step.name, "status": statuses.pop()}

    monkeypatch.setattr(first_run, "run_step", run)
    for again in (False, True, True):
        first_run.drive(tmp_path, 60, "numbers/prefill_wgmma", again)
    assert ran == [ran[0], ran[0], *cases]


def test_failed_and_wrong_steps_make_a_run_bad() -> None:
    def bad(step: str, status: str) -> bool:
        return is_bad({"step": step, "status": status})

    assert bad("numbers/x", "failed")
    assert bad("speed/x", "timeout")
    assert bad("memcheck/x", "wrong")
    assert not bad("memcheck/x", "failed"), "the tool may not work there"
    assert not bad("peer/x/flex", "timeout")
    assert not bad("profile/x", "failed")


def test_a_kernel_that_hung_is_not_run_again() -> None:
    asked = {step.name for step in steps() if first_run.asks(step, "prefill_wgmma")}
    kinds = {name.partition("/")[0] for name in asked}
    assert kinds == {"numbers", "memcheck", "initcheck", "speed", "profile", "tests"}
    assert "tests/cuda/test_prefill_wgmma.py" in asked
    assert "tests/cuda/test_prefill.py" not in asked


def test_step_names_are_unique_and_hopper_comes_last() -> None:
    names = [step.name for step in steps()]
    assert len(set(names)) == len(names)
    numbers = [name for name in names if name.startswith("numbers/")]
    assert "prefill_wgmma" in numbers[-1]
    assert names.index("device") < names.index(numbers[0]) < names.index("ceilings")
    assert names[-1].endswith("/flex"), "what compiles for minutes comes last"


def passed_lines(case_names: list[str]) -> dict[str, table.Line]:
    return {f"numbers/{name}": {"status": "ok"} for name in case_names}


def test_a_report_shows_which_kernels_the_engine_uses() -> None:
    cases = small_cases()
    lines = passed_lines([one.name for one in cases])
    assert table.engine_takes(table.right_kernels({})) == ("not known before all kernels have run")
    assert "wgmma (on Hopper)" in table.engine_takes(table.right_kernels(lines))
    hopper = next(one for one in cases if one.kernel == "prefill_wgmma")
    lines[f"numbers/{hopper.name}"] = {"status": "timeout"}
    assert table.engine_takes(table.right_kernels(lines)).endswith("prefill by mma")
    shared = next(one for one in cases if one.kernel == "shared")
    lines[f"numbers/{shared.name}"] = {"status": "wrong"}
    assert table.engine_takes(table.right_kernels(lines)) == "torch, because of shared"


def test_a_result_has_a_short_summary() -> None:
    def of(step: str, status: str, **found: object) -> str:
        return table.short({"step": step, "status": status, **found})

    assert of("speed/x", "ok", us=1234.5, seconds=2.0) == "1,234.5 us"
    assert of("numbers/x", "ok", seconds=0.5) == "0.5 s"
    wrong = of("numbers/x", "wrong", row_error=0.5, lse_error=0.0)
    assert wrong == "a row is 5.0e-01 off, a log-sum-exp 0.0e+00"
    assert of("numbers/x", "failed", note="LaunchError: no\nmore") == "LaunchError: no"
    assert of("tests/x", "wrong", note="F\n1 failed") == "1 failed"
    assert of("profile/x", "ok", note="a\ntable", seconds=9) == "9 s"


def test_figures_are_computed_from_medians_and_ceilings() -> None:
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
    rows = table.times(lines)
    assert [row.split(" | ")[0] for row in rows[2:4]] == [f"| {one.name}", f"| {one.name}, plain"]
    assert rows[4:] == ["", f"Times not measured yet: {len(speed_cases()) - 2} of 41 cases."]


@needs_compiler
def test_moved_arguments_keep_their_strides_and_gaps() -> None:
    made, other = case([(5, 30), (40, 9)]), case([(5, 30), (40, 9)])
    emulate("prefill", *made.arguments())
    with moved(other.arguments(), "cpu") as given:
        assert [x.stride() for x in given if isinstance(x, torch.Tensor)] == [
            x.stride() for x in other.arguments() if isinstance(x, torch.Tensor)
        ]
        emulate("prefill", *given)
    assert torch.equal(other.out.nan_to_num(), made.out.nan_to_num())
