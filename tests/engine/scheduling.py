"""Helpers for tests of the scheduler: prompts, tokens that follow from earlier tokens, and a driver
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.block_pool import BlockPool
from engine.scheduler.scheduler import Output, Request, Scheduler, SchedulerSettings, Step
from kvkernels import chain_hashes

SIZE = 4


def array(tokens: Iterable[int]) -> np.ndarray:
    return np.array(list(tokens), dtype=np.int32)


def request(
    request_id: int, prompt: Iterable[int], max_output_tokens: int = 4, **more: object
) -> Request:
    return Request(request_id, array(prompt), max_output_tokens, **more)  # type: ignore[arg-type]


def next_token(of: Request) -> int:
    """Return the next token, a pure function of all tokens before it, like a model's
    greedy choice.
    """
    return int(chain_hashes(of.tokens(0, of.total_tokens), 1)[-1] % np.uint64(50))


def make(blocks: int = 64, size: int = SIZE, **limits: float) -> Scheduler:
    limits = {"max_num_tokens": 64, "max_batch_size": 16, "max_model_tokens": 4096} | limits
    return Scheduler(SchedulerSettings(**limits), BlockPool(blocks, size))  # type: ignore[arg-type]


@dataclass
class Driver:
    """Runs steps of one scheduler, each of which takes `step_s` of virtual time."""

    scheduler: Scheduler
    step_s: Callable[[Step], float] = lambda step: 0.01
    now_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)

    def step(self) -> list[Output]:
        """Run one step; return its outputs, or [] if there is nothing to do yet."""
        for late in self.scheduler.expire(self.now_s):
            assert late.request_id not in self.finished
            self.finished[late.request_id] = "timeout"
        step = self.scheduler.schedule(self.now_s)
        if step is None:
            self.now_s = max(self.now_s, self.scheduler.wake_s or 0.0)
            return []
        self.steps.append(step)
        self.now_s += self.step_s(step)
        tokens = {one.request_id: next_token(one) for one in step.sampled}
        outputs = self.scheduler.complete(step, tokens, self.now_s)
        for output in outputs:
            request_id = output.request.request_id
            assert request_id not in self.finished, f"request {request_id} went on after its end"
            self.outputs.setdefault(request_id, []).append(output.token)
            if output.finished:
                self.finished[request_id] = output.finished
        return outputs

    def run(self, limit: int = 100_000) -> None:
        """Run steps until no request is left."""
        for _ in range(limit):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"{len(self.scheduler.requests)} requests left after {limit} steps")


def alone(prompt: list[int], max_output_tokens: int) -> list[int]:
    """Return the answer that a request gets if nothing else is in the engine."""
    driver = Driver(make(blocks=256))
    driver.scheduler.add(request(0, prompt, max_output_tokens), 0.0)
    driver.run()
    return driver.outputs[0]
