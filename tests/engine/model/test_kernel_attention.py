"""Tests of the model with the kernels' operators: logits equal those of plain torch in all kinds of
steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.batch import Piece, fixed_batch, flat_batch
from engine.model.checkpoint import Checkpoint
from engine.model.config import read_config
from engine.model.kernel_attention import KernelAttention, KernelPlanner
from engine.model.kv_cache import KvCache
from engine.model.tiny import TinySettings
from engine.model.transformer import Transformer
from engine.runner.graphs import DecodeGraphs
from kvkernels.ops.shared_costs import AttentionShape
from tests.effort import examples
from tests.engine.tiny_models import cache, full_logits, loaded, some_ids, written

ARCHS = ("llama", "qwen3")
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}
Pair = tuple[Transformer, Transformer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], Pair]:
    """Return each model twice, in plain torch and with the operators, by architecture and dtype."""
    made = {}
    for arch in ARCHS:
        folder = written(tmp_path_factory.mktemp(arch), TinySettings(arch))
        for dtype in TOLERANCES:
            made[arch, dtype] = loaded(folder, dtype), by_kernels(folder, dtype)
    return made


def by_kernels(folder: Path, dtype: torch.dtype) -> Transformer:
    with Checkpoint(folder) as checkpoint:
        return Transformer(
            read_config(folder), checkpoint, dtype=dtype, attention=KernelAttention()
        )


def planner_of(model: Transformer, kv: KvCache) -> KernelPlanner:
    config = model.config
    heads = config.heads, config.kv_heads, config.head_dim
    scale_bytes = 0 if kv.scales is None else kv.scales.element_size()
    shape = AttentionShape(*heads, kv.pool.element_size(), config.layers, scale_bytes)
    return KernelPlanner(shape, kv.blocks, kv.block_size)


def close(made: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(made, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_logits_equal_those_of_torch_in_any_steps(
    data: st.DataObject, models: dict[tuple[str, torch.dtype], Pair]
) -> None:
    """Logits equal those of torch in steps of decodes followed by chunks, some of one token, in a
    pool full of NaN with blocks in any order.
    """
    arch, dtype = data.draw(st.sampled_from(sorted(models, key=str)))
    plain, model = models[arch, dtype]
    size = data.draw(st.sampled_from((1, 7, 16, 64)))
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    pages = [-(-length // size) for length in lengths]
    free = data.draw(st.permutations(range(sum(pages))))
    kv = cache(model, sum(pages), size)
    kv.pool.fill_(float("nan"))
    planner = planner_of(model, kv)
    blocks = [free[sum(pages[:row]) : sum(pages[: row + 1])] for row in range(len(pages))]
    prompts = [some_ids(length + 9)[9 - row :][:length] for row, length in enumerate(lengths)]
    done = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        waiting = [row for row, length in enumerate(lengths) if done[row] < length]
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        counts = [
            min(data.draw(st.sampled_from((1, 1, 3, 70, 300))), lengths[row] - done[row])
            for row in chosen
        ]
        pieces = [
            Piece(prompts[row][done[row] :][:count], done[row], blocks[row], wants_all=True)
            for row, count in zip(chosen, counts, strict=True)
        ]
        logits = model.forward(flat_batch(pieces, size, planner=planner), kv)
        for row, count, made in zip(chosen, counts, torch.split(logits, counts), strict=True):
            rows[row].append(made)
            done[row] += count
    for prompt, own in zip(prompts, rows, strict=True):
        assert close(torch.cat(own), full_logits(plain, prompt), dtype)


@settings(max_examples=examples(5), deadline=None)
@given(
    contexts=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    data=st.data(),
)
def test_padded_steps_share_a_buffer_and_keep_cached_blocks(
    contexts: list[int],
    padding: int,
    data: st.DataObject,
    models: dict[tuple[str, torch.dtype], Pair],
) -> None:
    """Padded steps of one size share one buffer, as in a CUDA graph, and leave cached blocks as
    they are.
    """
    arch, dtype = data.draw(st.sampled_from(sorted(models, key=str)))
    plain, model = models[arch, dtype]
    pages, size = 38, 16
    kv = cache(model, len(contexts) * pages, size)
    kv.pool.fill_(float("nan"))
    planner = planner_of(model, kv)
    own = [list(range(row * pages, (row + 1) * pages)) for row in range(len(contexts))]
    prompts = [some_ids(context + row)[row:] for row, context in enumerate(contexts)]
    fill = [Piece(ids, 0, blocks) for ids, blocks in zip(prompts, own, strict=True)]
    model.forward(flat_batch(fill, size, planner=planner), kv)
    total = len(contexts) + padding
    static = fixed_batch([], total, pages, size, planner=planner)
    model.forward(static, kv)
    for turn in range(2):
        decodes = [
            Piece([7 + row + turn], context + turn, blocks)
            for row, (context, blocks) in enumerate(zip(contexts, own, strict=True))
        ]
        laid_out = fixed_batch(decodes, total, pages, size, planner=planner)
        assert laid_out.sizes == static.sizes
        static.data.copy_(laid_out.data)
        made = model.forward(static, kv)
        for row, prompt in enumerate(prompts):
            prompt.append(7 + row + turn)
            assert close(made[row], full_logits(plain, prompt)[-1], dtype)
    assert kv.pool[kv.blocks].isnan().all()  # padding is kept nowhere, not in the scratch block


def test_cuda_graphs_do_not_limit_the_context_length(
    models: dict[tuple[str, torch.dtype], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs have no longest context, because the rows of the page table are as wide as each
    step's longest one. Only the sum of the contexts is limited, to the room of plans and partial
    results.
    """
    monkeypatch.setattr("engine.runner.graphs.KERNEL_GRAPH_TOKENS", 16)
    plain, model = models["llama", torch.float32]
    kv = cache(model, 64, 8)
    sizes = 4, 160, 8, model.config.vocab, torch.float32
    graphs = DecodeGraphs(
        lambda batch: model.forward(batch, kv), *sizes, planner=planner_of(model, kv)
    )
    for contexts in ([150], [3], [70, 20, 66], [1, 1], [159]):
        blocks = [list(range(20 * row, 20 * row + 20)) for row in range(len(contexts))]
        prompts = [some_ids(context + 1) for context in contexts]
        fill = [Piece(ids[:-1], 0, own) for ids, own in zip(prompts, blocks, strict=True)]
        plain.forward(flat_batch(fill, 8), kv)
        pieces = [
            Piece(ids[-1:], len(ids) - 1, own) for ids, own in zip(prompts, blocks, strict=True)
        ]
        assert graphs.use(pieces, False) == "hit"
        batch = graphs.lay_out(pieces)
        assert batch.page_table.shape[1] == max(contexts) // 8 + 1
        made = graphs.logits(batch, lambda _: None)
        for row, prompt in enumerate(prompts):
            assert close(made[row], full_logits(plain, prompt)[-1], torch.float32)
    over = [Piece([9], tokens, range(20)) for tokens in (100, 59)]
    assert graphs.use(over, False) == "graph_limit"  # 161 tokens where there is room for 160


