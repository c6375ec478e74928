"""Tests of `append`, decode and prefill on the engine's own cache and batches, compared with its
plain attention.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.attention import attend, write
from engine.model.batch import FlatBatch, Piece, flat_batch
from engine.model.config import ModelConfig, read_config
from engine.model.kv_cache import KvCache, LayerKv, dequantize
from engine.model.layers import rms_norm
from engine.model.rope import Rotary, rotate
from engine.model.tiny import TinySettings, make_tiny
from kvkernels.ops.prefill import plan_prefill
from kvkernels.ops.shared_costs import AttentionShape
from kvkernels.ops.shared_decode import plan_shared, workspace_of
from tests.kernels.emulated import emulate, needs_compiler, relative_error

pytestmark = needs_compiler
BF16, WHOLE = torch.bfloat16, torch.float64
HEADS, KV_HEADS, DIM, BLOCKS, PAGE, EPS = 4, 2, 64, 12, 16, 1e-6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, TinySettings(arch="qwen3", heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM))
    return read_config(folder)


class Both:
    """One attention layer twice: with the kernels' cache in bf16 or quantized, and with the
    engine's cache in float64.
    """

    def __init__(self, config: ModelConfig, kv: str) -> None:
        self.ours = KvCache(config, BLOCKS, PAGE, dtype=BF16, kv=kv).layer(1)
        self.theirs = KvCache(config, BLOCKS, PAGE, dtype=WHOLE).layer(1)
        self.rope = [Rotary(config.rope, DIM, 256, "cpu", dtype) for dtype in (BF16, WHOLE)]
        self.draw = torch.Generator().manual_seed(0)
        self.weights = torch.randn(2, DIM, generator=self.draw).to(BF16)

    def step(self, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a batch's tokens to both caches; return the rotated queries of the kernel and of
        the engine.
        """
        tokens = len(batch.token_ids)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, generator=self.draw).to(BF16)
        parts = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q_out = torch.full((tokens, HEADS, DIM), float("nan"), dtype=BF16)
        rope, exact = self.rope
        k, v, k_scales, v_scales = self.ours
        emulate(
            "append",
            *(*parts, rope.cos, rope.sin, batch.positions, batch.slots, *self.weights, EPS),
            *(q_out, k, v, k_scales, v_scales),
        )
        turned = [
            rotate(rms_norm(x.to(WHOLE), w.to(WHOLE), EPS), *exact.rows(batch.positions))
            for x, w in zip(parts, self.weights, strict=False)
        ]
        write(turned[1], parts[2].to(WHOLE), self.theirs, batch.slots)
        return q_out, turned[0]


def kept(layer: LayerKv) -> list[torch.Tensor]:
    """Return K and V of all blocks except the scratch block, as numbers."""
    if layer.k_scales is None or layer.v_scales is None:
        return [layer.k[:-1].to(WHOLE), layer.v[:-1].to(WHOLE)]
    pairs = ((layer.k, layer.k_scales), (layer.v, layer.v_scales))
    return [dequantize(x, scales, WHOLE)[:-1] for x, scales in pairs]


@pytest.mark.parametrize(("kv", "bound"), [("auto", 4e-3), ("int8", 1e-2), ("fp8", 4e-2)])
def test_cache_contents_agree_with_the_plain_cache(
    config: ModelConfig, kv: str, bound: float
) -> None:
    both = Both(config, kv)
    q, wanted = both.step(flat_batch([Piece([1] * 37, 0, [4, 0, 7]), Piece([1] * 5, 0, [2])], PAGE))
    assert relative_error(q, wanted) < bound
    for ours, theirs in zip(kept(both.ours), kept(both.theirs), strict=True):
        assert relative_error(ours, theirs) < bound


@pytest.mark.parametrize(("kv", "bound"), [("auto", 1e-2), ("int8", 2e-2), ("fp8", 6e-2)])
def test_decode_steps_after_prefill_agree_with_plain_attention(
    config: ModelConfig, kv: str, bound: float
) -> None:
    both = Both(config, kv)
    blocks = [[4, 0, 7], [2, 9]]
    lengths = [37, 16]
    both.step(
        flat_batch([Piece([1] * n, 0, b) for n, b in zip(lengths, blocks, strict=True)], PAGE)
    )
    for _ in range(3):
        batch = flat_batch([Piece([1], n, b) for n, b in zip(lengths, blocks, strict=True)], PAGE)
        q, exact_q = both.step(batch)
        shape = AttentionShape(HEADS, KV_HEADS, DIM)
        plan = plan_shared(batch.context_tokens, batch.page_table, BLOCKS, PAGE, shape).plan
        out = torch.full_like(q, float("nan"))
        emulate(
            "shared_decode",
            *(q, both.ours.k, both.ours.v, batch.page_table, *plan[1:], DIM**-0.5, out),
            *(*workspace_of(plan, HEADS, DIM), both.ours.k_scales, both.ours.v_scales),
        )
        assert relative_error(out, attend(exact_q, both.theirs, batch)) < bound
        lengths = [n + 1 for n in lengths]


@pytest.mark.parametrize(("kv", "bound"), [("auto", 1e-2), ("int8", 2e-2), ("fp8", 6e-2)])
def test_chunks_beside_a_decode_agree_with_plain_attention(
    config: ModelConfig, kv: str, bound: float
) -> None:
    """Steps as the scheduler makes them agree with plain attention: a request's next token together
    with chunks of two prompts.
    """
    both = Both(config, kv)
    blocks = [[11], [4, 0, 7, 5, 1], [2, 9, 3]]
    starts = [0, 0, 0]
    for tokens in ([3, 20, 16], [1, 45, 9], [1, 2, 17]):
        pieces = zip(tokens, starts, blocks, strict=True)
        batch = flat_batch([Piece([1] * n, start, own) for n, start, own in pieces], PAGE)
        q, exact_q = both.step(batch)
        spans = torch.tensor(batch.spans)
        is_decode = spans[:, 1] == 1
        spans[is_decode, 1] = 0  # another kernel's
        plan = plan_prefill(spans, len(q), batch.page_table, BLOCKS, PAGE, HEADS // KV_HEADS)
        out = torch.full_like(q, float("nan"))
        layer = (both.ours.k, both.ours.v, batch.page_table)
        pieces = workspace_of(plan, HEADS, DIM)
        emulate("prefill", q, *layer, *plan[1:], DIM**-0.5, out, None, *pieces, *both.ours[2:])
        first = int(is_decode.sum())
        assert out[:first].isnan().all()
        assert relative_error(out[first:], attend(exact_q, both.theirs, batch)[first:]) < bound
        starts = [start + n for start, n in zip(starts, tokens, strict=True)]
