"""The requests a second that a replay handles on one core, by policy, by length and by pool.

    python -m tests.bench.replay [--policy round_robin ...] [--full] [--runs 3] [--dynamo PYTHON]

First the bench replays the tool-and-agent trace, if it is beside the checkout, or else a generated
one of its size (8 workers, qwen3-32b-h100-tp2, blocks of 512 tokens). It prints the median over the
runs, and the ratio to the first policy. In the same rounds it runs Dynamo's replay of the same
trace with as many workers and blocks, with the PYTHON that has its wheels (in an environment of its
own: `pip install ai-dynamo-runtime`, then `pip install --no-deps ai-dynamo`; without `--dynamo`,
this Python if it has them). Both count the CPU seconds of one call, from the file to the report.

Then it measures the cost of a request at growing numbers of requests and workers, with one load per
worker, each in a process of its own that reports its peak memory. `--full` goes to a million
requests, and `--only-policies` skips this part.

Seconds are CPU seconds: a replay runs on one core and never waits, so on an idle machine they equal
wall time, and other load does not count.
"""

from __future__ import annotations

import argparse
import gzip
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np

from engine.profiles import profile
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.traces.job import ErrorLog, Job, JobStream
from simulator.traces.spec import WorkloadSpec

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "toolagent_surrogate.jsonl.gz"
PROFILE, BLOCK, WORKERS = "qwen3-32b-h100-tp2", 512, 8
TRACE_REQUESTS, TRACE_RATE_PER_S = 23_608, 6.7
POLICIES = ("round_robin", "least_requests", "kv_prefix", "hybrid")
LONGEST = 1_000_000
DYNAMO_MODES = {"dynamo round_robin": "round_robin", "dynamo kv_router": "kv_router"}
DYNAMO = """
import sys, time
from dynamo.replay import run_trace_replay
trace, mode, workers, block, blocks = sys.argv[1:]
engine = {"block_size": int(block), "num_gpu_blocks": int(blocks)}
began_s = time.process_time()
report = run_trace_replay([trace], extra_engine_args={"engine": engine}, num_workers=int(workers),
    router_mode=mode, trace_block_size=int(block), capture_planner_details=False)
seconds = time.process_time() - began_s
print(report.summary["completed_requests"], seconds)
"""


def made_up(requests: int, rate_per_s: float) -> JobStream:
    """Return prompts of 16 blocks on average, half of which belong to one of 500 shared prefixes,
    with 180 output tokens.
    """

    def jobs() -> Iterator[Job]:
        random, at_s = Random(7), 0.0
        for serial in range(requests):
            at_s += random.expovariate(rate_per_s)
            trunk = min(int(random.paretovariate(0.8)), 500)
            blocks = 2 + min(int(random.expovariate(1 / 14)), 60)
            ids = np.arange(blocks, dtype=np.uint64) + np.uint64((serial + 1) << 16 | 1 << 50)
            ids[: blocks // 2] = np.arange(blocks // 2, dtype=np.uint64) + np.uint64(trunk << 16)
            output = 1 + min(int(random.expovariate(1 / 180)), 2000)
            yield Job(int(at_s * 1e9), blocks * BLOCK, output, ids)

    return JobStream("made up", BLOCK, jobs(), requests, ErrorLog("-"), "made up", lambda: 0.0)


def requests_per_s(policy: str, requests: int, workers: int) -> float:
    """Return the requests a second of one replay; `requests` 0 selects the trace."""
    setup = Setup(WorkloadSpec(str(TRACE)), policy, (WorkerGroup(workers, PROFILE),))
    stream = made_up(requests, workers * TRACE_RATE_PER_S / WORKERS) if requests else None
    result = replay(setup, stream=stream, clock=process_time)
    return len(result.table) / result.wall_s


def by_policy(policies: list[str], runs: int, dynamo: str | None) -> None:
    """Print the speed of each policy; policies run in turn, so that noise affects all of them."""
    requests = 0 if TRACE.exists() else TRACE_REQUESTS
    print(f"{TRACE.name if not requests else 'made-up trace'}, {WORKERS} workers, {PROFILE}")
    modes = list(DYNAMO_MODES) if dynamo and not requests else []
    speeds: dict[str, list[float]] = {name: [] for name in [*policies, *modes]}
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"  # Dynamo reads no gzip
        if modes:
            plain.write_bytes(gzip.decompress(TRACE.read_bytes()))
        for _ in range(runs):
            for policy in policies:
                speeds[policy].append(requests_per_s(policy, requests, WORKERS))
            for mode in modes:
                assert dynamo is not None
                speeds[mode].append(dynamo_requests_per_s(dynamo, DYNAMO_MODES[mode], plain))
    first = median(speeds[policies[0]])
    for name, measured in speeds.items():
        speed = median(measured)
        print(f"  {name:20s} {speed:8.0f} requests/s, {speed / first:5.2f} of {policies[0]}")
    if not modes:
        print("  Dynamo's replay is not beside it: no wheel (--dynamo PYTHON), or no trace")


def has_dynamo() -> bool:
    """Return whether this Python has Dynamo's replay."""
    return find_spec("dynamo") is not None and find_spec("dynamo.replay") is not None


def dynamo_requests_per_s(python: str, mode: str, trace: Path) -> float:
    """Return the requests a second of Dynamo's `run_trace_replay`, from the file to its report."""
    blocks = profile(PROFILE).kv_capacity_tokens // BLOCK
    command = [python, "-c", DYNAMO, str(trace), mode, str(WORKERS), str(BLOCK), str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode:
        sys.exit(f"Dynamo's replay failed:\n{done.stderr[-2000:]}")
    requests, seconds = done.stdout.split()[-2:]
    assert int(requests) == TRACE_REQUESTS, f"it completed {requests} of {TRACE_REQUESTS}"
    return TRACE_REQUESTS / float(seconds)


def scaling(full: bool) -> None:
    """Print the microseconds per request and the peak memory of the process, at growing numbers of
    requests and workers.
    """
    lengths = (10_000, 100_000, LONGEST) if full else (10_000, 40_000)
    print("made-up workload, one load per worker; the longest with hybrid only: it takes minutes")
    first: dict[str, float] = {}
    for workers in (8, 64, 256):
        for requests in lengths:
            for policy in ("round_robin", "hybrid")[requests == LONGEST :]:
                command = [sys.executable, "-m", "tests.bench.replay", "--one", policy]
                command += [str(requests), str(workers)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                speed, megabytes = map(float, done.stdout.split())
                cost_us = 1e6 / speed
                ratio = cost_us / first.setdefault(policy, cost_us)
                print(
                    f"  {policy:12s} {requests:9,d} requests, {workers:3d} workers: "
                    f"{cost_us:6.1f} us each, {ratio:5.2f} of the first, {megabytes:5.0f} MiB",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="up to a million requests")
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter with Dynamo's wheel")
    parser.add_argument("--only-policies", action="store_true", help="no scaling")
    parser.add_argument("--one", nargs=3, metavar=("POLICY", "REQUESTS", "WORKERS"))
    args = parser.parse_args()
    if args.one:
        policy, requests, workers = args.one
        speed = requests_per_s(policy, int(requests), int(workers))
        print(speed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    by_policy(args.policy, args.runs, args.dynamo or (sys.executable if has_dynamo() else None))
    if not args.only_policies:
        scaling(args.full)


if __name__ == "__main__":
    main()