def test_a_batch_without_a_plan_is_refused(models: dict[tuple[str, torch.dtype], Pair]) -> None:
    model = models["llama", torch.float32][1]
    with pytest.raises(ValueError, match="lay it out with a planner"):
        model.forward(flat_batch([Piece([1], 0, [0])], 16), cache(model))


def test_only_leading_one_token_requests_are_planned_as_decodes() -> None:
    """The plan treats the first requests of one token as decodes, and a later request of one token
    as prefill.
    """
    planner = KernelPlanner(AttentionShape(4, 2, 16), blocks=40, block_size=16)
    pieces = [
        Piece([1], 300, list(range(19))),
        Piece([1], 0, [20]),
        Piece([1] * 65, 5, [21, 22, 23, 24, 25]),
        Piece([1], 31, [30, 31]),
    ]
    batch = flat_batch(pieces, 16, planner=planner)
    assert batch.sizes[5:] == (2, 3, 2, 3, 0)
    assert batch.sizes.plan_words % 4 == 0
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is 40"):
        flat_batch([Piece([1], 0, [40])], 16, planner=planner)
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is 40"):
        flat_batch([Piece([1, 2], 0, [40])], 16, planner=planner)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_cache_is_written_and_read_as_by_torch(
    kv_dtype: str, models: dict[tuple[str, torch.dtype], Pair]
) -> None:
    """The kernels write and read a quantized cache as torch does, up to one unit of a byte that is
    rounded the other way.
    """
    plain, model = models["qwen3", torch.float32]
    ids, blocks = some_ids(300), list(range(19, -1, -1))
    wanted = full_logits(plain, ids, kv_dtype)
    kv = cache(model, 20, 16, kv_dtype)
    planner, made = planner_of(model, kv), []
    for start, stop in [
        (0, 280),
        (280, 281),
        (281, 290),
        (290, 291),
        *((n, n + 1) for n in range(291, 300)),
    ]:
        piece = Piece(ids[start:stop], start, blocks, wants_all=True)
        batch = flat_batch([piece], 16, planner=planner)
        made.append(model.forward(batch, kv))
    error = (torch.cat(made) - wanted).norm() / wanted.norm()
    assert error < 1e-2
    assert torch.cat(made).isfinite().all()


