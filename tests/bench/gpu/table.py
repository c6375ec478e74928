"""Writes the results as a report: which kernels are right, each case with its figures and bounds,
and which kernels the engine takes.
"""

from __future__ import annotations

from typing import Any

from tests.bench.gpu.cases import Attention, Case, small_cases, speed_cases

Line = dict[str, Any]
MAX_ROW_ERROR = 1e-2  # of bf16 against float64, as a norm
MAX_LSE_ERROR = 2e-3
VERDICTS = {True: "met", False: "MISSED", None: "not measured"}
OUTPUTS = ("tests", "memcheck", "racecheck", "initcheck", "profile")  # notes: a program's output
ENGINE = ("append", "shared", "prefill_mma")  # without one of these attention is by torch


def is_right(found: Line) -> bool:
    """Return whether the errors are within their bounds; a NaN is not."""
    row, lse = found.get("row_error", 0.0), found.get("lse_error", 0.0)
    return bool(row < MAX_ROW_ERROR and lse < MAX_LSE_ERROR)


def figures(case: Case, lines: dict[str, Line]) -> dict[str, float]:
    """Return all figures that follow from the medians measured so far."""
    us = lines.get(f"speed/{case.name}", {}).get("us")
    if us is None:
        return {}
    found = {"us": us, "tb_s": case.bytes / us / 1e6, "tflops": case.flops / us / 1e6}
    if limits := lines.get("ceilings", {}).get("ceilings"):
        done = case.flops if case.ceiling == "matmul" else case.bytes
        found["of_ceiling"] = done / us * 1e6 / limits[case.ceiling]
        if case.kernel == "shared" and isinstance(case.shape, Attention):
            found["of_ideal"] = case.shape.ideal_us(limits["stream"], limits["matmul"]) / us
    for name, other in peers_us(case, lines).items():
        found[f"times_{name}"] = other / us
    return found


def peers_us(case: Case, lines: dict[str, Line]) -> dict[str, float]:
    """Return the microseconds of the other implementations and of the cases that this
    case names.
    """
    first = f"peer/{case.name}/"
    names = {name.removeprefix(first): name for name in lines if name.startswith(first)}
    names |= {name: f"speed/{other}" for name, other in case.beside}
    return {name: lines[at]["us"] for name, at in names.items() if "us" in lines.get(at, {})}


def right_kernels(lines: dict[str, Line]) -> dict[str, str]:
    """Return the state of each kernel: right, WRONG, or the number of its cases that have not been
    run.
    """
    told = {}
    cases = small_cases()
    for kernel in dict.fromkeys(case.kernel for case in cases):
        names = [f"numbers/{case.name}" for case in cases if case.kernel == kernel]
        states = [lines.get(name, {}).get("status", "not yet run") for name in names]
        bad = [name for name, state in zip(names, states, strict=True) if state != "ok"]
        is_open = all(state in ("ok", "not yet run") for state in states)
        if not bad:
            told[kernel] = f"right ({len(names)} cases)"
        elif is_open:
            told[kernel] = f"not yet run ({len(bad)} of {len(names)} cases)"
        else:
            notes = [f"{name}: {lines[name]['status']}" for name in bad if name in lines]
            told[kernel] = "WRONG: " + "; ".join(notes)
    return told


def engine_takes(told: dict[str, str]) -> str:
    """Return which kernels `attention_backend: auto` chooses; the engine tries each kernel once at
    its start.
    """
    if any(state.startswith("not yet") for state in told.values()):
        return "not known before all kernels have run"
    wrong = [name for name in ENGINE if not told[name].startswith("right")]
    if wrong:
        return f"torch, because of {', '.join(wrong)}"
    is_right = told["prefill_wgmma"].startswith("right")
    return f"kvkernels, prefill by {'wgmma (on Hopper)' if is_right else 'mma'}"


def row_of(case: Case, lines: dict[str, Line]) -> str:
    """Return a case's line of the table."""
    line, found = lines.get(f"speed/{case.name}", {}), figures(case, lines)
    columns = [case.name]
    forms = {"us": ",.1f", "tb_s": ".2f", "tflops": ",.0f", "of_ceiling": ".0%"}
    columns += [f"{found[name]:{form}}" if name in found else "" for name, form in forms.items()]
    columns.append(f"{line['row_error']:.1e}" if "row_error" in line else "")
    columns.append(", ".join(f"{name} {us:,.1f}" for name, us in peers_us(case, lines).items()))
    told = [f"{bar}: {VERDICTS[bar.met(found)]}" for bar in case.bars]
    if line.get("status", "ok") != "ok":
        told.append(f"{line['status']}: {line.get('note', '')!s:.120}".splitlines()[0])
    return f"| {' | '.join([*columns, '; '.join(told)])} |"


def short(line: Line) -> str:
    """Return a result in a few words; for a tool or a test, the last line of its output."""
    if "us" in line:
        return f"{line['us']:,.1f} us"
    kind, note = line["step"].partition("/")[0], str(line.get("note", "")).strip().splitlines()
    if note and (kind, line["status"]) != ("profile", "ok"):  # a profile's note is a table
        return note[-1 if kind in OUTPUTS else 0][:160]
    if line["status"] == "wrong" and "row_error" in line:
        return f"a row is {line['row_error']:.1e} off, a log-sum-exp {line['lse_error']:.1e}"
    return f"{line['seconds']:g} s" if "seconds" in line else ""


def times(lines: dict[str, Line]) -> list[str]:
    """Return the lines of the table of measured cases, and a line with the number of
    other cases.
    """
    cases = speed_cases()
    begun = {step.split("/")[1] for step in lines if step.startswith(("speed/", "peer/"))}
    made = [row_of(case, lines) for case in cases if case.name in begun]
    if made:
        columns = ("case", "us", "TB/s", "TFLOP/s", "of ceiling", "error", "beside, us", "bars")
        made = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *made, ""]
    left = sum(case.name not in begun for case in cases)
    return [*made, f"Times not measured yet: {left} of {len(cases)} cases."] if left else made


def report(results: list[Line], steps: int) -> str:
    """Return a Markdown report on the `results` of `steps` steps."""
    lines = {line["step"]: line for line in results}
    device, told = lines.get("device"), right_kernels(lines)
    head = "no GPU has been seen: not yet run on a GPU"
    if device:
        head = f"{device['device']}, torch {device['torch']}, CUDA {device['cuda']}"
        head += f", library {lines.get('library', {}).get('library', 'unknown')}"
    limits = lines.get("ceilings", {}).get("ceilings", {})
    head += "".join(f", {name} {value / 1e12:.2f} T/s" for name, value in limits.items())
    made = [f"{head}; {len(lines)} of {steps} steps", "", "| kernel | numbers |", "|---|---|"]
    made += [f"| {kernel} | {state} |" for kernel, state in told.items()]
    made += ["", f"The engine takes: {engine_takes(told)}.", ""]
    made += times(lines)
    others = [line for line in results if line["status"] not in ("ok", "skipped")]
    made += ["", *(f"- {line['step']}: {line['status']}, {short(line)}" for line in others)]
    return "\n".join(made).rstrip()
