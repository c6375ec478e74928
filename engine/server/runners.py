"""What a worker asks of its runner, and the runner that only lets time pass.

The other one, which computes, is `engine.runner`: it needs torch, so only the command line that
was told of a model imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from engine.block_pool import BlockPool
from engine.profiles import profile
from engine.request import Request
from engine.scheduler import Scheduler
from engine.scheduler_types import Output, Step, StepSplit
from engine.server.settings import WorkerSettings
from engine.timed import Clock, LoopClock, TimedRunner

OnStep = Callable[[Step, list[Output], float], None]
OnFailed = Callable[[Sequence[Request], str], None]
MakeRunner = Callable[[BlockPool, OnStep, OnFailed], "Runner"]
NOTHING: Mapping[str, float] = MappingProxyType({})
# What computes a part of the model, and why not the kernels: "attention", "int8" where weights are.
Backends = Mapping[str, tuple[str, str]]
NO_BACKENDS: Backends = MappingProxyType({})


class Logprobs(Protocol):
    """How likely a token was: `TokenLogprobs` of the sampler, seen without torch."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of the chosen token's probability."""
        ...

    @property
    def top(self) -> Sequence[tuple[int, float]]:
        """The likeliest tokens, likeliest first."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """What stands behind a worker's HTTP. Lifetime: process."""

    make_runner: MakeRunner
    computes: bool = False  # tokens are a model's: they may end by themselves, have logprobs
    end_of_text: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # of sampling, by name
    backends: Backends = field(default_factory=lambda: NO_BACKENDS)


class Runner(Protocol):
    """Drives a scheduler, step after step. Lifetime: worker."""

    scheduler: Scheduler
    clock: Clock
    overrun_steps_total: int
    busy_s_total: float
    step_s: float  # the last step
    split: StepSplit  # of the last step

    @property
    def logprobs(self) -> Mapping[int, Logprobs]:
        """Of the last step's tokens, by request id, where they were asked for."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; raises `Refused`."""
        ...

    def cancel(self, request_id: int) -> bool:
        """Forget a request at once; False if it is finished already."""
        ...

    async def run(self) -> None:
        """Run steps until cancelled; rest while there is no request."""
        ...


def timed(settings: WorkerSettings, vocab: int) -> Served:
    """Behind a worker that waits as long as its profile says."""
    name = settings.profile_name
    if name is None:
        raise ValueError("a timed worker needs a profile")

    def make(pool: BlockPool, on_step: OnStep, on_failed: OnFailed) -> Runner:
        return TimedRunner(
            Scheduler(settings.scheduler, pool),
            profile(name).step_time,
            vocab,
            settings.speed,
            on_step,
            LoopClock(),
            on_failed,
        )

    return Served(make)
