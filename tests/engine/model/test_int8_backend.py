"""Tests of the backend that multiplies INT8 weights: it is chosen by name and counted, and all
backends give the same tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cli import main as cli
from engine.model.backends import KVKERNELS, MOST_ROWS, TORCH, Int8Choice
from engine.model.config import PLAIN, ModelError, Quantization, Shard, read_config
from engine.model.kernel_choice import choose_int8
from engine.model.layers import Int8Kernel, Int8Weight, Linear, quantize_rows
from engine.model.tiny import TinySettings
from kvkernels.cuda.library import LIBRARY_VARIABLE
from kvkernels.ops.w8a16 import MAX_ROWS
from tests.engine.real import computing, greedy, ids_of, loaded
from tests.engine.tiny_models import written

INT8 = Quantization("int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"), TinySettings("qwen3"))


def chosen(
    asked: str, folder: Path, device: str = "cuda", dtype: str = "bfloat16", **shape: int
) -> Int8Choice | None:
    config = replace(read_config(folder), **shape)
    shards = [Shard(rank, 2) for rank in range(2)]
    return choose_int8(asked, config, shards, device, dtype, INT8)


@pytest.mark.parametrize("bias", [None, torch.arange(70.0)])
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_products_equal_those_of_torch(rows: int, bias: torch.Tensor | None) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 96, generator=draw) for n in (rows, 70))
    kept = Int8Weight(*quantize_rows(weight), torch.float32)
    made = Linear(kept._replace(kernel=Int8Kernel()), bias)(x)
    assert torch.allclose(made, Linear(kept, bias)(x), rtol=1e-5, atol=1e-5)


def test_steps_above_the_kernels_row_limit_use_torch() -> None:
    assert MOST_ROWS <= MAX_ROWS
    assert Int8Choice(KVKERNELS).of_step(MOST_ROWS) == KVKERNELS
    assert Int8Choice(KVKERNELS).of_step(MOST_ROWS + 1) == TORCH
    assert Int8Choice(TORCH).of_step(1) == TORCH


async def test_a_worker_counts_int8_steps_and_gives_the_same_tokens(folder: Path) -> None:
    prompt = list(range(30, 130))
    said = {}
    for backend in (TORCH, KVKERNELS):
        model = loaded(folder, quantization=INT8, int8=backend)
        async with computing(model) as worker:
            said[backend] = await ids_of(worker, greedy(prompt, 6))
            steps = json.loads(await worker.get("/debug/steps"))["steps"]
            metrics = (await worker.get("/metrics")).decode()
        used = [TORCH, *[backend] * 5]  # the prompt has more rows than the kernel
        assert [one["int8"] for one in steps] == used
        pattern = r"^warmroute_engine_int8_steps_total\{backend=\"(\w+)\",.*\} (\S+)$"
        counted = {name: float(count) for name, count in re.findall(pattern, metrics, re.M)}
        assert counted == {name: used.count(name) for name in set(used)}
        (line,) = re.findall(r"^warmroute_engine_int8_backend_info\{(.*)\} 1.0$", metrics, re.M)
        assert f'backend="{backend}"' in line
    assert said[TORCH] == said[KVKERNELS]


async def test_a_worker_without_int8_weights_has_no_int8_metrics(folder: Path) -> None:
    async with computing(loaded(folder, int8=KVKERNELS)) as worker:
        await ids_of(worker, greedy([1, 2], 2))
        steps = json.loads(await worker.get("/debug/steps"))["steps"]
        assert b"warmroute_engine_int8" not in await worker.get("/metrics")
    assert {one["int8"] for one in steps} == {None}


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 2), marks=pytest.mark.full)])
async def test_all_ranks_multiply_with_the_int8_operator(
    folder: Path, ranks: tuple[int, int]
) -> None:
    body, said = greedy(list(range(30, 60)), 6), []
    for size, backend in (((1, 1), TORCH), (ranks, KVKERNELS)):
        model = loaded(folder, quantization=INT8, ranks=size, int8=backend)
        try:
            async with computing(model) as worker:
                said.append(await ids_of(worker, body))
                steps = json.loads(await worker.get("/debug/steps"))["steps"]
        finally:
            model.model.close()
        assert {one["int8"] for one in steps} == {backend}
    assert said[0] == said[1]


def test_a_cpu_uses_torch_unless_the_kernels_are_configured(folder: Path) -> None:
    assert chosen("auto", folder, "cpu", "float32") == Int8Choice(TORCH)
    assert chosen(KVKERNELS, folder, "cpu", "float32") == Int8Choice(KVKERNELS)
    assert choose_int8(KVKERNELS, read_config(folder), [Shard()], "cuda", "float32", PLAIN) is None
    with pytest.raises(ValueError, match="int8_backend must be one of auto, torch, kvkernels"):
        chosen("cutlass", folder)


@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [
        ("float32", {}, "dtype torch.float32 (the kernel has"),
        ("bfloat16", {"hidden_size": 96}, "96 inputs (the kernel has multiples of 64"),
        ("float16", {"intermediate_size": 192}, "96 inputs (the kernel has"),  # of each rank
        ("float16", {"intermediate_size": 256, "head_dim": 24}, "48 inputs (the kernel has"),
    ],
)
def test_the_reason_names_the_missing_gpu_kernel(
    dtype: str, shape: dict[str, int], why: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a GPU has no kernel for a model, the reason is named before the device is asked, and so on
    any machine.
    """
    made = chosen("auto", folder, dtype=dtype, **{"head_dim": 64} | shape)
    assert made is not None
    assert made.backend == TORCH
    assert why in made.why
    assert f"INT8 weights: {made}" in caplog.messages
    with pytest.raises(ModelError, match=re.escape(why)):
        chosen(KVKERNELS, folder, dtype=dtype, **{"head_dim": 64} | shape)


def test_the_reason_names_a_missing_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv(LIBRARY_VARIABLE, str(folder / "none.so"))
    made = chosen("auto", folder, head_dim=64, intermediate_size=256)
    assert made is not None
    assert f"{folder}/none.so is no file" in made.why


def test_an_unknown_backend_flag_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "none", "--int8-backend", "cutlass"])
    assert ended.value.code == 2
    assert "--int8-backend" in capsys.readouterr().err
