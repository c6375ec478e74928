"""Tests on the CPU of the attention for GPUs without our kernels: it equals plain attention in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.capacity import Limits
from engine.model.attention import MAX_GATHERED, attend, attend_fused, write
from engine.model.batch import FlatBatch, Piece, fixed_batch, flat_batch
from engine.model.config import ModelConfig, Shard, read_config
from engine.model.kv_cache import KvCache, LayerKv
from engine.model.tiny import TinySettings, make_tiny
from engine.runner.needs import gathered_bytes
from tests.effort import examples

HEADS, KV_HEADS, DIM, BLOCKS = 6, 2, 64, 64
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, TinySettings(arch="qwen3", heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM))
    return replace(read_config(folder), layers=1)


def poisoned(config: ModelConfig, size: int, dtype: torch.dtype) -> KvCache:
    cache = KvCache(config, BLOCKS, size, dtype=dtype)
    cache.pool.fill_(float("nan"))
    return cache


def write_random_kv(batch: FlatBatch, caches: list[LayerKv]) -> torch.Tensor:
    """Write random K and V of the batch to each cache; return the queries."""
    draw = torch.Generator().manual_seed(len(batch.slots))
    drawn = torch.randn(len(batch.slots), HEADS + 2 * KV_HEADS, DIM, generator=draw)
    q, k, v = drawn.bfloat16().split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    for layer in caches:
        write(k.to(layer.k.dtype), v.to(layer.k.dtype), layer, batch.slots)
    return q


@settings(max_examples=examples(10), deadline=None)
@given(
    chunks=st.lists(
        st.lists(st.sampled_from([1, 1, 3, 40, 130]), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    size=st.sampled_from([1, 7, 16]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_attention_is_right_in_steps_of_chunks_and_decodes(
    chunks: list[list[int]], size: int, dtype: torch.dtype, config: ModelConfig
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.BLOCKS", 1_200)
        held = [poisoned(config, size, kind) for kind in (dtype, torch.float64)]
    layers = [cache.layer(0) for cache in held]
    starts, free = [0] * len(chunks), list(range(1_200))
    need = [-(-sum(own) // size) for own in chunks]
    blocks = [[free.pop() for _ in range(count)] for count in need]
    for step in range(max(map(len, chunks))):
        going = [row for row, own in enumerate(chunks) if step < len(own)]
        pieces = [Piece([1] * chunks[row][step], starts[row], blocks[row]) for row in going]
        batch = flat_batch(pieces, size)
        q = write_random_kv(batch, layers)
        wanted = attend(q.double(), layers[1], batch)
        assert_close(attend_fused(q.to(dtype), layers[0], batch), wanted, dtype)
        for row in going:
            starts[row] += chunks[row][step]


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert float((got.double() - wanted).norm() / wanted.norm()) < TOLERANCES[dtype]


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_attention_is_right_in_a_fixed_batch_with_padding(kv: str, config: ModelConfig) -> None:
    """Attention over a fixed-size batch with padding is right and finite: its sizes say nothing of
    the requests, as in a CUDA graph.
    """
    cache = KvCache(config, BLOCKS, 16, dtype=torch.float32, kv=kv)
    cache.pool.zero_() if kv == "int8" else cache.pool.fill_(float("nan"))
    layer = cache.layer(0)
    contexts, blocks = [37, 90], [[4, 0, 7], [2, 9, 3, 1, 5, 6]]
    before = [Piece([1] * n, 0, own) for n, own in zip(contexts, blocks, strict=True)]
    write_random_kv(flat_batch(before, 16), [layer])
    pieces = [Piece([1], n - 1, own) for n, own in zip(contexts, blocks, strict=True)]
    batch = fixed_batch(pieces, 3, 8, 16)
    q = write_random_kv(flat_batch(before, 16), [])[: len(batch.slots)].float()
    made: list[torch.Tensor] = []
    ways: list[Callable[..., torch.Tensor]] = [attend, attend_fused]
    made = [way(q, layer, batch) for way in ways]
    assert torch.allclose(made[1][:2], made[0][:2], atol=1e-5)


@pytest.mark.parametrize("tokens", [40, 1 << 17])
def test_memory_for_gathered_kv_is_counted(tokens: int, config: ModelConfig) -> None:
    """The memory for the gathered K and V is counted as what the longest allowed prompt takes at
    once.
    """
    limits = Limits(max_model_tokens=tokens)
    counted = gathered_bytes(config, Shard(), limits, "bfloat16")
    each = tokens * KV_HEADS * DIM * 2
    assert counted == 3 * max(each, MAX_GATHERED * 2)
