"""Attention by the kernels' operators, and the plans that the host makes for them in each step.

On CUDA the operators are kernels, on CPUs their plain implementations, with the same plans, buffers
and padding; so everything but the kernels is tested on CPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.model.attention import (
    Attention,
    StepAttention,
    TorchAttention,
    attend_part,
)
from engine.model.backends import (
    ALL_KERNELS,
    CUDNN,
    FLASHINFER,
    KVKERNELS,
    LONG_TOKENS,
    MMA,
    Ways,
    device_lost,
)
from engine.model.batch import (
    NOTHING_SAVED,
    FlatBatch,
    Ints64,
    Plan,
    Saving,
    Sizes,
    Span,
    placed,
)
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
PLANLESS = "a batch for the kernels needs their plan: lay it out with a planner"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelPlanner:
    """Plans the steps of a worker whose cache has `blocks` blocks of `block_size` tokens.

    Lifetime: worker. `shape` is the attention shape of each rank, with the model's layers; `ranks`
    is the number of ranks that each compute a part of every layer.
    """

    shape: AttentionShape
    blocks: int
    block_size: int
    ranks: int = 1
    costs: Costs | None = None  # None: those predicted
    ways: Ways = field(default_factory=lambda: ALL_KERNELS)
    _shared_steps: SharedPlanner = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = SharedPlanner(self.blocks, self.block_size, self.shape, self.costs)
        object.__setattr__(self, "_shared_steps", steps)

    def __call__(
        self, spans: Sequence[Span], page_table: torch.Tensor, room_tokens: int | None
    ) -> Plan:
        """Return the plan of a step. Raises ValueError for a page table with blocks that do not
        exist, or if the plan does not fit into the given room.
        """
        requests, is_fixed = len(page_table), room_tokens is not None
        decodes = requests if is_fixed else len(list(takewhile(lambda one: one[1] == 1, spans)))
        made = Plan(torch.empty(0, dtype=torch.int32))
        if decodes:
            context = torch.zeros(decodes, dtype=torch.int64)  # padding attends to nothing
            context[: len(spans)] = torch.tensor([one[2] for one in spans[:decodes]])
            made = self._shared(context, page_table[:decodes], room_tokens)
            is_shared = made.saving.shared_prefix_groups > 0
            shape = "decode_shared" if is_shared else decode_shape(spans[:decodes])
            if not is_fixed and self.ways[shape] != KVKERNELS:  # graphs hold the kernels
                made = Plan(made.words[:0], decodes)
        words, counts = made.words, (0, 0)
        if decodes < requests and self.ways[prefill_shape(spans[decodes:])] in (KVKERNELS, MMA):
            chunks = torch.tensor(spans)
            chunks[:decodes, 1] = 0
            rows = spans[-1][0] + spans[-1][1]
            sizes = self.blocks, self.block_size, self.shape.group
            cut = plan_prefill(chunks, rows, page_table, *sizes, kv_heads=self.shape.kv_heads)
            counts = len(cut.items), len(cut.merge_slots)
            words = torch.cat((words, _aligned(cut.all)))
        return made._replace(words=words, prefill_items=counts[0], prefill_slots=counts[1])

    def _shared(self, context: torch.Tensor, table: torch.Tensor, room_tokens: int | None) -> Plan:
        room = None
        if room_tokens is not None:
            sizes = len(table), room_tokens
            room = shared_plan.most_items(*sizes), shared_plan.most_slots(*sizes)
        plan, saving, _ = self._shared_steps.step(context, table, room)
        saved = NOTHING_SAVED
        if saving.shared_prefix_groups:
            saved = Saving(saving.shared_prefix_groups, saving.kv_bytes_saved * self.ranks)
        counts = len(table), len(plan.items), len(plan.merge_slots)
        return Plan(_aligned(plan.all), *counts, saving=saved)


def decode_shape(spans: Sequence[Span]) -> str:
    """Return the shape by which the way of computing these decodes is chosen: decode_long if a
    context is long, else decode_short. The decodes share no pages.
    """
    is_long = max((stop for _, _, stop in spans), default=0) > LONG_TOKENS
    return "decode_long" if is_long else "decode_short"


def prefill_shape(spans: Sequence[Span]) -> str:
    """Return the shape by which the way of computing these prefill chunks is chosen."""
    is_fresh = all(tokens == stop for _, tokens, stop in spans)
    return "prefill_fresh" if is_fresh else "prefill_hit"


def shared_part(batch: FlatBatch) -> SharedPlan:
    """Return the plan of the decodes, which are the first `batch.sizes.decodes` requests."""
    sizes = batch.sizes
    counts = sizes.decodes, sizes.decode_items, sizes.decode_slots
    return shared_plan.views(batch.plan[: _decode_words(sizes)], *counts)


def prefill_part(batch: FlatBatch) -> PrefillPlan:
    """Return the plan of the requests after the decodes."""
    sizes = batch.sizes
    first = -(-_decode_words(sizes) // ALIGNED) * ALIGNED
    counts = sizes.tokens, sizes.prefill_items, sizes.prefill_slots
    return prefill_plan.views(batch.plan[first : first + prefill_plan.words(*counts)], *counts)


def _decode_words(sizes: Sizes) -> int:
    if not sizes.decode_items:
        return 0
    return shared_plan.words(sizes.decodes, sizes.decode_items, sizes.decode_slots)


def _aligned(words: torch.Tensor) -> torch.Tensor:
    beyond = -len(words) % ALIGNED
    return functional.pad(words, (0, beyond)) if beyond else words


Attend = Callable[[torch.Tensor, LayerKv, torch.Tensor], None]


FLASHINFER_BYTES = 128 << 20  # for partial results; FlashInfer's recommendation
FLASHINFER_PLAN_BYTES = 16 << 20  # a wrapper's 8 MiB, and page ids; there are two at most


class FlashInfer:
    """Computes parts of steps with FlashInfer (Ye et al., 2025). Lifetime: model.

    It uses FlashInfer's prefill, which also takes requests of one row, over pages in place. A plan
    is copied to the device while the host goes on, from pinned memory that its wrapper reuses for
    the next plan. So each kind of part has a wrapper of its own, and waits until its last plan has
    been sent.
    """

    def __init__(self) -> None:
        self._wrapper_of = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._workspace: torch.Tensor | None = None  # one for all wrappers: parts run in turn
        self._wrappers: dict[str, Any] = {}  # by kind
        self._sent: dict[str, torch.cuda.Event] = {}  # by kind: its last plan

    def part(self, kind: str, batch: FlatBatch, requests: range) -> Attend:
        """Return a function that computes attention for `requests`, which are adjacent in the
        batch; `kind` is decode or prefill.
        """
        spans = batch.spans[requests.start : requests.stop]
        rows = slice(spans[0][0], spans[-1][0] + spans[-1][1])
        wrapper: Any = None

        def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
            nonlocal wrapper
            if wrapper is None:  # once for all layers: heads and pages are known from the first on
                wrapper = self._planned(kind, batch, requests, q, layer.k)
            wrapper.run(q[rows], (layer.k, layer.v), out=out[rows])

        return run

    def _planned(
        self, kind: str, batch: FlatBatch, requests: range, q: torch.Tensor, k_pages: torch.Tensor
    ) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=q.device)
        if kind not in self._wrappers:
            # FlashAttention-3's tiles have 128 rows and split no keys: not for one row a request.
            backend = "fa2" if kind == "decode" else "auto"
            self._wrappers[kind] = self._wrapper_of(self._workspace, "NHD", backend=backend)
        if kind in self._sent:
            self._sent[kind].synchronize()
        page_tokens, kv_heads = k_pages.shape[1:3]
        spans = np.array(batch.spans[requests.start : requests.stop])
        pages = -(-spans[:, 2] // page_tokens)
        ends = pages.cumsum()
        number = np.arange(ends[-1]) - np.repeat(ends - pages, pages)
        cells = np.repeat(np.array(requests), pages) * batch.page_table.shape[1] + number
        at = placed(torch.from_numpy(cells), torch.int32, q.device)
        wrapper = self._wrappers[kind]
        wrapper.plan(
            *(_starts(spans[:, 1]), _starts(pages)),
            batch.page_table.flatten().index_select(0, at),
            torch.from_numpy((spans[:, 2] - 1) % page_tokens + 1).int(),
            *(q.shape[1], kv_heads, q.shape[2], page_tokens),
            causal=True,
            q_data_type=q.dtype,
            kv_data_type=k_pages.dtype,
        )
        if q.is_cuda:
            self._sent[kind] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent[kind].record()
        return wrapper


def _starts(counts: Ints64) -> torch.Tensor:
    """Return the position at which each run of `counts` rows starts, and the end of the last run,
    as int32 on the host.
    """
    return torch.from_numpy(np.append(0, counts.cumsum())).int()


class KernelAttention:
    """Attention by the kernels' operators, except for shapes for which `ways` names something else.
    Batches must have a plan of a `KernelPlanner` with the same ways. Raises the errors of the
    operators.
    """

    fell_back = ""

    def __init__(self, ways: Ways = ALL_KERNELS) -> None:
        self._ways = ways
        self._flashinfer = FlashInfer() if FLASHINFER in ways.values() else None

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """Return the attention of a batch. Raises ValueError if the batch needs a plan and has
        none.
        """
        parts = [part for part in (self._decode_part(batch), self._prefill_part(batch)) if part]

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
            for part in parts:
                part(turned, layer, out)
            return out

        return attention

    def _decode_part(self, batch: FlatBatch) -> Attend | None:
        """Return a function that computes attention for the decodes, which come first; None if all
        requests have chunks.
        """
        sizes = batch.sizes
        if sizes.decode_items:
            return _decode_of(batch)
        if batch.is_fixed:
            raise ValueError(PLANLESS)
        if not sizes.decodes:
            return None
        # Without a plan: their own way is none of the kernels, or they share pages, whose is not.
        way = self._ways[decode_shape(batch.spans[: sizes.decodes])]
        if way == KVKERNELS:
            way = self._ways["decode_shared"]
        return self._planless("decode", batch, range(sizes.decodes), way)

    def _prefill_part(self, batch: FlatBatch) -> Attend | None:
        """Return a function that computes attention for the requests after the decodes; None if
        there are none.
        """
        others = range(batch.sizes.decodes, len(batch.spans))
        if batch.is_fixed or not others:
            return None
        way = self._ways[prefill_shape(batch.spans[others.start :])]
        if batch.sizes.prefill_items:
            return _prefill_of(batch, way == MMA)
        return self._planless("prefill", batch, others, way)

    def _planless(self, kind: str, batch: FlatBatch, rows: range, way: str) -> Attend:
        """Return a function that computes attention for `rows` by FlashInfer or torch, which need
        no plan of the kernels. Raises ValueError if `way` needs such a plan.
        """
        if way in (KVKERNELS, MMA):
            raise ValueError(PLANLESS)
        if way == FLASHINFER:
            assert self._flashinfer is not None
            return self._flashinfer.part(kind, batch, rows)

        def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if way == CUDNN else nullcontext():
                attend_part(q, layer, batch, out, rows)

        return run


def _decode_of(batch: FlatBatch) -> Attend:
    """Return a function that computes attention for the decodes, which come first; its workspace is
    used for all layers.
    """
    table = batch.page_table[: batch.sizes.decodes]
    plan = shared_part(batch)
    workspace = cache(partial(workspace_of, plan))

    def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
        parts = workspace(q.shape[1], q.shape[2], q.device)
        scale = q.shape[2] ** -0.5
        pages, own = (layer.k, layer.v, table), slice(len(table))
        shared_decode(q[own], *pages, plan, scale, out[own], parts, layer[2:])

    return run


def _prefill_of(batch: FlatBatch, is_mma: bool) -> Attend:
    """Return a function that computes attention for the requests after the decodes; its workspace
    is used for all layers.
    """
    plan = prefill_part(batch)
    workspace = cache(partial(workspace_of, plan))

    def run(q: torch.Tensor, layer: LayerKv, out: torch.Tensor) -> None:
        parts = workspace(q.shape[1], q.shape[2], q.device)
        pages = layer.k, layer.v, batch.page_table
        scale = q.shape[2] ** -0.5
        prefill(q, *pages, plan, scale, out, parts, scales=layer[2:], is_mma=is_mma)

    return run


class FallingBack:
    """Attention that uses the backend `first` until that fails, and then torch.

    Lifetime: model. A failed launch has computed nothing, and K and V can be written twice, so the
    failed layer is computed again, and no request is lost. An error that breaks the device is
    raised, because every later call would fail, too.
    """

    def __init__(self, first: Attention) -> None:
        self.fell_back = ""
        self._first, self._torch = first, TorchAttention()

    def begin(self, batch: FlatBatch, rotary: Rotary) -> StepAttention:
        """Return the attention of a batch. A batch without a plan comes from a rank 0 whose kernels
        have failed.
        """
        by_torch = cache(partial(self._torch.begin, batch, rotary))
        if self.fell_back:
            return by_torch()
        try:
            by_first = self._first.begin(batch, rotary)
        except ValueError:
            self._fall_back("a batch without the kernels' plan: rank 0 has fallen back")
            return by_torch()

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
                except Exception as error:  # libraries' errors are of no common kind
                    if device_lost(q.device):
                        raise
                    self._fall_back(f"a kernel that failed: {error!s:.300}")
            return by_torch()(q, k, v, norms, layer)

        return attention

    def _fall_back(self, why: str) -> None:
        log.error("attention: torch from here on, because of %s", why)
        self.fell_back = why


def attention_of(backend: str, ways: Ways = ALL_KERNELS) -> Attention:
    """Return the attention backend called `backend`, one of the names in `kernel_choice`; `ways`
    says how the kernels compute each shape. Raises ImportError if a way needs FlashInfer and that
    is not installed.
    """
    if backend == KVKERNELS:
        return FallingBack(KernelAttention(ways))
    return TorchAttention()