def test_requests_that_share_pages_get_the_right_logits(
    models: dict[tuple[str, torch.dtype], Pair],
) -> None:
    """Requests that share pages get the right logits: two groups with shared prefixes, one of which
    shares the other's first half, and a request alone.
    """
    plain, model = models["llama", torch.float64]
    kv = cache(model, 80, 16)
    planner = planner_of(model, kv)
    trunks = [some_ids(480), some_ids(480)[:256] + some_ids(300)[20:244]]
    shared = list(range(16))
    tables = [shared + list(range(16, 30)), shared + list(range(30, 44))]
    for trunk, table in zip(trunks, tables, strict=True):
        model.forward(flat_batch([Piece(trunk, 0, table)], 16, planner=planner), kv)
    owners = [0, 0, 1, 1, 0]
    pieces = [
        Piece([40 + row], 480, [*tables[owner], 50 + row]) for row, owner in enumerate(owners)
    ]
    pieces.append(Piece([3], 0, [60]))
    batch = flat_batch(pieces, 16, planner=planner)
    logits = model.forward(batch, kv)
    for row, owner in enumerate(owners):
        assert close(logits[row], full_logits(plain, [*trunks[owner], 40 + row])[-1], torch.float64)
    assert close(logits[-1], full_logits(plain, [3])[-1], torch.float64)
    token_bytes = 2 * 2 * model.config.head_dim * kv.pool.element_size() * model.config.layers
    # The plan saves at most the bytes of all shared pages; the costs decide how many.
    assert batch.saving.shared_prefix_groups >= 1
    assert 4 * 256 * token_bytes <= batch.saving.kv_bytes_saved <= 1696 * token_bytes


def test_views_of_a_layer_are_made_once(models: dict[tuple[str, torch.dtype], Pair]) -> None:
    """The views of a layer are made once, so that the kernels recognise their layout."""
    kv = cache(models["llama", torch.float32][0], 3, 8)
    first, last = kv.layer(0), kv.layer(1)
    assert kv.layer(0) is first
    last.v[2, 5] = 7.0
    assert kv.pool[2, :, 1, 1, 5].eq(7.0).all()
    assert kv.pool.eq(7.0).sum() == last.v[2, 5].numel()
