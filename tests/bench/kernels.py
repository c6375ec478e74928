"""The CUDA kernels beside their bars, the device's own ceilings and peers, in one run.

    python -m tests.bench.kernels --device cuda [--json] [--samples N] [--only WORDS]

Medians of CUDA events over N runs (short kernels as a replayed graph), inputs in turn so that none
is still in L2, random numbers, errors against float64. Without a GPU it says so, shows what it
would measure, and ends well.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from datetime import date

import torch

from kvkernels.cuda.library import LaunchError, RefusedError
from tests.bench.gpu import ours, peers
from tests.bench.gpu.cases import Attention, Blocks, Case, Linear, all_cases
from tests.bench.gpu.table import Result, as_json, markdown
from tests.bench.gpu.timing import SAMPLES, ceilings, median_us


def attention(case: Case, shape: Attention, pools: int, samples: int) -> Result:
    """Ours and the peers on the same batches."""
    result = Result(case)
    batches = [ours.batch_of(shape, seed) for seed in range(pools)]
    own = {"prefill": ours.prefill_run, "shared": ours.shared_run}
    runs = [own.get(case.kernel, ours.decode_run)(batch) for batch in batches]
    result.us = median_us(runs, samples)
    check = ours.prefill_error if case.kernel == "prefill" else ours.decode_error
    result.error = check(batches[0])
    if case.kernel == "shared":
        plain = [ours.decode_run(batch) for batch in batches]
        result.others["plain"] = median_us(plain, samples)
    if case.kernel == "prefill":
        ways_of_prefill(result, batches, samples)
    for name, found in peers.runs_of(case.kernel, batches):
        try:
            if isinstance(found, str):
                result.notes.append(found)
            else:
                result.others[name] = median_us(found, samples)
        except peers.FAILURES as error:
            result.notes.append(f"{name}: {type(error).__name__}: {error!s:.120}")
    return result


def ways_of_prefill(result: Result, batches: list[ours.Batch], samples: int) -> None:
    """Both kernels side by side, and the worst error of all."""
    for way in ours.PREFILL_WAYS:
        try:
            runs = [ours.prefill_run(batch, way) for batch in batches]
            result.others[way] = median_us(runs, samples)
        except (RefusedError, LaunchError) as error:
            result.notes.append(f"{way}: {error}")
            continue
        errors = (result.error or 0.0, ours.prefill_error(batches[0]))
        result.error = max(errors, key=lambda error: (error != error, error))


def other(case: Case, pools: int, samples: int) -> Result:
    """What has no peer: copies, append, linear layers beside torch's product of wide weights."""
    shape, made = case.shape, []
    for seed in range(pools):
        if isinstance(shape, Linear):
            made.append(ours.linear_run(shape, seed))
        elif isinstance(shape, Blocks):
            made.append(ours.copy_run(shape, seed))
        else:
            made.append(ours.append_run(shape, seed))
    worst = max((error for _, error in made), key=lambda error: (error != error, error))
    result = Result(case, median_us([run for run, _ in made], samples), worst)
    if isinstance(shape, Linear):
        x = torch.randn(shape.rows, shape.inputs, device="cuda", dtype=torch.bfloat16)
        wide = [
            torch.randn(shape.channels, shape.inputs, device="cuda", dtype=torch.bfloat16)
            for _ in range(pools)
        ]
        runs = [lambda w=w: torch.nn.functional.linear(x, w) for w in wide]
        result.others["torch_bf16"] = median_us(runs, samples)
    return result


def measure(cases: list[Case], samples: int) -> list[Result]:
    """Case by case; what one leaves in memory is given back before the next."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    results: list[Result] = []
    for case in cases:
        pools = case.pools(l2)
        shape = case.shape
        if isinstance(shape, Attention) and case.kernel != "append":
            result = attention(case, shape, pools, samples)
        else:
            result = other(case, pools, samples)
        if isinstance(shape, Attention) and shape.stored != "bfloat16":
            wide = replace(shape, stored="bfloat16")
            same = (r.us for r in results if r.case.kernel == case.kernel and r.case.shape == wide)
            if plain := next(same, None):
                result.others["bf16"] = plain
        results.append(result)
        print(f"{case.name}: {result.us or float('nan'):,.1f} us", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    return results


def planned(cases: list[Case]) -> str:
    """What would be measured, one line a case."""
    lines = []
    for case in cases:
        bars = "; ".join(map(str, case.bars)) or "no bar"
        size = f"{case.bytes / 1e6:,.1f} MB, {case.flops / 1e9:,.1f} GFLOP"
        lines.append(f"  {case.name:32} {size:32} {case.pools()} inputs in turn; {bars}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or say why not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda"], default="cuda")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="at least 50 for a table")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}): nothing is measured. The plan:")
        print(planned(cases))
        return
    device, cuda = torch.cuda.get_device_name(0), torch.version.cuda
    head = f"{device}, {date.today()}, torch {torch.__version__}, CUDA {cuda}"
    limits = ceilings(options.samples)
    head += "".join(f", {name} {value / 1e12:.2f} T/s" for name, value in limits.items())
    results = measure(cases, options.samples)
    print((as_json if options.json else markdown)(results, limits, head))


if __name__ == "__main__":
    main()
