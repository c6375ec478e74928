"""Tests of kernels that fail while requests run: torch takes over, the failed kernel is named, and
every request is answered.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.backends import KVKERNELS, device_lost
from engine.model.config import Quantization
from engine.model.tiny import TinySettings
from engine.runner.compute import Compute
from engine.runner.load import Loaded
from engine.runner.needs import StepSettings
from engine.runner.runner import EngineFailed
from engine.sampling.params import SamplingParams
from kvkernels.cuda.library import LaunchError, RefusedError
from tests.effort import examples
from tests.engine.real import BLOCK_SIZE, COMPLETIONS, computing, greedy, ids_of, loaded
from tests.engine.runner.arrivals import ARRIVALS, BLOCKS, Arrival, Clients, served
from tests.engine.runner.failing import OPERATORS, breaking, failing
from tests.engine.tiny_models import written

FAILURES = (
    RefusedError("prefill needs 115712 bytes of shared memory, the device has 101376"),
    LaunchError("no kernel image is available for execution on the device"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"), TinySettings("qwen3"))


def model_of(folder: Path, attention: str, steps: StepSettings) -> Loaded:
    small = {"max_num_tokens": 24, "max_batch_size": 4, "min_chunk_tokens": 4}
    tokens = BLOCKS * BLOCK_SIZE
    return loaded(folder, kv_tokens=tokens, attention=attention, steps=steps, **small)


def ids(clients: Clients) -> dict[int, list[int]]:
    return {number: [token for token, _ in told] for number, told in clients.tokens.items()}


@settings(max_examples=examples(12), deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    name=st.sampled_from(OPERATORS),
    at_call=st.integers(0, 60),
    error=st.sampled_from(FAILURES),
    steps=st.builds(StepSettings, overlap=st.booleans(), cuda_graphs=st.booleans()),
)
def test_a_kernel_failure_at_any_call_changes_no_answer(
    arrivals: list[Arrival],
    name: str,
    at_call: int,
    error: Exception,
    steps: StepSettings,
    folder: Path,
) -> None:
    """A kernel that fails at any call, also in the middle of a step's layers, changes no answer. No
    client leaves in this test, because that would change the times of the steps.
    """
    arrivals = sorted(
        (replace(one, leaves_at_step=None) for one in arrivals), key=lambda a: a.at_step
    )
    whole = asyncio.run(served(model_of(folder, KVKERNELS, steps), arrivals))
    model = model_of(folder, KVKERNELS, steps)
    with failing(name, at_call, error) as calls:
        made = asyncio.run(served(model, arrivals))
    assert ids(made) == ids(whole)
    assert made.ended == whole.ended
    has_failed = calls.count(name) > at_call
    why = f"a kernel that failed: {error}"
    assert model.model.fell_back == ({"attention": why} if has_failed else {})
    assert calls.count(name) <= at_call + 1  # no kernel is tried again


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_results_after_a_kernel_failure_have_torchs_bits(folder: Path, cuda_graphs: bool) -> None:
    """After a kernel has failed, results have torch's bits, log-probabilities included."""
    steps = StepSettings(overlap=True, cuda_graphs=cuda_graphs)
    sampling = SamplingParams(temperature=1.0, seed=3, logprobs=2)
    arrivals = [Arrival((n, 1, 2), 20, sampling, frozenset(), 2 * n, None) for n in range(6)]
    plain = asyncio.run(served(model_of(folder, "torch", StepSettings(overlap=True)), arrivals))
    with failing("append", 0, FAILURES[0]):
        made = asyncio.run(served(model_of(folder, KVKERNELS, steps), arrivals))
    assert made.tokens == plain.tokens


