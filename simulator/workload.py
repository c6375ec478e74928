"""What is sent and when: a list of rows with a name, from a trace or from a generator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random
from typing import Literal

from simulator.trace import MAX_INPUT_TOKENS, TraceRow

MAX_REQUESTS = 1_000_000


class WorkloadError(ValueError):
    """A workload that cannot be: says which size is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. Lifetime: process (one measurement may use it many times)."""

    name: str
    rows: tuple[TraceRow, ...]
    block_tokens: int  # prompt tokens an id of `rows` stands for
    origin: str  # where it comes from, one line for the report

    def __post_init__(self) -> None:
        if not self.rows:
            raise WorkloadError(f"workload {self.name}: has no requests")
        if len(self.rows) > MAX_REQUESTS:
            raise WorkloadError(f"workload {self.name}: more than {MAX_REQUESTS} requests")

    @property
    def span_s(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.rows[-1].arrival_s

    def faster(self, factor: float) -> Workload:
        """The same requests arriving `factor` times as fast."""
        if factor <= 0:
            raise WorkloadError(f"factor {factor:g}: must be above 0")
        rows = tuple(replace(row, arrival_s=row.arrival_s / factor) for row in self.rows)
        return replace(self, rows=rows)


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
    if system_tokens + question_tokens > MAX_INPUT_TOKENS:
        raise WorkloadError(f"a prompt of more than {MAX_INPUT_TOKENS} tokens")
    if groups * prompts_per_group > MAX_REQUESTS:
        raise WorkloadError(f"more than {MAX_REQUESTS} requests")
    random = Random(seed)
    order = [group for group in range(groups) for _ in range(prompts_per_group)]
    random.shuffle(order)
    block = math.gcd(system_tokens, question_tokens)
    system, question = system_tokens // block, question_tokens // block
    rows: list[TraceRow] = []
    arrival_s = 0.0
    for serial, group in enumerate(order):
        first = groups * system + serial * question
        ids = (*range(group * system, (group + 1) * system), *range(first, first + question))
        rows.append(TraceRow(arrival_s, system_tokens + question_tokens, output_tokens, ids))
        arrival_s += random.expovariate(rate_per_s) if arrivals == "poisson" else 1 / rate_per_s
    origin = (
        f"{groups} x {prompts_per_group} prompts, {system_tokens} shared + {question_tokens} own "
        f"tokens, {output_tokens} output tokens, {arrivals} arrivals at {rate_per_s:g} per second"
    )
    name = "shared_prompt" if groups == 1 else "shared_prompts"
    return Workload(name, tuple(rows), block, origin)


def first_seconds(
    rows: Iterable[TraceRow], seconds: float, name: str, origin: str, block_tokens: int = 512
) -> Workload:
    """The rows of a trace that arrive in its first `seconds`; reads no further than that."""
    kept = tuple(takewhile(lambda row: row.arrival_s < seconds, rows))
    return Workload(name, kept, block_tokens, origin)
