"""What is sent and when: a list of jobs with a name, from a trace or from a generator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from simulator.replay.setup import WorkloadSpec
from simulator.traces.generators.prefixes import shared_then_own
from simulator.traces.job import Job
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.open import open_jobs
from simulator.traces.timing import NS

MAX_REQUESTS = 1_000_000


class WorkloadError(ValueError):
    """A workload that cannot be: says which size is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. Lifetime: process (one measurement may use it many times).

    A closed loop (`ends_s` given): a session's turn follows the answer before it and the pause
    between, and none is begun at `ends_s` seconds or later.
    """

    name: str
    jobs: tuple[Job, ...]
    block_tokens: int  # prompt tokens an id of `jobs` stands for
    origin: str  # where it comes from, one line for the report
    ends_s: float | None = None  # None: an open loop, every job at its own time

    def __post_init__(self) -> None:
        if not self.jobs:
            raise WorkloadError(f"workload {self.name}: has no requests")
        if len(self.jobs) > MAX_REQUESTS:
            raise WorkloadError(f"workload {self.name}: more than {MAX_REQUESTS} requests")
        if self.ends_s is not None and not 0 < self.ends_s < math.inf:
            raise WorkloadError(f"workload {self.name}: ends_s {self.ends_s:g}: must be above 0")

    @property
    def span_s(self) -> float:
        """Seconds from the start to the last arrival, or to the end of a closed loop."""
        return self.jobs[-1].at_ns / NS if self.ends_s is None else self.ends_s


def generated_shared_prefix(
    groups: int,
    prompts_per_group: int,
    system_tokens: int,
    question_tokens: int,
    output_tokens: int,
    rate_per_s: float,
    seed: int,
    arrivals: Literal["poisson", "even"] = "poisson",
) -> Workload:
    """`groups` system prompts, each asked `prompts_per_group` distinct questions, shuffled.

    The shape of `generated-shared-prefix` in SGLang's bench_serving (2024), with arrivals. Ids
    stand for blocks of gcd(system, question) tokens, so that the border falls between two ids.
    Raises `WorkloadError` for sizes that are not positive.
    """
    sizes = (groups, prompts_per_group, system_tokens, question_tokens, output_tokens)
    if min(sizes) < 1 or rate_per_s <= 0:
        raise WorkloadError("groups, prompts, tokens and rate must all be above 0")
    if system_tokens + question_tokens > MAX_PROMPT_TOKENS:
        raise WorkloadError(f"a prompt of more than {MAX_PROMPT_TOKENS} tokens")
    if groups * prompts_per_group > MAX_REQUESTS:
        raise WorkloadError(f"more than {MAX_REQUESTS} requests")
    random = Random(seed)
    order = [group for group in range(groups) for _ in range(prompts_per_group)]
    random.shuffle(order)
    block = math.gcd(system_tokens, question_tokens)
    jobs: list[Job] = []
    arrival_s, tokens = 0.0, system_tokens + question_tokens
    for serial, group in enumerate(order):
        at_ns, own = round(arrival_s * NS), groups + serial
        jobs.append(shared_then_own(at_ns, group, system_tokens, own, tokens, output_tokens, block))
        arrival_s += random.expovariate(rate_per_s) if arrivals == "poisson" else 1 / rate_per_s
    origin = (
        f"{groups} x {prompts_per_group} prompts, {system_tokens} shared + {question_tokens} own "
        f"tokens, {output_tokens} output tokens, {arrivals} arrivals at {rate_per_s:g} per second"
    )
    name = "shared_prompt" if groups == 1 else "shared_prompts"
    return Workload(name, tuple(jobs), block, origin)


def opened(
    spec: WorkloadSpec, name: str, origin: str, seed: int = 0, ends_s: float | None = None
) -> Workload:
    """The requests of a trace or generator, held in memory; with `ends_s`, a closed loop.

    Raises `TraceError` for a source that cannot be used, `WorkloadError` for one of too many
    requests.
    """
    stream = open_jobs(spec, seed)
    jobs = tuple(islice(stream.jobs, MAX_REQUESTS + 1))
    return Workload(name, jobs, stream.block_tokens, origin, ends_s)