async def test_metrics_show_the_backend_after_a_kernel_failure(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = StepSettings(cuda_graphs=True)
    model = model_of(folder, KVKERNELS, steps)
    prompt = list(range(30, 50))
    async with computing(model) as worker:
        wanted = await ids_of(worker, greedy(prompt, 9))
        with failing("shared_decode", 6, FAILURES[1]):
            status, _ = await worker.post(COMPLETIONS, greedy(prompt[1:], 9))
            assert status == 200
        assert await ids_of(worker, greedy(prompt, 9)) == wanted
        metrics = (await worker.get("/metrics")).decode()
        told = json.loads(await worker.get("/debug/steps"))["steps"]
    (line,) = re.findall(r"^warmroute_engine_attention_backend_info\{(.*)\} 1.0$", metrics, re.M)
    assert 'backend="torch"' in line
    assert f'because_of="a kernel that failed: {FAILURES[1]}"' in line
    text = f"attention: torch from here on, because of a kernel that failed: {FAILURES[1]}"
    assert caplog.messages.count(text) == 1
    assert {one["graph"] for one in told} == {"chunks", "hit", "fallback"}
    assert told[-1]["graph"] == "fallback"
    assert (
        'warmroute_engine_graph_steps_total{engine="0",model_name="tiny",use="fallback"}' in metrics
    )


@pytest.mark.parametrize("cuda_graphs", [False, True])
async def test_int8_products_fall_back_to_torch_but_attention_does_not(
    folder: Path, cuda_graphs: bool
) -> None:
    """If the kernel for INT8 weights fails in the middle of a layer, torch computes these products,
    and attention stays with the kernels.
    """
    prompt, steps = list(range(30, 50)), StepSettings(cuda_graphs=cuda_graphs)
    settings = {"quantization": Quantization("int8"), "steps": steps, "max_batch_size": 2}
    model = loaded(folder, attention=KVKERNELS, int8=KVKERNELS, **settings)
    async with computing(model) as worker:
        wanted = await ids_of(worker, greedy(prompt, 9))
        with failing("w8a16", 13, FAILURES[1]) as calls:
            assert await ids_of(worker, greedy(prompt, 9)) == wanted
        metrics = (await worker.get("/metrics")).decode()
        told = json.loads(await worker.get("/debug/steps"))["steps"]
    assert calls.count("w8a16") == 14
    assert model.model.fell_back == {"int8": f"a kernel that failed: {FAILURES[1]}"}
    assert 'warmroute_engine_int8_backend_info{backend="torch"' in metrics
    assert 'warmroute_engine_attention_backend_info{backend="kvkernels"' in metrics
    assert told[-1]["int8"] == "torch"
    assert told[-1]["graph"] == ("fallback" if cuda_graphs else None)


@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((2, 1), marks=pytest.mark.full)])
async def test_all_ranks_stop_using_kernels_with_the_first_rank(
    ranks: tuple[int, int], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the first rank's kernels fail, the other ranks also stop using theirs, since they get no
    more plans.
    """
    prompt = list(range(30, 50))
    model = loaded(folder, ranks=ranks, attention=KVKERNELS)
    try:
        async with computing(model) as worker:
            wanted = await ids_of(worker, greedy(prompt, 9))
            with failing("shared_decode", 3, FAILURES[0]):
                assert await ids_of(worker, greedy(prompt, 9)) == wanted
            assert await ids_of(worker, greedy(prompt, 9)) == wanted
    finally:
        model.model.close()
    assert model.model.fell_back == {"attention": f"a kernel that failed: {FAILURES[0]}"}
    assert "a batch without the kernels' plan: rank 0 has fallen back" in capfd.readouterr().err


async def test_out_of_memory_is_not_treated_as_a_failed_kernel(folder: Path) -> None:
    """A lack of memory is not treated as a failed kernel: the step fails as usual, because torch's
    attention needs even more memory.
    """
    model = loaded(folder, attention=KVKERNELS)
    async with computing(model) as worker:
        with failing("prefill", 0, torch.OutOfMemoryError("CUDA out of memory")):
            status, _ = await worker.post(COMPLETIONS, greedy([1, 2, 3], 4))
        assert status == 500
        status, _ = await worker.post(COMPLETIONS, greedy([1, 2, 3], 4))
        assert status == 200
    assert model.model.fell_back == {}


async def test_a_lost_device_ends_the_worker_at_the_first_failed_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose device is lost ends at the first failed step, and its supervisor starts a new
    process. The test sets the device's answer, without a device.
    """
    assert device_lost("cpu") == ""
    monkeypatch.setattr(Compute, "lost", lambda self: "an illegal memory access was encountered")

    async def fail_once() -> None:
        async with computing(breaking(folder, {2})) as worker:
            await worker.post(COMPLETIONS, greedy([1, 2, 3], 9))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await fail_once()
    failed = ended.value.subgroup(EngineFailed)
    assert failed is not None
    assert "the device is lost to this process: an illegal memory" in str(failed.exceptions[0])
