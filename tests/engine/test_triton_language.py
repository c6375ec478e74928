"""Decode in Triton's language behind the model, by its interpreter: chosen by name, and right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.model import kernel_choice
from engine.model.attention import attend, attend_fused
from engine.model.backends import KVKERNELS, TORCH, TRITON, KernelChoice
from engine.model.batch import Piece, fixed_batch, flat_batch
from engine.model.config import PLAIN, ModelConfig, ModelError, Shard, read_config
from engine.model.kernel_choice import choose_attention
from engine.model.kernel_trial import AttentionTrial
from engine.model.kv_cache import KvCache
from engine.model.tiny import TinySettings
from engine.runner.needs import StepSettings
from tests.engine.real import Reference, computing, greedy, ids_of, loaded
from tests.engine.test_attention_fused import HEADS, KV_HEADS, close, numbers
from tests.engine.test_kernel_costs import written as costs_file
from tests.engine.test_kernel_fallback import failing
from tests.engine.tiny_models import written

pytest.importorskip("triton", reason="triton is not installed: make test-native does it")

from kvkernels.ops import triton_decode as module
from kvkernels.ops.triton_decode import triton_decode

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = TinySettings("qwen3", heads=HEADS, kv_heads=KV_HEADS, head_dim=64)
    return written(tmp_path_factory.mktemp("model"), settings)


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return replace(read_config(folder), layers=1)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_step_of_decodes_and_chunks(dtype: torch.dtype, config: ModelConfig) -> None:
    """Decodes anywhere in it, on pages of NaN; and the same decodes in a fixed batch."""
    caches = [KvCache(config, 120, 16, dtype=kind) for kind in (dtype, torch.float64)]
    for cache in caches:
        cache.pool.fill_(float("nan"))
    layers = [cache.layer(0) for cache in caches]
    tokens, blocks = (600, 1, 40, 513), (range(40), range(40, 41), range(41, 45), range(50, 90))
    before = [
        Piece([1] * count, 0, list(own)) for count, own in zip(tokens, blocks, strict=True)
    ]  # fmt: skip
    numbers(flat_batch(before, 16), layers)
    pieces = [
        *(Piece([1], count - 1, list(own)) for count, own in zip(tokens, blocks, strict=True)),
        Piece([1] * 30, 10, list(blocks[2])),
    ]
    pieces = [pieces[0], pieces[1], pieces[4], pieces[3]]  # a chunk between them
    batch = flat_batch(pieces, 16)
    q = numbers(batch, layers)
    made = attend_fused(q.to(dtype), layers[0], batch, triton_decode)
    close(made, attend(q.double(), layers[1], batch), dtype)
    fixed = fixed_batch([pieces[0], pieces[3]], 4, 40, 16)
    q = q[:4]
    made = attend_fused(q.to(dtype), layers[0], fixed, triton_decode)
    close(made[:2], attend(q.double(), layers[1], fixed)[:2], dtype)


@pytest.mark.parametrize("cuda_graphs", [False, True])
async def test_a_worker_says_the_tokens_of_torch(folder: Path, cuda_graphs: bool) -> None:
    """With INT8 pages, too; and a Triton that fails is torch's from there on."""
    prompt = list(range(30, 60))
    steps = StepSettings(cuda_graphs=cuda_graphs)
    model = loaded(folder, attention=TRITON, steps=steps, max_batch_size=2)
    async with computing(model) as worker:
        wanted = Reference(folder).greedy(prompt, 6)
        assert await ids_of(worker, greedy(prompt, 6)) == wanted
        metrics = (await worker.get("/metrics")).decode()
        assert 'warmroute_engine_attention_backend_info{backend="triton",because_of=""' in metrics
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(module, "_merge")
            assert await ids_of(worker, greedy(prompt, 6)) == wanted
    assert model.model.fell_back == {
        "attention": "a kernel that failed: name '_merge' is not defined"
    }


async def test_decode_shapes_are_left_to_it_by_the_kernels(folder: Path, tmp_path: Path) -> None:
    prompt = list(range(30, 60))
    ways = {"decode_short": TRITON, "decode_long": TRITON}
    steps = StepSettings(kernel_costs=costs_file(tmp_path, ways=ways))
    model = loaded(folder, attention=KVKERNELS, steps=steps, block_size=16)
    assert str(model.attention) == "kvkernels; decode_short by triton; decode_long by triton"
    with failing("append", 1 << 20, ValueError()) as calls:  # counts them
        async with computing(model) as worker:
            wanted = Reference(folder).greedy(prompt, 4)
            assert await ids_of(worker, greedy(prompt, 4)) == wanted
    assert set(calls) == {"append", "prefill"}
    assert model.model.fell_back == {}


def chosen(asked: str, config: ModelConfig, device: str) -> KernelChoice:
    return choose_attention(asked, config, Shard(), device, "float32", PLAIN, 16)


def test_on_a_cpu_it_is_for_tests(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(TRITON, config, "cpu") == KernelChoice(TRITON)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ModelError, match="triton cannot be: a CPU, which has only Triton's inter"):
        chosen(TRITON, config, "cpu")
    assert chosen("auto", config, "cpu") == KernelChoice(TORCH)


def test_where_it_is_missing_or_wrong_is_said_by_name(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(*given: object) -> torch.Tensor:
        made = triton_decode(*given)  # type: ignore[arg-type]
        made[1] += 1
        return made

    trial = AttentionTrial(4, 2, 64, 16, BF16, torch.int8)
    assert trial.decode_why_not(triton_decode, "cpu") == ""
    assert trial.decode_why_not(off, "cpu").startswith("a trial: decode is ")
    assert "Triton kernel has" in kernel_choice._triton_lacks("cpu", lambda: FP8)
    monkeypatch.setattr(module, "_split", None)
    assert "a trial: 'NoneType'" in trial.decode_why_not(triton_decode, "cpu")
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="triton cannot be: Triton, which is not installed"):
        chosen(TRITON, config, "cpu")


FP8 = AttentionTrial(4, 2, 64, 16, BF16, torch.float8_e4m3fn)


def test_auto_takes_it_where_the_kernels_cannot_be(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a device's answer in place of a device; without one the trial fails."""
    why = "dtype torch.float32 (the kernel has bfloat16 and float16)"
    assert chosen("auto", config, "cuda") == KernelChoice(TORCH, why)
    assert "decode: torch, because of a trial: " in caplog.text
    monkeypatch.setattr(AttentionTrial, "decode_why_not", lambda self, decode, device: "")
    made = chosen("auto", config, "cuda")
    assert made == KernelChoice(TRITON, why)
    assert str(made) == f"triton, because of {why}"
    assert "decode: triton in place of torch" in caplog.messages
