"""Tests and times the kernels in a GPU's first minutes, and says which ones the engine may take.

    python tests/bench/gpu/first_run.py [--out FOLDER] [--seconds N] [--only WORDS] [--report]

It runs from a checkout without an installation and needs Python, torch, numpy and a library of the
kernels (given by WARMROUTE_CUDA_LIBRARY, or built before; else nvcc builds it). Each step is a
process with a timeout, and its result is written as a line of FOLDER/results.jsonl before the next
step begins. The same command continues where the last one ended. --seconds limits one slice: a step
that it cuts off is left for the next. Steps whose process could not run their case are tried again
with --again. The program ends with a report and an exit status: 0 if all is done and right, 1 if
something of ours is wrong or fails, 3 if steps are left.

Order: the operators' plain implementations on the CPU, the device, the library (first if it is
given, which needs no GPU), numbers (each row and log-sum-exp against float64 on the CPU; Hopper's
kernels last), compute-sanitizer, ceilings, speed, other implementations one at a time, ncu, the
tests of tests/kernels on the device, and flex, which compiles for minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.context import ForkProcess
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
BUILD_S, KILLED_S = 1_200, 10
FORK = multiprocessing.get_context("fork")
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
OTHER_DEVICES = "no kernel image"  # CUDA's error for a library that was built for other GPUs
SANITIZER = "compute-sanitizer"
NCU = (
    *("ncu", "--section", "SpeedOfLight", "--section", "Occupancy", "--launch-count", "2"),
    *("--kernel-name-base", "demangled", "--kernel-name", "regex:wr::"),  # inputs are torch's work
    *("--clock-control", "none"),  # other users of the device may set the clocks
)
SANITIZED = {  # tool -> kernels whose first small case runs under it
    "memcheck": ("append", "decode", "shared", "prefill_mma", "prefill_wgmma", "copy"),
    "racecheck": ("decode", "shared", "prefill_mma"),
    "initcheck": ("decode", "prefill_wgmma"),
}
OUR_KERNELS = ("--kernel-name", "kernel_substring=_ZN2wr")  # torch's kernels take long to check
TOOL_OPTIONS = {
    "memcheck": (*OUR_KERNELS, "--report-api-errors", "no"),  # torch makes calls that may fail
    "racecheck": OUR_KERNELS,
    "initcheck": (),  # it must see what torch's kernels write
}
PROFILED = (
    *("prefill, 1 x 8k, G 4, wgmma", "decode, 64 x 2k, G 4"),
    "shared prefix 4096, own 256, batch 64",
)
TESTED = ("cuda/test_*.py",)
NOT_TESTED = ("build", "emulator", "mutations", "offsets", "first_run")  # of these files


@dataclass(frozen=True)
class Step:
    """One step of the run: its name, timeout, case, and the tool that it runs under."""

    name: str
    timeout_s: float
    case: Case | None = None
    under: tuple[str, ...] = ()
    lacks: str = ""  # why the step cannot be done here


def steps() -> list[Step]:
    """Return all steps of a run, in order."""
    from kvkernels.cuda.library import LIBRARY_VARIABLE
    from tests.bench.gpu.cases import small_cases, speed_cases

    small, fast = small_cases(), speed_cases()
    machine = [Step("device", 120), Step("library", BUILD_S)]
    if os.environ.get(LIBRARY_VARIABLE):
        machine.reverse()
    made = [Step("cpu", 300), *machine]
    made += [Step(f"numbers/{case.name}", 60, case) for case in small]
    made += _sanitized(small)
    made += [Step("ceilings", 120), *(Step(f"speed/{case.name}", 180, case) for case in fast)]
    lacks = "" if shutil.which("ncu") else "ncu is not on PATH"
    profiled = [case for case in fast if case.name in PROFILED]
    peers = _peers(fast)
    made += [step for step in peers if not step.name.endswith("/flex")]
    made += [Step(f"profile/{case.name}", 120, case, NCU, lacks) for case in profiled]
    return [*made, *_tests(), *(step for step in peers if step.name.endswith("/flex"))]


def _sanitized(small: list[Case]) -> list[Step]:
    lacks = "" if shutil.which(SANITIZER) else f"{SANITIZER} is not on PATH"
    made = []
    for tool, kernels in SANITIZED.items():
        under = (SANITIZER, "--tool", tool, "--error-exitcode", "9", *TOOL_OPTIONS[tool])
        for kernel in kernels:
            case = next(case for case in small if case.kernel == kernel)
            made.append(Step(f"{tool}/{case.name}", 120, case, under, lacks))
    return made


def _peers(fast: list[Case]) -> list[Step]:
    from tests.bench.gpu import peers

    made = []
    for peer in peers.ORDER:
        package = "flashinfer" if peer.startswith("flashinfer") else "torch"
        lacks = "" if find_spec(package) else f"{package} is not installed"
        for case in fast:
            if peer in peers.names_of(case):
                made.append(Step(f"peer/{case.name}/{peer}", 300, case, lacks=lacks))
    return made


def _tests() -> list[Step]:
    """Return the steps that run the emulator's tests of numbers with the real library and
    compiler.
    """
    folder = bare.ROOT / "tests" / "kernels"
    files = sorted(file for pattern in TESTED for file in folder.glob(pattern))
    made = []
    for file in files:
        needed = ["pytest", "hypothesis"]
        needed += ["msgspec", "safetensors"] if "in_engine" in file.stem else []
        lacks = [name for name in needed if find_spec(name) is None]
        why = f"{' and '.join(lacks)} not installed" if lacks else ""
        if not any(word in file.stem for word in NOT_TESTED):
            made.append(Step(f"tests/{file.relative_to(folder)}", 600, lacks=why))
    return made


# --- in a step's own process


def compute(step: Step) -> Line:
    """Run the step in this process and return its findings; raises the step's error."""
    import torch

    from tests.bench.gpu import ours, peers, timing
    from tests.bench.gpu.cases import small_cases

    kind, case = step.name.partition("/")[0], step.case
    if kind == "cpu":
        plain = [one for one in small_cases() if not one.kernel.startswith("prefill_")]
        return {"cases": {one.name: _errors(ours.made_of(one, 0, "cpu")) for one in plain}}
    if kind == "library":
        from kvkernels.ops.operator import cuda_library

        library = cuda_library()
        limits = {"limits": str(library.device())} if torch.cuda.is_available() else {}
        content = hashlib.sha256(library.path.read_bytes()).hexdigest()[:12]
        return {"library": f"{library.path.name} ({content})", **limits}
    if kind == "device":
        return _device()
    if kind == "ceilings":
        return {"ceilings": timing.ceilings()}
    assert case is not None
    if kind == "numbers":
        return _errors(ours.made_of(case, 0, "cuda"), oracle_on="cpu")
    if kind not in ("speed", "peer"):  # not under a tool that judges by itself
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
    """Run the case's kernel on its inputs and return the errors of the results."""
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


