"""Tests that a request's logits have the same bits in every batch, chunking, cache and
block size.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.batch import Piece, flat_batch
from engine.model.kv_cache import KvCache
from engine.model.tiny import ARCHS, TinySettings
from engine.model.transformer import Transformer
from tests.effort import examples
from tests.engine.tiny_models import cache, full_logits, loaded, some_ids, written

DTYPES = (torch.float32, torch.float64)
MAX_TOKENS = 150


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], Transformer]:
    made = {}
    for arch in ARCHS:
        folder = written(tmp_path_factory.mktemp(arch), TinySettings(arch))
        made.update({(arch, dtype): loaded(folder, dtype) for dtype in DTYPES})
    return made


def poisoned(model: Transformer, blocks: int, block_size: int) -> KvCache:
    """Return a cache whose blocks hold NaN, as a failed request may leave them."""
    kv = cache(model, blocks, block_size)
    kv.pool.fill_(float("nan"))
    return kv


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_logits_bits_do_not_depend_on_batch_chunks_or_blocks(
    data: st.DataObject, models: dict[tuple[str, torch.dtype], Transformer]
) -> None:
    model = models[data.draw(st.sampled_from(sorted(models, key=str)))]
    block_size = data.draw(st.sampled_from((1, 7, 16, 64)))
    lengths = data.draw(st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=4))
    prompts = [some_ids(length + 9)[9 - row :][:length] for row, length in enumerate(lengths)]
    pages = [-(-length // block_size) for length in lengths]
    free = data.draw(st.permutations(range(sum(pages))))
    kv = poisoned(model, sum(pages), block_size)
    blocks = [free[sum(pages[:row]) : sum(pages[: row + 1])] for row in range(len(pages))]
    done, rows = [0] * len(prompts), [list[torch.Tensor]() for _ in prompts]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        waiting = [row for row, length in enumerate(lengths) if done[row] < length]
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        pieces, counts = [], []
        for row in chosen:
            count = min(
                data.draw(st.sampled_from((1, 1, 3, 20, 70, 150))), lengths[row] - done[row]
            )
            ids = prompts[row][done[row] : done[row] + count]
            pieces.append(Piece(ids, done[row], blocks[row], wants_all=True))
            counts.append(count)
        logits = model.forward(flat_batch(pieces, block_size), kv)
        for row, count, made in zip(chosen, counts, torch.split(logits, counts), strict=True):
            rows[row].append(made)
            done[row] += count
    for prompt, made in zip(prompts, rows, strict=True):
        assert torch.equal(torch.cat(made), full_logits(model, prompt))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_shared_prefix_is_computed_once(
    arch: str, models: dict[tuple[str, torch.dtype], Transformer]
) -> None:
    model, ids = models[arch, torch.float32], some_ids(100)
    kv = poisoned(model, 12, 16)
    model.forward(flat_batch([Piece(ids[:64], 0, [9, 2, 5, 7])], 16), kv)
    tails = [ids[64:], [8] * 30, [5]]
    pieces = [
        Piece(tail, 64, [9, 2, 5, 7, *own], wants_all=True)
        for tail, own in zip(tails, ([0, 1, 3], [4, 6], [8]), strict=True)
    ]
    made = torch.split(model.forward(flat_batch(pieces, 16), kv), [len(tail) for tail in tails])
    for tail, logits in zip(tails, made, strict=True):
        assert torch.equal(logits, full_logits(model, ids[:64] + tail)[64:])


def test_padding_is_not_written_to_the_cache(
    models: dict[tuple[str, torch.dtype], Transformer],
) -> None:
    model, ids = models["qwen3", torch.float32], some_ids(20)
    batch, kv = flat_batch([Piece(ids, 0, [1, 0])], 16), cache(model, 3)
    padded = dataclasses.replace(
        batch,
        token_ids=torch.cat((batch.token_ids, torch.tensor([7, 7]))),
        positions=torch.cat((batch.positions, torch.tensor([0, 0]))),
        slots=torch.cat((batch.slots, torch.tensor([-1, -1]))),
    )
    plain = model.forward(batch, kv)
    before = kv.pool[: kv.blocks].clone()
    assert torch.equal(model.forward(padded, kv), plain)
    assert torch.equal(kv.pool[: kv.blocks], before)
    assert bool(kv.pool[kv.blocks].any())


def test_only_requested_positions_get_logits(
    models: dict[tuple[str, torch.dtype], Transformer],
) -> None:
    model, ids = models["llama", torch.float64], some_ids(20)
    pieces = [
        Piece(ids, 0, [0, 1], wants_logits=False),
        Piece(ids, 0, [2, 3]),
        Piece(ids[:3], 0, [4], wants_all=True),
    ]
    logits = model.forward(flat_batch(pieces, 16), cache(model, 5))
    full = full_logits(model, ids)
    assert torch.equal(logits, torch.cat((full[-1:], full[:3])))


def test_each_heads_block_is_contiguous_in_memory(
    models: dict[tuple[str, torch.dtype], Transformer],
) -> None:
    kv = cache(models["llama", torch.float32], 4)
    layer = kv.layer(1)
    layer.k[2, 5, 1] = 3.0
    layer.v[2, 5, 1] = 4.0
    assert kv.pool.is_contiguous()
    assert torch.equal(kv.pool[2, 1, 1, :, 5, 0], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (Piece([], 0, [0]), "has 0 tokens"),
        (Piece([1], -1, [0]), "from position -1"),
        (Piece([1] * 17, 0, [0]), "do not hold"),
        (Piece([1], 16, [0]), "ends at token 17"),
    ],
)
def test_invalid_pieces_are_rejected(piece: Piece, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flat_batch([piece], 16)


def test_an_empty_batch_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        flat_batch([], 16)
