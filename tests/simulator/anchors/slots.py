"""A closed loop with a fixed number of conversations at a time: when one ends, the next
one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np

from simulator.replay.result import ReplayResult
from simulator.replay.run import replay
from simulator.replay.setup import Setup
from simulator.traces.job import Job, JobStream
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs
from tests.simulator.anchors.runs import Pool


def in_slots(stream: JobStream, slots: int) -> JobStream:
    """Return `stream` with `slots` conversations at a time; the conversations of one slot follow
    one another.
    """
    talks: dict[str | int, list[Job]] = {}
    for serial, job in enumerate(stream.jobs):
        talks.setdefault(serial if job.session is None else job.session, []).append(job)

    def jobs() -> Iterator[Job]:
        for serial, turns in enumerate(talks.values()):
            for turn, job in enumerate(turns):
                think_ns = job.think_ns if turn else 0
                yield msgspec.structs.replace(
                    job, session=f"slot {serial % slots}", at_ns=0, think_ns=think_ns
                )

    return replace(stream, jobs=jobs(), stages=())


@cache
def held(source: str, policy: str, pool: Pool, slots: int) -> ReplayResult:
    """Replay `source` in a closed loop of `slots` conversations at a time."""
    spec = WorkloadSpec(source)
    setup = Setup(spec, policy, (pool.group,), 16, closed_loop=True)
    return replay(setup, stream=in_slots(open_jobs(spec, 0), slots))


def per_second(found: ReplayResult, column: str) -> float:
    """Return the tokens per second (in the named column) of the requests that end in the middle
    half of the run.
    """
    table = found.table
    start, end = (int(found.simulated_ns * share) for share in (0.25, 0.75))
    first = int(table.arrival_ns.min())
    ends = (table.finish_ns - first >= start) & (table.finish_ns - first < end)
    return float(np.sum(getattr(table, column)[ends], dtype=np.int64)) * 1e9 / (end - start)
