"""Steps of a model in stages: each stage works on another step than the others at the same time.

The runner keeps as many steps in flight as there are stages, and no request is in two of them: so
all tokens of a step are known on the host when it is laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.model.batch import FlatBatch, Planner, flat_batch
from engine.model.int8_choice import Int8Choice
from engine.model.placed import is_cuda
from engine.runner.block_rows import BlockRows
from engine.runner.compute import Chosen, Launched
from engine.runner.token_pool import TokenPool
from engine.runner.work import LaidOut, Work, work_of
from engine.sampling.torch_sampler import Sampler
from engine.scheduler_types import Step


class Staged(Protocol):
    """A model in stages, seen from its first."""

    def begin(self, batch: FlatBatch) -> Callable[[], torch.Tensor]:
        """Compute the first stage; what waits for the last one and gives the logits."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that the later stages compute. Lifetime: step."""

    work: Work
    sampler: Sampler
    end: Callable[[], torch.Tensor]
    stream: torch.cuda.Stream | None

    def wait(self) -> list[Chosen]:
        """Waits, and samples; beside the first stage's next step, so on a stream of its own."""
        with torch.cuda.stream(self.stream):
            logits, work = self.end(), self.work
            if not work.sampled:
                return []
            made = self.sampler.sample(logits, work.sampled, work.positions)
            return Launched(work.sampled, made).wait()


class StagedCompute:
    """As `compute.Compute`, for a model in stages. Lifetime: worker."""

    is_later = True  # what is launched is waited for in another thread

    def __init__(
        self,
        model: Staged,
        sampler: Sampler,
        rows: int,
        block_size: int,
        device: str = "cpu",
        planner: Planner | None = None,
        int8: Int8Choice | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._pool = TokenPool(rows)  # never read
        self._blocks = BlockRows(rows)
        self._block_size = block_size
        self._device = device
        self._planner, self._int8 = planner, int8
        self._stream: torch.cuda.Stream | None = None
        if is_cuda(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """First in each of the threads."""
        if is_cuda(self._device):
            torch.cuda.set_device(self._device)

    def lay_out(self, step: Step) -> LaidOut:
        """`step`, just scheduled, as the model takes it."""
        work = work_of(step, self._pool, self._blocks)
        batch = flat_batch(work.pieces, self._block_size, self._device, self._planner)
        return LaidOut(work, batch, int8=self._int8)

    def launch(self, step: LaidOut) -> Begun:
        """Compute the first stage after all steps before it. Raises what the model raises."""
        end = self._model.begin(step.batch.on(self._device))
        return Begun(step.work, self._sampler, end, self._stream)
