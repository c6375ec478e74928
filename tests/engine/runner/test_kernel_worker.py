"""Tests of a worker that uses the kernels' operators for attention, and of the choice between
kernels and torch.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main as cli
from engine.model.backends import KVKERNELS, MMA, SHAPES, TORCH, KernelChoice
from engine.model.batch import FlatBatch, Piece, fixed_batch, flat_batch
from engine.model.config import PLAIN, ModelConfig, ModelError, Quantization, Shard, read_config
from engine.model.kernel_attention import attention_of, shared_part
from engine.model.kernel_choice import choose_attention
from engine.model.tiny import TinySettings
from engine.runner.load import Computing
from engine.runner.needs import StepSettings
from engine.sampling.params import SamplingParams
from kvkernels.cuda.library import LIBRARY_VARIABLE
from kvkernels.ops.calibration import ALWAYS
from kvkernels.ops.shared_decode import workspace_of
from tests.effort import examples
from tests.engine.real import BLOCK_SIZE, COMPLETIONS, Reference, computing, greedy, loaded
from tests.engine.runner.arrivals import BLOCKS, Arrival, served
from tests.engine.tiny_models import written

HERE = (TORCH, KVKERNELS, MMA)  # ways that CPUs have
STEPS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"), TinySettings(request.param))


def test_tokens_equal_those_of_torch_in_every_loop(folder: Path) -> None:
    """The kernels give the same tokens as torch in every loop: mixed steps, padded steps,
    preemption, sampling with and without penalties.
    """
    model = loaded(folder, kv_tokens=BLOCKS * BLOCK_SIZE, max_num_tokens=24, max_batch_size=6)
    kernels = loaded(
        folder,
        kv_tokens=BLOCKS * BLOCK_SIZE,
        attention=KVKERNELS,
        max_num_tokens=24,
        max_batch_size=6,
    )
    samplings = [
        SamplingParams(temperature=float(n % 2), seed=n, frequency_penalty=0.5) for n in range(9)
    ]
    arrivals: Sequence[Arrival] = [
        Arrival((n % 2,) * 9 + (n,), 18 + n, one, frozenset(range(0, 264, 20)), 2 * n, None)
        for n, one in enumerate(samplings)
    ]
    plain = asyncio.run(served(model, arrivals))
    for overlap, cuda_graphs in STEPS:
        steps = StepSettings(overlap=overlap, cuda_graphs=cuda_graphs)
        made = asyncio.run(served(replace(kernels, steps=steps), arrivals))
        ids = {n: [token for token, _ in told] for n, told in made.tokens.items()}
        assert ids == {n: [token for token, _ in told] for n, told in plain.tokens.items()}
        assert made.ended == plain.ended


@settings(max_examples=examples(3), deadline=None)
@given(data=st.data())
def test_tokens_equal_those_of_torch_whichever_shapes_torch_computes(
    data: st.DataObject, folder: Path
) -> None:
    """Tokens are the same whichever shapes are left to torch, in steps of all shapes: shared
    prefixes, long contexts, hits.
    """
    possible = {shape: [way for way in ways if way in HERE] for shape, ways in SHAPES.items()}
    ways = {shape: data.draw(st.sampled_from(possible[shape])) for shape in SHAPES}
    graphs = data.draw(st.booleans())
    trunk = tuple(n % 250 for n in range(40))
    sampling = SamplingParams()
    arrivals = [Arrival((*trunk, n), 12, sampling, frozenset(), 4 * n, None) for n in range(3)]
    arrivals.append(Arrival((7, 8, 9), 30, sampling, frozenset(), 2, None))
    limits = {"kv_tokens": 64 * BLOCK_SIZE, "max_num_tokens": 24, "max_batch_size": 6}
    plain, model = (loaded(folder, attention=one, **limits) for one in (TORCH, KVKERNELS))
    assert isinstance(model.model, Computing)
    attention = attention_of(KVKERNELS, ways)
    model.model._transformer._attention = attention
    planner = replace(model.planner, ways=ways, costs=ALWAYS)
    steps = StepSettings(overlap=True, cuda_graphs=graphs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model.kernel_attention.LONG_TOKENS", 45)
        patch.setattr("tests.engine.runner.arrivals.BLOCKS", 64)
        made = asyncio.run(served(replace(model, planner=planner, steps=steps), arrivals))
        wanted = asyncio.run(served(replace(plain, steps=steps), arrivals))
    assert attention.fell_back == ""
    told, expected = (
        {n: [token for token, _ in own] for n, own in one.tokens.items()} for one in (made, wanted)
    )
    assert told == expected


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 2), marks=pytest.mark.full)])
async def test_ranks_get_the_plan_with_the_batch(ranks: tuple[int, int], tmp_path: Path) -> None:
    folder = written(tmp_path, TinySettings("qwen3"))
    prompt = list(range(30, 60))
    expected = Reference(folder).greedy(prompt, 12)
    model = loaded(folder, ranks=ranks, attention=KVKERNELS)
    try:
        async with computing(model) as worker:
            body = greedy(prompt, 12, ignore_eos=True, return_token_ids=True)
            status, answer = await worker.post(COMPLETIONS, body)
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
    finally:
        model.model.close()


@pytest.mark.parametrize("backend", [TORCH, KVKERNELS])
async def test_metrics_show_the_attention_backend(backend: str, folder: Path) -> None:
    async with computing(loaded(folder, attention=backend)) as worker:
        metrics = (await worker.get("/metrics")).decode()
    (line,) = re.findall(r"^warmroute_engine_attention_backend_info\{(.*)\} 1.0$", metrics, re.M)
    assert f'backend="{backend}"' in line
    assert 'because_of=""' in line


async def test_the_program_serves_with_the_kernels_and_prints_the_backend(tmp_path: Path) -> None:
    folder = written(tmp_path, TinySettings("llama"))
    prompt = list(range(30, 60))
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine", "serve", str(folder), "--port", "0", "--threads", "1"),
        *("--attention-backend", KVKERNELS, "--cuda-graphs", "--max-batch-size", "4"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    ready = (await program.stdout.readline()).decode().split()
    body = greedy(prompt, 12, ignore_eos=True, return_token_ids=True)
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{ready[1]}/v1/completions", json=body) as reply:
            answer = await reply.json()
        async with http.get(f"{ready[1]}/debug/steps") as reply:
            steps = json.loads(await reply.read())["steps"]
    program.terminate()
    _, said = await program.communicate()
    assert answer["choices"][0]["token_ids"] == Reference(folder).greedy(prompt, 12)
    assert [one["graph"] for one in steps] == ["chunks"] + ["hit"] * 11
    assert b"attention: kvkernels\n" in said


def test_the_memory_report_counts_partial_results(folder: Path) -> None:
    """The memory report counts the partial results of attention in the largest graph, and those of
    the longest contexts without a graph.
    """
    by_torch, without, with_graphs = (
        loaded(folder, attention=backend, steps=StepSettings(cuda_graphs=graphs)).capacity
        for backend, graphs in ((TORCH, True), (KVKERNELS, False), (KVKERNELS, True))
    )
    model = loaded(folder, attention=KVKERNELS)
    config, rows = model.config, model.capacity.max_batch_size
    longest = model.scheduler.max_model_tokens

    def taken(batch: FlatBatch) -> int:
        return sum(x.nbytes for x in workspace_of(shared_part(batch), config.heads, dim))

    dim, pages = config.head_dim, longest // BLOCK_SIZE
    empty = fixed_batch([], rows, pages, BLOCK_SIZE, planner=model.planner)
    table = empty.page_table.nbytes
    assert with_graphs.activation_bytes - without.activation_bytes == taken(empty) + table
    blocks = tuple(n % model.capacity.blocks for n in range(pages))
    full = [Piece([7], longest - 1, blocks) for _ in range(rows)]
    batch = flat_batch(full, BLOCK_SIZE, planner=model.planner)
    assert 0 < taken(batch) <= without.activation_bytes - by_torch.activation_bytes


def chosen(asked: str, config: ModelConfig, device: str, block_size: int = 16) -> KernelChoice:
    return choose_attention(asked, config, Shard(), device, "bfloat16", PLAIN, block_size)


def test_a_cpu_uses_torch_unless_the_kernels_are_configured(folder: Path) -> None:
    config = read_config(folder)
    assert chosen("auto", config, "cpu") == KernelChoice(TORCH)
    assert chosen(KVKERNELS, config, "cpu", block_size=7) == KernelChoice(KVKERNELS)
    made = choose_attention(
        KVKERNELS, config, Shard(), "cpu", "float32", Quantization(kv="int8"), 16
    )
    assert str(made) == KVKERNELS
    with pytest.raises(ValueError, match="attention_backend must be one of auto, torch, kvk"):
        chosen("flash", config, "cpu")


@pytest.mark.parametrize(
    ("change", "dtype", "block_size", "why"),
    [
        ({"head_dim": 96}, "bfloat16", 16, "head_dim 96 (the kernel has 64 and 128)"),
        ({"head_dim": 64}, "float32", 16, "dtype torch.float32 (the kernel has"),
        ({"head_dim": 64}, "float16", 24, "block_size 24 (the kernel has multiples of 16)"),
        ({"head_dim": 64, "heads": 34}, "float16", 16, "34 heads for 2 KV heads"),
    ],
)
def test_the_reason_names_the_missing_gpu_kernel(
    change: dict[str, int], dtype: str, block_size: int, why: str, folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """If no GPU kernel fits a model, the log gives the reason. The choice does not need the
    device, so this test runs without a GPU.
    """
    config = replace(read_config(folder), **change)
    made = choose_attention("auto", config, Shard(), "cuda", dtype, PLAIN, block_size)
    assert made.backend == TORCH
    assert why in made.why
    assert str(made).startswith("torch, because of ")
    assert f"attention: {made}" in caplog.messages
    with pytest.raises(ModelError, match=re.escape(why)):
        choose_attention(KVKERNELS, config, Shard(), "cuda", dtype, PLAIN, block_size)


def test_the_reason_names_a_missing_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(read_config(folder), head_dim=64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 7.5 (the kernels need 8.0)" in chosen("auto", config, "cuda").why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv(LIBRARY_VARIABLE, str(folder / "none.so"))
    assert f"{folder}/none.so is no file" in chosen("auto", config, "cuda").why
    monkeypatch.setenv(LIBRARY_VARIABLE, str(folder / "config.json"))
    assert "the kernels' library: " in chosen("auto", config, "cuda:0").why


def test_an_unknown_backend_flag_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "none", "--attention-backend", "flash"])
    assert ended.value.code == 2
    assert "--attention-backend" in capsys.readouterr().err


@pytest.mark.parametrize("cuda_graphs", [False, True])
async def test_the_saving_of_decodes_that_share_pages_is_counted(
    cuda_graphs: bool, folder: Path
) -> None:
    """The saving of decodes that share pages is counted: three requests read a shared prefix once,
    which saves exactly what two of them would have read.
    """
    trunk = [n % 250 for n in range(128 * BLOCK_SIZE)]
    steps = StepSettings(cuda_graphs=cuda_graphs)
    model = loaded(folder, attention=KVKERNELS, steps=steps, max_batch_size=4)
    async with computing(model) as worker:
        first = greedy([*trunk, 7], 3)
        await worker.post(COMPLETIONS, first)
        bodies = [greedy([*trunk, 200 + n], 6) for n in range(3)]
        await asyncio.gather(*(worker.post(COMPLETIONS, body) for body in bodies))
        told = json.loads(await worker.get("/debug/steps"))["steps"]
        metrics = (await worker.get("/metrics")).decode()
    config = model.config
    token_bytes = 2 * config.kv_heads * config.head_dim * 4 * config.layers
    together = [one for one in told if one["decode_tokens"] == 3]
    assert together
    for one in told:
        if one["batch_size"] < 2:
            assert (one["shared_prefix_groups"], one["kv_bytes_saved"]) == (0, 0)
    for one in together:
        assert one["shared_prefix_groups"] == 1
        assert one["kv_bytes_saved"] == 2 * len(trunk) * token_bytes
    for name in ("shared_prefix_groups", "kv_bytes_saved"):
        (total,) = re.findall(rf"^warmroute_engine_{name}_total\{{.*\}} (.*)$", metrics, re.M)
        assert float(total) == sum(one[name] for one in told)
