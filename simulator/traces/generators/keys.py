"""Kinds of keys that several generators take, and what a generator gives back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from simulator.traces.errors import TraceError
from simulator.traces.job import Job
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.size import Size
from simulator.traces.stream import Stage

MAX_REQUESTS = 1_000_000_000
MAX_CORPUS = 10_000_000  # different prompts, where they are held

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Requests = Annotated[int, Meta(ge=1, le=MAX_REQUESTS)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0)]  # per second; inf: all at once
Ratio = Annotated[float, Meta(ge=0, le=1)]
Shape = Annotated[float, Meta(gt=0)]
Arrivals = Literal["poisson", "even"]


@dataclass(frozen=True, slots=True)
class Made:
    """What a generator was asked for, ready to be gone through once. Lifetime: stream."""

    jobs: Iterator[Job]
    block_tokens: int
    total: int | None
    origin: str  # one line for a report
    stages: tuple[Stage, ...] = ()


def check_prompt(*parts: Size) -> None:
    """Raises `TraceError` when a prompt of these parts may be longer than any may be, or empty."""
    most = sum(part.most for part in parts)
    if most > MAX_PROMPT_TOKENS:
        raise TraceError(f"a prompt of {most} tokens; expected {MAX_PROMPT_TOKENS} at most")
    if not any(part.mean for part in parts):
        raise TraceError("a prompt of no tokens")


def check_corpus(prompts: int) -> None:
    """Raises `TraceError` when more prompts are to be held than can be."""
    if prompts > MAX_CORPUS:
        raise TraceError(f"{prompts} different prompts; expected {MAX_CORPUS} at most")


def check_total(requests: int) -> int:
    """`requests`; raises `TraceError` when there are too many."""
    if requests > MAX_REQUESTS:
        raise TraceError(f"{requests} requests; expected {MAX_REQUESTS} at most")
    return requests
