"""Tests of steps of which FlashInfer computes a part; torch stands in for FlashInfer, which needs a
GPU.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.attention import attend
from engine.model.backends import FLASHINFER, KVKERNELS, SHAPES, KernelChoice
from engine.model.batch import Piece, flat_batch
from engine.model.checkpoint import Checkpoint
from engine.model.config import Quantization, Shard, read_config
from engine.model.kernel_attention import FlashInfer, KernelAttention, KernelPlanner
from engine.model.kernel_choice import choose_attention
from engine.model.kernel_trial import AttentionTrial
from engine.model.kv_cache import LayerKv
from engine.model.tiny import TinySettings
from engine.model.transformer import Transformer
from kvkernels.ops.shared_costs import AttentionShape
from tests.effort import examples
from tests.engine.tiny_models import cache, full_logits, loaded, some_ids, written

BY_FLASHINFER = dict.fromkeys(SHAPES, FLASHINFER)
HEADS, KV_HEADS, DIM = 6, 2, 32


class Wrapper:
    """A stand-in for `BatchPrefillWithPagedKVCacheWrapper` of FlashInfer 0.7, written after its
    docstrings.

    It reads its plan when it runs, not when it is made, like a device, which receives the plan
    later.
    """

    made: list[Wrapper]

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.backend = backend
        self.workspace = float_workspace_buffer
        self.plans: list[tuple[Sequence[Any], dict[str, Any]]] = []
        self.made.append(self)

    def plan(self, *given: Any, **named: Any) -> None:
        self.plans.append((given, named))

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        (queries, starts, pages, last, heads, kv_heads, dim, page_tokens), named = self.plans[-1]
        for host in (queries, starts, last):  # else planning waits for the device
            assert host.device.type == "cpu"
            assert host.dtype == torch.int32
        assert pages.dtype == torch.int32
        assert named["causal"]
        assert (named["q_data_type"], named["kv_data_type"]) == (q.dtype, q.dtype)
        assert q.shape[0] == queries[-1]
        assert q.shape[1:] == (heads, dim)
        assert paged_kv_cache[0].shape[1:] == (page_tokens, kv_heads, dim)
        for row in range(len(last)):
            own = slice(int(queries[row]), int(queries[row + 1]))
            k, v = (x[pages[starts[row] : starts[row + 1]].long()] for x in paged_kv_cache)
            context = (len(k) - 1) * page_tokens + int(last[row])
            k, v = (
                x.flatten(0, 1)[:context].repeat_interleave(heads // kv_heads, 1) for x in (k, v)
            )
            scores = torch.einsum("nhd,thd->hnt", q[own], k) * dim**-0.5
            seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(context - scores.shape[1])
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[own] = torch.einsum("hnt,thd->nhd", weights, v)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    Wrapper.made = []
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("engine.model.kernel_attention.FLASHINFER_BYTES", 1 << 10)


def layer_of(pages: int, page_tokens: int, draw: torch.Generator) -> LayerKv:
    """Return K and V of a layer with the strides that they have in the pool."""
    pool = torch.randn(pages, KV_HEADS, 2, page_tokens, DIM, generator=draw, dtype=torch.float64)
    return LayerKv(pool[:, :, 0].transpose(1, 2), pool[:, :, 1].transpose(1, 2))


@settings(max_examples=examples(20), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=5),
    page_tokens=st.sampled_from([1, 7, 16]),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_flashinfer_computes_any_part_of_a_step(
    requests: list[tuple[int, int]], page_tokens: int, seed: int, data: st.DataObject
) -> None:
    """FlashInfer computes any part of a step's requests right, and requests before and after that
    part are unchanged.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-(start + new) // page_tokens) for start, new in requests]
    pages = torch.randperm(sum(counts) + 2, generator=draw).tolist()
    pieces = [
        Piece([1] * new, start, [pages.pop() for _ in range(count)])
        for (start, new), count in zip(requests, counts, strict=True)
    ]
    batch = flat_batch(pieces, page_tokens)
    layer = layer_of(sum(counts) + 2, page_tokens, draw)
    rows = sum(new for _, new in requests)
    q = torch.randn(rows, HEADS, DIM, generator=draw, dtype=torch.float64)
    first = data.draw(st.integers(0, len(requests) - 1))
    part = range(first, data.draw(st.integers(first, len(requests) - 1)) + 1)
    out = torch.full_like(q, float("nan"))
    run = FlashInfer().part("prefill", batch, part)
    for _ in range(2):  # layers
        run(q, layer, out)
    assert len(Wrapper.made[-1].plans) == 1
    inside = torch.zeros(rows, dtype=torch.bool)
    inside[batch.spans[part.start][0] : sum(batch.spans[part[-1]][:2])] = True
    assert out[~inside].isnan().all()
    assert torch.allclose(out[inside], attend(q, layer, batch)[inside], rtol=1e-10, atol=1e-12)


