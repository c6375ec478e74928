"""A program that prints the report hashes of replays with everything that could differ between
machines.

    python -m tests.simulator.hashed FAULTS [REQUESTS]

It prints one JSON object: the hash of each replay by the replay's name, and the versions of Python
and numpy. FAULTS is a file that the program writes; REQUESTS is the number of requests of each
workload (default 300).
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import numpy as np

from policies import POLICIES
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup, World
from simulator.report.row import summarize
from simulator.traces.spec import WorkloadSpec

SAMPLE = Path(__file__).parents[2] / "simulator" / "data" / "conversation_sample.jsonl.gz"
PROFILE = "llama-3.1-8b-h100"
FAULTS = """\
- {at_s: 5, worker: 1, do: die}
- {at_s: 9, do: join}
- {at_s: 11, worker: 0, do: hang, for_s: 4}
- {at_s: 14, worker: 1, do: restart}
- {at_s: 16, worker: 2, do: slow, factor: 2.5}
"""
GENERATORS = ("gen:zipf", "gen:sessions", "gen:inference_perf", "gen:sglang", "gen:vllm")


def setups(faults: Path, requests: int) -> dict[str, Setup]:
    """Return set-ups with every policy, every generator, late and lost events, faults, and a queue
    at the router.
    """

    def setup_with(
        policy: str, source: str = str(SAMPLE), speed: float = 6.0, **more: object
    ) -> Setup:
        pool = (
            WorkerGroup(2, PROFILE, kv_tokens=40_000),
            WorkerGroup(2, PROFILE, speed=0.7, kv_tokens=30_000),
        )
        workload = WorkloadSpec(source, requests=requests, speed=speed, spread_s=1.0)
        return Setup(workload, policy, pool, **more)  # type: ignore[arg-type]

    lossy = World(event_loss=0.05, event_lag_ms=20.0, report_lag_ms=150.0)
    return {
        **{policy: setup_with(policy) for policy in POLICIES},
        **{name: setup_with("hybrid", name, seed=3) for name in GENERATORS},
        "softmax": setup_with("hybrid?temperature=0.3", seed=11),
        "held": setup_with("hybrid?max_requests=3", speed=20.0),
        "lossy": setup_with("llm_d", world=lossy),
        "faults": setup_with("kv_load", faults=str(faults)),
        "closed loop": setup_with("hybrid", "gen:sessions", closed_loop=True),
        "small blocks": setup_with("hybrid", block_size=32),
    }


def main(faults: str, requests: str = "300") -> None:
    """Print the report hashes of all replays as JSON."""
    Path(faults).write_text(FAULTS, encoding="utf-8")
    hashes = {
        name: summarize(replay(setup)).report_hash
        for name, setup in setups(Path(faults), int(requests)).items()
    }
    json.dump(
        {"python": platform.python_version(), "numpy": np.__version__, "hashes": hashes},
        sys.stdout,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
