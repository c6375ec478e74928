"""Tests that a sharded model equals the whole one: tensor-parallel ranks in threads, and stages one
after another.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.model.batch import Piece, flat_batch
from engine.model.checkpoint import Checkpoint
from engine.model.config import PLAIN, ModelError, Quantization, Shard, read_config
from engine.model.kv_cache import KvCache
from engine.model.tiny import TinySettings
from engine.model.transformer import Transformer
from tests.engine.tiny_models import full_logits, loaded, some_ids, written

IDS = some_ids(70)
BATCH = flat_batch([Piece(IDS, 0, [4, 1, 3, 0, 2], wants_all=True)], 16)
WAIT_S = 60.0


class RankBarrier:
    """A barrier of ranks, which are threads of one process: each rank waits for all others, then
    reads their values.
    """

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._brought: dict[int, torch.Tensor] = {}

    def all_of(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._brought[rank] = x
        self._barrier.wait()
        found = [self._brought[other] for other in sorted(self._brought)]
        self._barrier.wait()
        return found


class Rank:
    """One tensor-parallel rank, which exchanges values with the others at a `RankBarrier`."""

    def __init__(self, barrier: RankBarrier, rank: int) -> None:
        self._barrier, self._rank = barrier, rank

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._barrier.all_of(self._rank, x)).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._barrier.all_of(self._rank, x), dim=-1)


def run_stage(
    folder: Path,
    tp_size: int,
    stage: tuple[int, int],
    hidden: torch.Tensor | None = None,
    quantization: Quantization = PLAIN,
) -> list[torch.Tensor]:
    """Return what each rank of one pipeline stage computes for BATCH."""
    config, barrier = read_config(folder), RankBarrier(tp_size)

    def run(rank: int) -> torch.Tensor:
        shard = Shard(rank, tp_size, *stage)
        with Checkpoint(folder) as checkpoint:
            model = Transformer(
                config,
                checkpoint,
                dtype=torch.float64,
                shard=shard,
                ranks=Rank(barrier, rank),
                quantization=quantization,
            )
        kv = KvCache(config, 5, 16, dtype=torch.float64, shard=shard, kv=quantization.kv)
        per_token = kv.nbytes // (6 * 16)
        assert per_token == config.kv_bytes_per_token("float64", shard, quantization)
        return model.forward(BATCH, kv, hidden)

    with ThreadPoolExecutor(tp_size) as threads:
        return list(threads.map(run, range(tp_size)))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("size", [2, 4])  # four ranks share two KV heads
def test_tensor_parallel_ranks_give_the_logits_of_the_full_model(
    arch: str, size: int, tmp_path: Path
) -> None:
    folder = written(tmp_path, TinySettings(arch, shards=2))
    expected = full_logits(loaded(folder), IDS)
    for logits in run_stage(folder, size, (0, 1)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("weights", ["int8", "int8-all"])
@pytest.mark.parametrize("size", [2, 4])
def test_quantized_shards_are_parts_of_the_full_quantized_model(
    size: int, weights: str, tmp_path: Path
) -> None:
    folder, quantization = written(tmp_path, TinySettings("qwen2")), Quantization(weights, "int8")
    expected = full_logits(loaded(folder, quantization=quantization), IDS, "int8")
    for logits in run_stage(folder, size, (0, 1), quantization=quantization):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    # A looser bound would accept scales computed over a shard's own columns.
    plain = full_logits(loaded(folder), IDS)
    assert float((expected - plain).abs().max()) > 1e-4


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("is_tied", [False, True])
def test_pipeline_stages_give_the_logits_of_the_full_model(
    tp_size: int, is_tied: bool, tmp_path: Path
) -> None:
    folder = written(tmp_path, TinySettings("llama", layers=3, is_tied=is_tied))
    between = run_stage(folder, tp_size, (0, 2))
    assert between[0].shape == (70, 64)
    for logits in run_stage(folder, tp_size, (1, 2), between[0]):
        torch.testing.assert_close(logits, full_logits(loaded(folder), IDS), rtol=0, atol=1e-10)


def test_a_later_stage_needs_hidden_states(tmp_path: Path) -> None:
    folder = written(tmp_path, TinySettings())
    with pytest.raises(ValueError, match="stage 1 needs the hidden states"):
        run_stage(folder, 1, (1, 2))


def test_each_stage_gets_an_equal_run_of_layers() -> None:
    for total in range(1, 12):
        for size in range(1, total + 1):
            runs = [list(Shard(0, 1, rank, size).layers(total)) for rank in range(size)]
            assert [layer for run in runs for layer in run] == list(range(total))
            assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (Shard(0, 3), "num_attention_heads 4 cannot be cut into 3"),
        (Shard(0, 1, 0, 3), "2 layers are fewer than 3 stages"),
    ],
)
def test_shards_that_do_not_divide_the_model_are_rejected(
    shard: Shard, said: str, tmp_path: Path
) -> None:
    config = read_config(written(tmp_path, TinySettings()))
    with pytest.raises(ModelError, match=said):
        config.check_shard(shard)


@pytest.mark.parametrize("ranks", [(2, 2, 0, 1), (0, 1, -1, 1), (0, 0, 0, 1)])
def test_ranks_outside_their_group_are_rejected(ranks: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="is outside"):
        Shard(*ranks)
