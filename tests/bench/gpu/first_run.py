"""A GPU's first minutes with the kernels: which are right, how fast, and which the engine takes.

    python tests/bench/gpu/first_run.py [--out FOLDER] [--seconds N] [--only WORDS] [--report]

From a checkout, nothing installed: Python, torch and numpy, and a library of the kernels (one named
by WARMROUTE_CUDA_LIBRARY, or built before; else nvcc builds it). Each step is a process with a
timeout, its result a line of FOLDER/results.jsonl before the next begins. The same command goes on
where the last one ended, --seconds bounds one slice; steps whose process could not run their case
are tried again with --again. Ends with a report, and the exit status 0: all done and right, 1:
something is wrong, 3: steps are left.

Order: the operators' plain implementations on the CPU, the device, the library, numbers (each row
and log-sum-exp against float64 on the CPU; kernels of Hopper last), compute-sanitizer, ceilings,
speed, peers one at a time, ncu, and the tests of tests/kernels on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.bench.gpu import bare

bare.make_importable()

if TYPE_CHECKING:
    from tests.bench.gpu.cases import Case

Line = dict[str, Any]
DONE, LEFT_OVER, WRONG = 0, 3, 1
PREFIX = "first-run-result: "
RESULTS = "results.jsonl"
TRIED_AGAIN = ("failed", "timeout", "skipped")  # with --again
BUILD_S = 1_200
SANITIZER = "compute-sanitizer"
SANITIZED = {  # tool -> kernels whose first small case runs under it
    "memcheck": ("append", "decode", "shared", "prefill_mma", "prefill_wgmma", "copy"),
    "racecheck": ("decode", "shared", "prefill_mma"),
    "initcheck": ("decode", "prefill_wgmma"),
}
PROFILED = ("prefill, 1 x 8k, G 4, wgmma", "decode, 64 x 2k, G 4", "shared prefix 4096, own 256")
TESTED = ("test_cuda_*.py", "test_triton_*.py")
NOT_TESTED = ("build", "emulator", "mutations", "offsets", "plan", "first_run")  # of these files


@dataclass(frozen=True)
class Step:
    """One line of the results: what its process does, under which program, for how long."""

    name: str
    timeout_s: float
    case: Case | None = None
    under: tuple[str, ...] = ()
    lacks: str = ""  # why it cannot be done here


def steps() -> list[Step]:
    """All of a run, in order."""
    from tests.bench.gpu.cases import small_cases, speed_cases

    small, fast = small_cases(), speed_cases()
    made = [Step("cpu", 300), Step("device", 120), Step("library", BUILD_S)]
    made += [Step(f"numbers/{case.name}", 120, case) for case in small]
    made += _sanitized(small)
    made += [Step("ceilings", 120), *(Step(f"speed/{case.name}", 180, case) for case in fast)]
    made += _peers(fast)
    ncu = ("ncu", "--section", "SpeedOfLight", "--section", "Occupancy", "--launch-count", "2")
    lacks = "" if shutil.which("ncu") else "ncu is not on PATH"
    profiled = [case for case in fast if case.name.startswith(PROFILED)]
    made += [Step(f"profile/{case.name}", 300, case, ncu, lacks) for case in profiled]
    return [*made, *_tests()]


def _sanitized(small: list[Case]) -> list[Step]:
    lacks = "" if shutil.which(SANITIZER) else f"{SANITIZER} is not on PATH"
    made = []
    for tool, kernels in SANITIZED.items():
        under = (SANITIZER, "--tool", tool, "--error-exitcode", "9")
        for kernel in kernels:
            case = next(case for case in small if case.kernel == kernel)
            made.append(Step(f"{tool}/{case.name}", 300, case, under, lacks))
    return made


def _peers(fast: list[Case]) -> list[Step]:
    from tests.bench.gpu import peers

    made = []
    for peer in peers.ORDER:
        package = next((one for one in ("flashinfer", "triton") if peer.startswith(one)), "torch")
        lacks = "" if find_spec(package) else f"{package} is not installed"
        for case in fast:
            if peer in peers.names_of(case):
                made.append(Step(f"peer/{case.name}/{peer}", 300, case, lacks=lacks))
    return made


def _tests() -> list[Step]:
    """The emulator's and the interpreter's tests of numbers, by the real library and compiler."""
    folder = bare.ROOT / "tests" / "kernels"
    files = sorted(file for pattern in TESTED for file in folder.glob(pattern))
    made = []
    for file in files:
        needed = ["pytest", "hypothesis"]
        needed += ["msgspec", "safetensors"] if "in_engine" in file.stem else []
        needed += ["triton"] if "triton" in file.stem else []
        lacks = [name for name in needed if find_spec(name) is None]
        why = f"{' and '.join(lacks)} not installed" if lacks else ""
        if not any(word in file.stem for word in NOT_TESTED):
            made.append(Step(f"tests/{file.name}", 600, lacks=why))
    return made


# --- in a step's own process


def compute(step: Step) -> Line:
    """What the step found; raises what it fails with."""
    import torch

    from tests.bench.gpu import ours, peers, timing
    from tests.bench.gpu.cases import small_cases

    kind, case = step.name.partition("/")[0], step.case
    if kind == "cpu":
        plain = [one for one in small_cases() if not one.kernel.startswith("prefill_")]
        return {"cases": {one.name: _errors(ours.made_of(one, 0, "cpu")) for one in plain}}
    if kind == "library":
        from kvkernels.ops.operator import cuda_library

        return {"library": cuda_library().path.name}
    if kind == "device":
        return _device()
    if kind == "ceilings":
        return {"ceilings": timing.ceilings()}
    assert case is not None
    if kind == "numbers":
        return _errors(ours.made_of(case, 0, "cuda"), oracle_on="cpu")
    if kind not in ("speed", "peer"):  # under a tool that judges for itself
        ours.made_of(case, 0, "cuda").run()
        torch.cuda.synchronize()
        return {}
    pools = range(case.pools(torch.cuda.get_device_properties(0).L2_cache_size))
    if kind == "peer":
        peer = step.name.rpartition("/")[2]
        us, how = timing.median_us([peers.run_of(case, peer, seed) for seed in pools])
        return {"us": us, "launched_by": how}
    made = [ours.made_of(case, seed, "cuda") for seed in pools]
    us, how = timing.median_us([one.run for one in made])
    return {"us": us, "launched_by": how, **_errors(made[0])}


def _errors(made: Any, **where: str) -> Line:
    """Of a launch of its own."""
    made.run()
    row, lse = made.errors(**where)
    return {"row_error": row, "lse_error": lse}


def _device() -> Line:
    import torch

    if not torch.cuda.is_available():
        return {"status": "stop", "note": f"no CUDA device (torch {torch.__version__})"}
    found = torch.cuda.get_device_properties(0)
    shared = getattr(found, "shared_memory_per_block_optin", None)
    return {
        "device": found.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": f"{found.major}.{found.minor}",
        "sms": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "shared_bytes_of_cta": shared,
    }


def child(name: str) -> None:
    """Run one step and print its line."""
    step = next(step for step in steps() if step.name == name)
    try:
        found = compute(step)
    except Exception as error:  # noqa: BLE001 - every failure is a result
        found = {"status": "failed", "note": f"{type(error).__name__}: {error!s:.500}"}
    print(PREFIX + json.dumps(found), flush=True)


# --- in the process that drives the steps


def command_of(step: Step) -> list[str]:
    """What runs a step."""
    if step.name.startswith("tests/"):
        file = bare.ROOT / "tests" / "kernels" / step.name.partition("/")[2]
        options = ("-q", "--noconftest", "--import-mode=importlib", "-p", "tests.bench.gpu.bare")
        whole = ("-c", os.devnull, "--rootdir", str(bare.ROOT), str(file))
        return [sys.executable, "-m", "pytest", *options, *whole]
    return [*step.under, sys.executable, str(Path(__file__)), "--step", step.name]


def run_step(step: Step) -> Line:
    """One step in a process of its own, ended with all that it started at its timeout."""
    line: Line = {"step": step.name}
    if step.lacks:
        return {**line, "status": "skipped", "note": step.lacks}
    path = os.pathsep.join([str(bare.ROOT), str(bare.ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "WARMROUTE_KERNEL_TESTS": "cuda"}
    begun = time.monotonic()
    process = subprocess.Popen(
        command_of(step),
        cwd=bare.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=step.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {**line, "status": "timeout", "note": f"nothing within {step.timeout_s:g} s"}
    line["seconds"] = round(time.monotonic() - begun, 1)
    return {**line, **judged(step, process.returncode, output)}


def judged(step: Step, code: int, output: str) -> Line:
    """A status, and what was found: ok, wrong (numbers, a tool's or a test's finding), failed (no
    numbers), stop."""
    from tests.bench.gpu.table import is_right

    told = [line for line in output.splitlines() if line.startswith(PREFIX)]
    found: Line = json.loads(told[-1].removeprefix(PREFIX)) if told else {}
    tail = "\n".join(output.splitlines()[-12:])[-1_500:]
    if step.name.startswith("tests/"):
        return {"status": "ok" if code == 0 else "wrong", "note": tail if code else ""}
    if "status" in found:
        return found
    if code or not told:
        is_finding = bool(step.under) and bool(told)
        return {"status": "wrong" if is_finding else "failed", "note": f"exit {code}: {tail}"}
    if step.name.startswith("profile/"):
        found["note"] = output[-6_000:]
    checked = found.get("cases", {step.name: found})
    return {**found, "status": "ok" if all(map(is_right, checked.values())) else "wrong"}


def kept_lines(path: Path) -> list[Line]:
    """The results so far; the last line of a step counts. A torn last line is left out."""
    lines: dict[str, Line] = {}
    for text in path.read_text().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines[line["step"]] = line
    return list(lines.values())


def hung_kernels(lines: list[Line], todo: list[Step]) -> set[str]:
    """Kernels of which a small case did not end: nothing more is asked of them."""
    late = {line["step"] for line in lines if line["status"] == "timeout"}
    return {s.case.kernel for s in todo if s.case and s.name in late and "numbers/" in s.name}


def another_machine(kept: list[Line], line: Line) -> str:
    """What differs from the machine or library that the results are of; empty: nothing."""
    before = next((one for one in kept if one["step"] == line["step"]), line)
    keys = ("device", "torch", "library")
    return ", ".join(f"{k} {before[k]}" for k in keys if k in before and before[k] != line.get(k))


def drive(out: Path, seconds: float, only: str, again: bool) -> int:
    """Run what is left; the exit status."""
    from tests.bench.gpu.table import report

    out.mkdir(parents=True, exist_ok=True)
    path, deadline = out / RESULTS, time.monotonic() + seconds
    todo, left, why = steps(), 0, ""
    for step in todo:
        lines = kept_lines(path)
        before = next((line for line in lines if line["step"] == step.name), None)
        is_asked = step.name in ("library", "device")  # in every run: are they the same?
        is_tried = before is not None and before["status"] in TRIED_AGAIN
        if (before and not is_asked and not (again and is_tried)) or only not in step.name:
            continue
        if why or time.monotonic() > deadline:
            left, why = left + 1, why or f"{seconds:g} s are over"
            continue
        if step.case and step.case.kernel in hung_kernels(lines, todo):
            line: Line = {"step": step.name, "status": "skipped", "note": "the kernel hung before"}
        else:
            line = run_step(step)
        print(f"{line['status']:8} {step.name}  {_short(line)}", flush=True)
        if is_asked and (other := another_machine(lines, line)):
            print(f"{path} has results of another machine or library ({other}): name another --out")
            return WRONG
        if line["status"] == "stop" or (is_asked and line["status"] != "ok"):
            left, why = left + 1, line["note"]
            continue
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    lines = kept_lines(path)
    (out / "report.md").write_text(report(lines, len(todo)) + "\n")
    print(f"\n{report(lines, len(todo))}\n\nin {out}: {RESULTS}, report.md")
    if left:
        print(f"{left} steps are left: {why}. The same command goes on from here.")
        return LEFT_OVER
    return WRONG if any(line["status"] in ("wrong", "timeout") for line in lines) else DONE


def _short(line: Line) -> str:
    if "us" in line:
        return f"{line['us']:,.1f} us"
    return str(line.get("note", "")).splitlines()[0][:120] if line.get("note") else ""


def main() -> int:
    """One slice of the run, one step of it, or the report alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=bare.ROOT / "build" / "first_run")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no step after these")
    parser.add_argument("--only", default="", help="steps whose names contain this")
    parser.add_argument("--again", action="store_true", help="also what failed or was skipped")
    parser.add_argument("--report", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if lacking := bare.missing():
        print(f"{' and '.join(lacking)} not installed in {sys.executable}: nothing runs without")
        return LEFT_OVER
    if options.step:
        child(options.step)
        return DONE
    if options.report:
        from tests.bench.gpu.table import report

        print(report(kept_lines(options.out / RESULTS), len(steps())))
        return DONE
    return drive(options.out, options.seconds, options.only, options.again)


if __name__ == "__main__":
    sys.exit(main())