def child(step: Step) -> None:
    """Run one step and print its result line."""
    try:
        found = compute(step)
    except Exception as error:  # noqa: BLE001 - every failure is a result
        status = "stop" if OTHER_DEVICES in str(error) else "failed"
        found = {"status": status, "note": f"{type(error).__name__}: {error!s:.500}"}
    os.write(1, f"\n{PREFIX}{json.dumps(found)}\n".encode())


def in_process(step: Step, output: int) -> None:
    """Run a step in its forked process, so that torch, which takes seconds, is imported only once.

    If the step is a program, that program replaces the process.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)  # so as not to disturb the next run
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(bare.ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(bare.ROOT), str(bare.ROOT / "kernels")])
    os.environ["WARMROUTE_KERNEL_TESTS"] = "cuda"
    if step.under[:1] == (SANITIZER,):  # which knows allocations of CUDA, not those of a cache
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if command := command_of(step):
        os.execvp(command[0], command)
    child(step)


# --- in the process that drives the steps


def command_of(step: Step) -> list[str]:
    """Return the command of a step that is a program, else an empty list."""
    if step.name.startswith("tests/"):
        file = bare.ROOT / "tests" / "kernels" / step.name.partition("/")[2]
        options = ("-q", "--noconftest", "--import-mode=importlib", "-p", "tests.bench.gpu.bare")
        whole = ("-c", os.devnull, "--rootdir", str(bare.ROOT), str(file))
        return [sys.executable, "-m", "pytest", *options, *whole]
    if not step.under:
        return []
    return [*step.under, sys.executable, str(Path(__file__)), "--step", step.name]


def run_step(step: Step, seconds: float = 1e9) -> Line | None:
    """Run one step in its own process and kill it with all its children at its timeout.

    Returns None if the slice ends first, `seconds` from now.
    """
    line: Line = {"step": step.name}
    if step.lacks:
        return {**line, "status": "skipped", "note": step.lacks}
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = FORK.Process(target=in_process, args=(step, output.fileno()))
        process.start()
        code = _exit_code(process, min(step.timeout_s, seconds))
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        _exit_code(process, KILLED_S)
        output.seek(0)
        told = output.read().decode(errors="replace")
    if code is None and seconds < step.timeout_s:
        return None
    if code is None:
        return {**line, "status": "timeout", "note": f"nothing within {step.timeout_s:g} s"}
    line["seconds"] = round(time.monotonic() - begun, 1)
    return {**line, **judged(step, code, told)}


def _exit_code(process: ForkProcess, seconds: float) -> int | None:
    """Return the exit code, or None if the process still runs after `seconds`; `join` would wait
    forever for a program.
    """
    end = time.monotonic() + seconds
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    return process.exitcode


def judged(step: Step, code: int, output: str) -> Line:
    """Return a step's status and findings. The status is ok, wrong (numbers, or a finding of a tool
    or test), failed (no numbers) or stop.
    """
    from tests.bench.gpu.table import is_right

    told = [line for line in output.splitlines() if line.startswith(PREFIX)]
    found: Line = json.loads(told[-1].removeprefix(PREFIX)) if told else {}
    tail = "\n".join(output.splitlines()[-12:])[-1_500:]
    if step.name.startswith("tests/"):
        return {"status": "ok" if code == 0 else "wrong", "note": tail if code else tail[-200:]}
    if "status" in found:
        return found
    if code or not told:
        is_finding = step.under[:1] == (SANITIZER,) and bool(told)
        ended = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return {"status": "wrong" if is_finding else "failed", "note": f"{ended}: {tail}"}
    if step.name.startswith("profile/"):
        found["note"] = output[-6_000:]
    checked = found.get("cases", {step.name: found})
    return {**found, "status": "ok" if all(map(is_right, checked.values())) else "wrong"}


def kept_lines(path: Path) -> list[Line]:
    """Return the results written so far: of each step the last line, without a last line that was
    torn off.
    """
    lines: dict[str, Line] = {}
    for text in path.read_text().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines[line["step"]] = line
    return list(lines.values())


def hung_kernels(lines: list[Line], todo: list[Step]) -> set[str]:
    """Return the kernels of which a small case timed out; the run skips their other steps."""
    late = {line["step"] for line in lines if line["status"] == "timeout"}
    return {s.case.kernel for s in todo if s.case and s.name in late and "numbers/" in s.name}


def asks(step: Step, kernel: str) -> bool:
    """Return whether a step runs `kernel`."""
    if step.case:
        return step.case.kernel == kernel and not step.name.startswith("peer/")
    return step.name.startswith("tests/cuda/") and kernel.removesuffix("_mma") in step.name


def keep(path: Path, line: Line) -> None:
    """Append a line to the results, on a new line if a killed process left an unfinished one."""
    with path.open("ab+") as file:
        is_torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        file.write(b"\n" * is_torn + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def another_machine(kept: list[Line], line: Line) -> str:
    """Return how this machine or library differs from the one that made the results, or "" if they
    are the same.
    """
    before = next((one for one in kept if one["step"] == line["step"]), line)
    keys = ("device", "torch", "library")
    return ", ".join(f"{k} {before[k]}" for k in keys if k in before and before[k] != line.get(k))


def drive(out: Path, seconds: float, only: str, again: bool) -> int:
    """Run the steps that are left, for at most `seconds`; return the program's exit status."""
    from tests.bench.gpu.table import report, short

    out.mkdir(parents=True, exist_ok=True)
    path, deadline = out / RESULTS, time.monotonic() + seconds
    path.touch()
    todo, left, why = steps(), 0, ""
    for number, step in enumerate(todo, 1):
        lines = kept_lines(path)
        before = next((line for line in lines if line["step"] == step.name), None)
        is_asked = step.name in ("library", "device")  # in every run: are they the same?
        is_tried = before is not None and before["status"] in TRIED_AGAIN
        if (before and not is_asked and not (again and is_tried)) or only not in step.name:
            continue
        seconds_left = deadline - time.monotonic()
        if why or seconds_left < 0:
            left, why = left + 1, why or f"{seconds:g} s are over"
            continue
        print(f"{number}/{len(todo)} {step.name}: ", end="", flush=True)
        line: Line | None
        others = [one for one in lines if one is not before]
        if any(asks(step, kernel) for kernel in hung_kernels(others, todo)):
            line = {"step": step.name, "status": "skipped", "note": "the kernel hung before"}
        else:
            line = run_step(step, seconds_left)
        if line is None:
            left, why = left + 1, f"{seconds:g} s are over"
            print("cut off", flush=True)
            continue
        print(f"{line['status']} {short(line)}", flush=True)
        if line["status"] == "ok" and is_asked and (other := another_machine(lines, line)):
            print(f"{path} has results of another machine or library ({other}): name another --out")
            return WRONG
        if line["status"] == "stop" or (is_asked and line["status"] != "ok"):
            left, why = left + 1, line["note"]
            continue
        keep(path, line)
    lines = kept_lines(path)
    (out / "report.md").write_text(report(lines, len(todo)) + "\n")
    print(f"\n{report(lines, len(todo))}\n\nin {out}: {RESULTS}, report.md")
    if left:
        print(f"{left} steps are left: {why}. The same command goes on from here.")
        return LEFT_OVER
    return WRONG if any(map(is_bad, lines)) else DONE


def is_bad(line: Line) -> bool:
    """Return whether the line shows a fault in our code; a tool that does not work on this machine
    is no such fault.
    """
    kind, status = line["step"].partition("/")[0], line["status"]
    if kind in ("peer", "profile"):
        return False
    return status in ("wrong", "timeout") or (status == "failed" and kind not in SANITIZED)


def main() -> int:
    """Run one slice of the steps, one step, or only the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=bare.ROOT / "build" / "first_run")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after these")
    parser.add_argument("--only", default="", help="steps whose names contain this")
    parser.add_argument("--again", action="store_true", help="also what failed or was skipped")
    parser.add_argument("--report", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if lacking := bare.missing():
        print(f"{' and '.join(lacking)} not installed in {sys.executable}: nothing runs without")
        return LEFT_OVER
    if options.step:
        child(next(step for step in steps() if step.name == options.step))
        return DONE
    if options.report:
        from tests.bench.gpu.table import report

        print(report(kept_lines(options.out / RESULTS), len(steps())))
        return DONE
    try:
        return drive(options.out, options.seconds, options.only, options.again)
    except OSError as error:
        print(f"nothing can be kept in {options.out}: {error}")
        return LEFT_OVER


if __name__ == "__main__":
    sys.exit(main())
