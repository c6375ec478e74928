"""The fleet of a set-up as bounds see it: how fast each kind of worker is, what it can take."""

from __future__ import annotations

from dataclasses import dataclass

from engine.profiles import profile
from engine.scheduler_types import SchedulerSettings
from engine.step_time import StepTime
from simulator.replay.setup import WorkerGroup

DEFAULTS = SchedulerSettings()


@dataclass(frozen=True, slots=True)
class Machine:
    """Workers that are alike. Lifetime: process."""

    count: int
    step_time: StepTime
    speed: float  # every step takes its time divided by this
    blocks: int
    block_size: int
    max_num_tokens: int  # computed in one step
    max_batch_size: int  # sequences in one step
    sequence_tokens: int  # longest prompt plus answer
    prefix_wait_tokens: int  # least prefix in flight that a request waits for; 0: never

    def takes(self, prompt_tokens: int) -> bool:
        """Whether a prompt so long ever gets a token here."""
        return prompt_tokens + 1 <= self.sequence_tokens


def machine(group: WorkerGroup, block_size: int) -> Machine:
    """The workers of `group` with blocks of `block_size` tokens. ValueError: unknown profile."""
    model = profile(group.profile)
    blocks = max(1, (group.kv_tokens or model.kv_capacity_tokens) // block_size)
    model_tokens = group.max_model_tokens or DEFAULTS.max_model_tokens
    batch_size = group.max_batch_size or DEFAULTS.max_batch_size
    return Machine(
        count=group.count,
        step_time=model.step_time,
        speed=group.speed,
        blocks=blocks,
        block_size=block_size,
        max_num_tokens=group.max_num_tokens or max(DEFAULTS.max_num_tokens, batch_size),
        max_batch_size=batch_size,
        sequence_tokens=min(model_tokens, blocks * block_size),
        prefix_wait_tokens=(
            DEFAULTS.prefix_wait_tokens
            if group.prefix_wait_tokens is None
            else group.prefix_wait_tokens
        ),
    )