def test_decodes_and_chunks_have_separate_wrappers(tmp_path: Path) -> None:
    """Decodes and prefill chunks have separate FlashInfer wrappers, so that no plan is overwritten
    while the other kind runs.
    """
    folder = written(tmp_path, TinySettings("qwen3"))
    with Checkpoint(folder) as checkpoint:
        config = read_config(folder)
        attention = KernelAttention(BY_FLASHINFER)
        model = Transformer(config, checkpoint, dtype=torch.float64, attention=attention)
    kv = cache(model, 16)
    planner = KernelPlanner(
        AttentionShape(config.heads, config.kv_heads, config.head_dim), 16, 16, ways=BY_FLASHINFER
    )
    prompts = [some_ids(50), some_ids(60)[7:]]
    blocks = [[9, 2, 5, 7], [1, 8, 0, 3]]
    steps = [
        [Piece(prompts[0][:33], 0, blocks[0])],
        [Piece(prompts[0][33:34], 33, blocks[0]), Piece(prompts[1][:20], 0, blocks[1])],
        [Piece(prompts[0][34:35], 34, blocks[0]), Piece(prompts[1][20:], 20, blocks[1])],
    ]
    for pieces in steps:
        logits = model.forward(flat_batch(pieces, 16, planner=planner), kv)
    exact = loaded(folder)
    for row, prompt in enumerate((prompts[0][:35], prompts[1])):
        assert torch.allclose(logits[row], full_logits(exact, prompt)[-1], rtol=1e-9, atol=1e-11)
    assert [(one.backend, len(one.plans)) for one in Wrapper.made] == [("auto", 3), ("fa2", 2)]
    assert Wrapper.made[0].workspace is Wrapper.made[1].workspace


def test_a_trial_reports_wrong_results_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AttentionTrial(HEADS, KV_HEADS, DIM, 16, torch.float32, torch.float32)
    assert made.flashinfer_fault("cpu") == ""
    right = Wrapper.run

    def wrong(self: Wrapper, q: torch.Tensor, pages: Any, out: torch.Tensor) -> None:
        right(self, q, pages, out=out)
        out[-1] *= 1.1

    monkeypatch.setattr(Wrapper, "run", wrong)
    assert made.flashinfer_fault("cpu") == "a trial: FlashInfer is 1.0e-01 off"
    monkeypatch.setattr(Wrapper, "plan", lambda *given, **named: 1 / 0)
    assert made.flashinfer_fault("cpu") == "a trial: division by zero"


NOT_THERE = "FlashInfer, which cannot be imported: import of flashinfer halted; None in sys.modules"


@pytest.mark.parametrize(
    ("device", "kv", "is_there", "trial", "why"),
    [
        ("cpu", "auto", True, "", "a CPU"),
        ("cuda", "auto", False, "", NOT_THERE),
        ("cuda", "int8", True, "", "a quantized cache, for whose scales FlashInfer has no place"),
        ("cuda", "auto", True, "a trial: no nvcc", "a trial: no nvcc"),
        ("cuda", "auto", True, "", ""),
    ],
)
def test_the_kernels_are_used_where_flashinfer_cannot_run(
    device: str,
    kv: str,
    is_there: bool,
    trial: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = read_config(written(tmp_path, TinySettings("llama", head_dim=64)))
    if not is_there:
        monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr("engine.model.kernel_choice._reason_for_torch", lambda *given: None)
    monkeypatch.setattr(AttentionTrial, "flashinfer_fault", lambda made, on: trial)
    quantized = Quantization(kv=kv)
    ways = {"prefill_hit": FLASHINFER}
    made = choose_attention(KVKERNELS, config, Shard(), device, "bfloat16", quantized, 16, ways)
    assert made == KernelChoice(KVKERNELS, ways={"prefill_hit": KVKERNELS if why else FLASHINFER})
    said = f"the kernels compute what FlashInfer was faster at, because of {why}"
    assert caplog.messages == ([said] if why else [])


def test_calls_match_the_signatures_of_the_installed_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls of FlashInfer match the signatures of the installed package, which can be imported
    without a GPU.
    """
    monkeypatch.delitem(sys.modules, "flashinfer")
    theirs = pytest.importorskip("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    )
    batch = flat_batch([Piece([1] * 5, 3, [0])], 16)
    q = torch.zeros(5, HEADS, DIM, dtype=torch.float64)
    layer = layer_of(1, 16, torch.Generator())
    FlashInfer().part("prefill", batch, range(1))(q, layer, torch.empty_like(q))
    (given_, named) = Wrapper.made[-1].plans[0]
    bound = inspect.signature(theirs.plan).bind(None, *given_, **named)
    names = ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]
    names += ["num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "causal"]
    assert list(bound.arguments)[1:] == [*names, "q_data_type", "kv_data_type"]
    inspect.signature(theirs.run).bind(None, q, (layer.k, layer.v), out=q)
    inspect.signature(theirs.__init__).bind(None, torch.empty(0), "NHD", backend="fa2")
