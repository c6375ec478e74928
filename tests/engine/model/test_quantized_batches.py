"""Tests that quantized models give the same bits in every batch, chunking, cache and block size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.batch import Piece, flat_batch
from engine.model.config import Quantization
from engine.model.kv_cache import KvCache
from engine.model.tiny import TinySettings
from engine.model.transformer import Transformer
from tests.effort import examples
from tests.engine.tiny_models import cache, full_logits, loaded, some_ids, written

DTYPES = (torch.float32, torch.float64)
Models = dict[tuple[str, torch.dtype], Transformer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = written(tmp_path_factory.mktemp("model"), TinySettings("qwen2"))
    return {
        (weights, dtype): loaded(folder, dtype, quantization=Quantization(weights))
        for weights in ("int8", "int8-all")
        for dtype in DTYPES
    }


def poisoned(model: Transformer, blocks: int, block_size: int, kv: str) -> KvCache:
    """Return a cache as a failed request may leave it: random bytes as values, and NaN as
    scales.
    """
    made = cache(model, blocks, block_size, kv)
    made.pool.view(torch.uint8).fill_(0x7F)
    assert made.scales is not None
    made.scales.fill_(float("nan"))
    return made


def bytes_of(kv: KvCache, blocks: list[int], tokens: int) -> list[torch.Tensor]:
    """Return what the cache holds of a request, token by token: its values as bytes, and its
    scales.
    """
    assert kv.scales is not None
    values = kv.pool.view(torch.uint8)[blocks].movedim(4, 1).flatten(0, 1)[:tokens]
    return [values, kv.scales[blocks].movedim(4, 1).flatten(0, 1)[:tokens]]


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_logits_bits_do_not_depend_on_batch_chunks_or_blocks(
    data: st.DataObject, models: Models
) -> None:
    model = models[data.draw(st.sampled_from(sorted(models, key=str)))]
    kv_dtype = data.draw(st.sampled_from(("int8", "fp8")))
    block_size = data.draw(st.sampled_from((1, 7, 16, 64)))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    prompts = [some_ids(length + 9)[9 - row :][:length] for row, length in enumerate(lengths)]
    pages = [-(-length // block_size) for length in lengths]
    free = data.draw(st.permutations(range(sum(pages))))
    kv = poisoned(model, sum(pages), block_size, kv_dtype)
    blocks = [free[sum(pages[:row]) : sum(pages[: row + 1])] for row in range(len(pages))]
    done, rows = [0] * len(prompts), [list[torch.Tensor]() for _ in prompts]
    while waiting := [row for row, length in enumerate(lengths) if done[row] < length]:
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        counts = [
            min(data.draw(st.sampled_from((1, 1, 3, 20, 70, 150))), lengths[row] - done[row])
            for row in chosen
        ]
        pieces = [
            Piece(prompts[row][done[row] : done[row] + count], done[row], blocks[row], True, True)
            for row, count in zip(chosen, counts, strict=True)
        ]
        logits = model.forward(flat_batch(pieces, block_size), kv)
        for row, count, made in zip(chosen, counts, torch.split(logits, counts), strict=True):
            rows[row].append(made)
            done[row] += count
    for row, prompt in enumerate(prompts):
        assert torch.equal(torch.cat(rows[row]), full_logits(model, prompt, kv_dtype))
        alone = cache(model, 1, len(prompt), kv_dtype)
        model.forward(flat_batch([Piece(prompt, 0, [0])], len(prompt)), alone)
        # Computed again, after a preemption say, a token leaves the same bytes.
        for held, again in zip(
            bytes_of(kv, blocks[row], len(prompt)),
            bytes_of(alone, [0], len(prompt)),
            strict=True,
        ):
            assert torch.equal(held, again)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_pool_keeps_its_layout_and_scales_follow_it(
    kv_dtype: str, models: Models
) -> None:
    model = models["int8", torch.float32]
    plain, kv = cache(model, 4), cache(model, 4, kv=kv_dtype)
    assert kv.pool.shape == plain.pool.shape
    assert kv.pool.stride() == plain.pool.stride()
    assert kv.scales is not None
    assert kv.scales.shape == kv.pool.shape[:-1]
    assert kv.scales.is_contiguous()
    assert kv.nbytes == plain.nbytes // 4 + kv.scales.nbytes
    layer = kv.layer(1)
    assert layer.k_scales is not None
    assert layer.v_scales is not None
    layer.k_scales[2, 5, 1] = 3.0
    layer.v_scales[2, 5, 1] = 4.0
    assert torch.equal(kv.scales[2, 1, 1, :, 5], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_stay_close_to_float64(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, ids = written(tmp_path, TinySettings("qwen3")), some_ids(40)
    both = [
        full_logits(loaded(folder, to, quantization=Quantization("int8-all")), ids, "int8")
        for to in (dtype, torch.float64)
    ]
    off = (both[0].double() - both[1]).norm() / both[1].norm()
    assert float(off) < 2e-2
