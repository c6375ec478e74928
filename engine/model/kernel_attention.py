"""Attention by the kernels' operators, and the plans that the host makes for them in each step.

On CUDA these are kernels, on CPUs the operators' plain implementations: with the same plans,
buffers and padding, so that everything but the kernels is tried on CPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile

import torch
from torch.nn import functional

from engine.model.attention import Attention, StepAttention, TorchAttention
from engine.model.batch import NOTHING_SAVED, FlatBatch, Plan, Saving, Sizes, Span
from engine.model.kernel_choice import KVKERNELS, TRITON, device_lost
from engine.model.kv_cache import LayerKv
from engine.model.layers import HeadNorms
from engine.model.rope import Rotary
from kvkernels.ops import append as _append  # noqa: F401 - defines the operator
from kvkernels.ops import prefill as prefill_plan
from kvkernels.ops import shared_decode as shared_plan
from kvkernels.ops.prefill import PrefillPlan, plan_prefill, prefill
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import SharedPlan, SharedPlanner, shared_decode, workspace_of

ALIGNED = 4  # words

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelPlanner:
    """Plans steps over `blocks` blocks of `block_size` tokens. Lifetime: worker.

    `shape`: of each rank, with the model's layers; `ranks`: that each have a part of every layer.
    """

    shape: AttentionShape
    blocks: int
    block_size: int
    ranks: int = 1
    costs: Costs | None = None  # None: those predicted
    _shared_steps: SharedPlanner = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = SharedPlanner(self.blocks, self.block_size, self.shape, self.costs)
        object.__setattr__(self, "_shared_steps", steps)

    def __call__(self, spans: Sequence[Span], page_table: torch.Tensor, is_fixed: bool) -> Plan:
        """Raises ValueError for a table with blocks that there are not."""
        requests = len(page_table)
        decodes = requests if is_fixed else len(list(takewhile(lambda one: one[1] == 1, spans)))
        made = Plan(torch.empty(0, dtype=torch.int32))
        if decodes:
            context = torch.zeros(decodes, dtype=torch.int64)  # padding attends to nothing
            context[: len(spans)] = torch.tensor([one[2] for one in spans[:decodes]])
            made = self._shared(context, page_table[:decodes], is_fixed)
        words, counts = made.words, (0, 0)
        if decodes < requests:
            chunks = torch.tensor(spans)
            chunks[:decodes, 1] = 0
            rows = spans[-1][0] + spans[-1][1]
            sizes = self.blocks, self.block_size, self.shape.group
            cut = plan_prefill(chunks, rows, page_table, *sizes, kv_heads=self.shape.kv_heads)
            counts = len(cut.items), len(cut.merge_slots)
            words = torch.cat((words, _aligned(cut.all)))
        return made._replace(words=words, prefill_items=counts[0], prefill_slots=counts[1])

    def _shared(self, context: torch.Tensor, table: torch.Tensor, is_fixed: bool) -> Plan:
        room = None
        if is_fixed:
            sizes = len(table), table.numel() * self.block_size
            room = shared_plan.most_items(*sizes), shared_plan.most_slots(*sizes)
        plan, saving, _ = self._shared_steps.step(context, table, room)
        saved = NOTHING_SAVED
        if saving.shared_prefix_groups:
            saved = Saving(saving.shared_prefix_groups, saving.kv_bytes_saved * self.ranks)
        counts = len(table), len(plan.items), len(plan.merge_slots)
        return Plan(_aligned(plan.all), *counts, saving=saved)


def shared_part(batch: FlatBatch) -> SharedPlan:
    """The plan of the first `batch.sizes.decodes` requests."""
    sizes = batch.sizes
    counts = sizes.decodes, sizes.decode_items, sizes.decode_slots
    return shared_plan.views(batch.plan[: _decode_words(sizes)], *counts)


def prefill_part(batch: FlatBatch) -> PrefillPlan:
    """The plan of the others."""
    sizes = batch.sizes
    first = -(-_decode_words(sizes) // ALIGNED) * ALIGNED
    counts = sizes.tokens, sizes.prefill_items, sizes.prefill_slots
    return prefill_plan.views(batch.plan[first : first + prefill_plan.words(*counts)], *counts)


def _decode_words(sizes: Sizes) -> int:
    if not sizes.decodes:
        return 0
    return shared_plan.words(sizes.decodes, sizes.decode_items, sizes.decode_slots)


def _aligned(words: torch.Tensor) -> torch.Tensor:
    beyond = -len(words) % ALIGNED
    return functional.pad(words, (0, beyond)) if beyond else words


Attend = Callable[[torch.Tensor, LayerKv, torch.Tensor], None]


class KernelAttention:
    """Batches must have a plan of `KernelPlanner`. Raises what the operators raise."""

    fell_back = ""

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """Raises ValueError for a batch without a plan."""
        sizes = batch.sizes
        if not sizes.plan_words:
            raise ValueError("a batch for the kernels needs their plan: lay it out with a planner")
        decodes = sizes.decodes
        run_decodes = _decode_of(batch) if decodes else None
        run_chunks = _prefill_of(batch) if sizes.prefill_items else None

        def attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            norms: HeadNorms,
            layer: LayerKv,
        ) -> torch.Tensor:
            turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            torch.ops.warmroute.append(
                *(q, k, v, rotary.cos, rotary.sin, batch.positions, batch.slots),
                *(norms.q, norms.k, norms.eps, turned, *layer),
            )
            out = torch.empty_like(turned)
            if run_decodes is not None:
                run_decodes(turned[:decodes], layer, out[:decodes])
            if run_chunks is not None:
                run_chunks(turned, layer, out)
            return out

        return attention


def _decode_of(batch: FlatBatch) -> Attend:
    """What attends for the first requests; its workspace is one for all layers."""
    table = batch.page_table[: batch.sizes.decodes]
    plan = shared_part(batch)
    workspace = cache(partial(workspace_of, plan))

    def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
        parts = workspace(q.shape[1], q.shape[2], q.device)
        scale = q.shape[2] ** -0.5
        pages = layer.k, layer.v, table
        shared_decode(q, *pages, plan, scale, out, parts, layer[2:])

    return run


def _prefill_of(batch: FlatBatch) -> Attend:
    """What attends for the other requests; its workspace is one for all layers."""
    plan = prefill_part(batch)
    workspace = cache(partial(workspace_of, plan))

    def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
        parts = workspace(q.shape[1], q.shape[2], q.device)
        pages = layer.k, layer.v, batch.page_table
        prefill(q, *pages, plan, q.shape[2] ** -0.5, out, parts, scales=layer[2:])

    return run


class FallingBack:
    """`first` until it fails, torch from there on. Lifetime: model.

    A launch that fails has computed nothing, and K and V can be written twice: so the layer that
    failed is computed again, and nobody loses a request. What breaks the device is not survived:
    every later call would fail, too.
    """

    def __init__(self, first: Attention) -> None:
        self.fell_back = ""
        self._first, self._torch = first, TorchAttention()

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """A batch without a plan comes from a rank 0 whose kernels have failed."""
        has_plans = isinstance(self._first, KernelAttention)
        if has_plans and not (self.fell_back or batch.sizes.plan_words):
            self._fall_back("rank 0 plans no more steps for the kernels")
        by_torch = cache(partial(self._torch.begin, batch, rotary))
        if self.fell_back:
            return by_torch()
        by_first = self._first.begin(batch, rotary)

        def attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            norms: HeadNorms,
            layer: LayerKv,
        ) -> torch.Tensor:
            if not self.fell_back:
                try:
                    return by_first(q, k, v, norms, layer)
                except torch.OutOfMemoryError:
                    raise  # torch needs more
                except Exception as error:  # Triton's are of no common kind
                    if device_lost(q.device):
                        raise
                    self._fall_back(f"a kernel that failed: {error!s:.300}")
            return by_torch()(q, k, v, norms, layer)

        return attention

    def _fall_back(self, why: str) -> None:
        log.error("attention: torch from here on, because of %s", why)
        self.fell_back = why


def attention_of(backend: str) -> Attention:
    """The backend of that name, one of `kernel_choice`. Raises ImportError without Triton."""
    if backend == KVKERNELS:
        return FallingBack(KernelAttention())
    if backend == TRITON:
        from kvkernels.ops.triton_decode import triton_decode

        return FallingBack(TorchAttention(triton_decode))
    return TorchAttention()
