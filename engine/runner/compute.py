"""Computes steps on a device in order: it lays out batches, computes logits and samples tokens, for
whole models and for models in stages.

On a GPU nothing in this module waits for launched work, so that a step is launched while the
previous one computes; only `wait` of a launched step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.model.backends import TORCH, FellBack, Int8Choice, device_lost
from engine.model.batch import FlatBatch, Planner, flat_batch, is_cuda
from engine.model.kv_cache import Moves
from engine.runner.graphs import DecodeGraphs, GraphUse
from engine.runner.torch_sampler import NOTHING, Sampled, Sampler, TokenLogprobs
from engine.runner.work import BlockRows, LaidOut, TokenPool, Work, work_of
from engine.scheduler.request import Request
from engine.scheduler.types import Step


class Chosen(NamedTuple):
    """The token of one request in a step; -1 if its logits are not numbers."""

    request: Request
    token: int
    logprobs: TokenLogprobs | None


class Model(Protocol):
    """The model that computes a step."""

    @property
    def fell_back(self) -> FellBack:
        """The parts that torch computes in place of failed kernels, and why."""

    def logits(self, batch: FlatBatch) -> torch.Tensor:
        """Return the logits [S, vocab] of the batch's sample rows; K and V of its tokens are
        stored.
        """

    def move(self, moves: Moves) -> None:
        """Copy blocks in all ranks, as `HostKv.move` does."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was launched, and that may still be computing. Lifetime: step."""

    sampled: list[Request]
    made: Sampled | None = None  # None: a step that stays short of every prompt's end
    event: torch.cuda.Event | None = None  # passed when it has ended

    def tokens(self) -> Mapping[int, int]:
        """Wait for the step, and return its new tokens by request id."""
        if self.made is None:
            return NOTHING
        self._synchronize()
        ids = self.made.ids.tolist()
        return {one.request_id: token for one, token in zip(self.sampled, ids, strict=True)}

    def wait(self) -> list[Chosen]:
        """Wait for the step, and return the token of each sampled request."""
        # Where there is none, too: KV counts as computed from now on, and may be copied.
        self._synchronize()
        if self.made is None:
            return []
        rows = zip(self.sampled, self.made.ids.tolist(), self.made.logprobs, strict=True)
        return [Chosen(*row) for row in rows]

    def _synchronize(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Compute:
    """Computes steps: it joins a model, a sampler, and the tokens that pass from step to step on
    the device.

    Lifetime: worker. The event loop calls `lay_out`, the model's thread `enter` and `launch`.
    `rows` is the number of requests that may run at once. `graphs` compute the decode steps that
    fit them. `planner` makes plans for the model's kernels. `int8` is the backend of products with
    INT8 weights, if there are any.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        rows: int,
        block_size: int,
        device: str = "cpu",
        graphs: DecodeGraphs | None = None,
        planner: Planner | None = None,
        int8: Int8Choice | None = None,
    ) -> None:
        self.is_later = is_cuda(device)  # another thread waits for launched steps
        self._model = model
        self._sampler = sampler
        self._pool = TokenPool(rows, device)
        self._blocks = BlockRows(rows)
        self._block_size = block_size
        self._device = device
        self._graphs = graphs
        self._planner, self._int8 = planner, int8
        self._before = Launched([])

    def enter(self) -> None:
        """Prepare the thread that launches steps; call this there first, because events are
        recorded on its device.
        """
        if self.is_later:
            torch.cuda.set_device(self._device)

    def lay_out(self, step: Step) -> LaidOut:
        """Return `step`, which was just scheduled, in the form that the model takes."""
        work = work_of(step, self._pool, self._blocks)
        graph: GraphUse | None = None
        planner, int8, fell_back = self._planner, self._int8, self._model.fell_back
        if "attention" in fell_back:
            planner = None
        if "int8" in fell_back:
            int8 = Int8Choice(TORCH, fell_back["int8"])
        if self._graphs is not None:
            use = self._graphs.use(work.pieces, bool(step.chunks))
            graph = "fallback" if fell_back else use
            if graph == "hit":
                return LaidOut(work, self._graphs.lay_out(work.pieces), graph, int8)
        batch = flat_batch(work.pieces, self._block_size, self._device, planner)
        return LaidOut(work, batch, graph, int8)

    def lost(self) -> str:
        """After a failed step, return the reason why no step can be computed any more; "" if steps
        still can be. The method waits for launched work.
        """
        return device_lost(self._device)

    def launch(self, step: LaidOut) -> Launched:
        """Compute a step after all steps that were launched before. Raises the errors of
        the model.
        """
        before, self._before = self._before, Launched([])
        work, logits = step.work, self._logits(step.batch)
        made, event = None, None
        if work.sampled:
            logits = logits[: len(work.sampled)]
            sampled = self._sampler.sample(logits, work.sampled, work.positions, before.tokens)
            self._pool.keep(work.rows, sampled.ids)
            made = sampled.fetched()
        if self.is_later:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._before = Launched(work.sampled, made, event)
        return self._before

    def move(self, moves: Moves) -> None:
        """Copy blocks between the cache and host memory; any thread may call this. Raises the
        errors of the model's `move`.
        """
        self._model.move(moves)

    def _logits(self, batch: FlatBatch) -> torch.Tensor:
        # Graphs contain the kernels' launches: once a kernel or a graph has failed, a step that was
        # laid out for a graph runs without it.
        graphs = self._graphs
        if batch.is_fixed and graphs and not graphs.failed and not self._model.fell_back:
            return graphs.logits(batch, self._pool.fill)
        batch = batch.on(self._device)
        self._pool.fill(batch)
        return self._model.logits(batch)


class Staged(Model, Protocol):
    """A model whose layers are divided into stages, as the process of the first stage uses it."""

    def begin(self, batch: FlatBatch) -> Callable[[], torch.Tensor]:
        """Compute the first stage of a step; return a function that waits for the last stage and
        returns the logits.
        """


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose first stage was computed, and which the later stages compute. Lifetime: step."""

    work: Work
    sampler: Sampler
    end: Callable[[], torch.Tensor]
    stream: torch.cuda.Stream | None

    def wait(self) -> list[Chosen]:
        """Wait for the logits and return the sampled tokens. On a GPU this uses a stream of its
        own, so that the first stage can compute the next step meanwhile.
        """
        with torch.cuda.stream(self.stream):
            logits, work = self.end(), self.work
            if not work.sampled:
                return []
            made = self.sampler.sample(logits, work.sampled, work.positions)
            return Launched(work.sampled, made).wait()


class StagedCompute(Compute):
    """Computes steps as `Compute` does, for a model in stages, where every token of a step is known
    before the step is laid out. Lifetime: worker.
    """

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
        super().__init__(model, sampler, rows, block_size, device, None, planner, int8)
        self.is_later = True
        self._stages = model
        self._stream: torch.cuda.Stream | None = None
        if is_cuda(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Prepare a thread for computing; call this first in each thread that computes."""
        if is_cuda(self._device):
            torch.cuda.set_device(self._device)

    def launch(self, step: LaidOut) -> Begun:  # type: ignore[override]
        """Compute the first stage of a step after all steps that were launched before. Raises the
        errors of the model.
        """
        end = self._stages.begin(step.batch.on(self._device))
        return Begun(step.work, self._sampler, end, self._stream)
