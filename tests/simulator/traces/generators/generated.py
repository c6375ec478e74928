"""Makes generated workloads, and computes the share of their tokens that a cache could hit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from simulator.traces.job import Job
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import JobStream, open_jobs


def opened(source: str, seed: int = 1, **more: object) -> JobStream:
    return open_jobs(WorkloadSpec(source, **more), seed)  # type: ignore[arg-type]


def jobs_of(source: str, seed: int = 1, **more: object) -> list[Job]:
    return list(opened(source, seed, **more).jobs)


def ideal_hit_share(jobs: Iterable[Job], block: int) -> float:
    """Return the share of prompt tokens that one unbounded cache would hit."""
    seen: set[int] = set()
    hits = tokens = 0
    for job in jobs:
        ids = job.ids[: job.prompt_tokens // block].tolist()
        hits += block * len(list(itertools.takewhile(seen.__contains__, ids)))
        tokens += job.prompt_tokens
        seen.update(ids, job.answer_ids.tolist())
    return hits / tokens
