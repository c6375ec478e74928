"""Tests of the trial of each kernel at the engine's start, in the emulator and with kernels that
fail in every way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model import kernel_trial
from engine.model.backends import KVKERNELS, TORCH
from engine.model.config import ModelConfig, ModelError, Quantization, Shard, read_config
from engine.model.kernel_choice import choose_attention, choose_int8
from engine.model.kernel_trial import AttentionTrial, int8_fault
from engine.model.tiny import TinySettings, make_tiny
from kvkernels.cuda.library import LaunchError
from tests.kernels.emulated import emulate, emulator, needs_compiler

BF16 = torch.bfloat16
SMALL_GPU = 99 << 10  # bytes of shared memory a CTA: compute capability 8.6, 8.9, 12.0
HOPPER = 227 << 10

pytestmark = needs_compiler


@pytest.fixture
def small_gpu() -> Iterator[None]:
    limit = emulator().functions.wr_emulator_shared_limit
    limit(ctypes.c_int64(SMALL_GPU))
    yield
    limit(ctypes.c_int64(HOPPER))


@pytest.mark.parametrize(
    ("dim", "page", "stored"),
    [(64, 16, BF16), (128, 48, torch.int8), (64, 64, torch.float8_e4m3fn)],
)
def test_correct_kernels_pass_the_trial(dim: int, page: int, stored: torch.dtype) -> None:
    assert AttentionTrial(4, 1, dim, page, BF16, stored).first_fault(emulate, "cpu") == ""


def test_int8_weights_pass_the_trial_on_a_small_gpu(small_gpu: None) -> None:
    assert int8_fault(BF16, 64, emulate, "cpu") == ""


def test_the_trial_reports_a_gpu_with_too_little_shared_memory(small_gpu: None) -> None:
    """A GPU with too little shared memory for a kernel is named: 16-bit pages fit, and quantized
    pages at head_dim 128 do not.
    """
    assert AttentionTrial(4, 1, 128, 16, BF16, BF16).first_fault(emulate, "cpu") == ""
    why = AttentionTrial(4, 1, 128, 16, BF16, torch.int8).first_fault(emulate, "cpu")
    assert why == (
        "a trial: prefill: prefill needs 115712 bytes of shared memory, the device has 101376"
    )
    library = emulator()
    assert library.device().shared_bytes == SMALL_GPU


def failing(broken: str, how: Any) -> Any:
    """Return the CPU operators, of which `broken` is followed by `how(arguments)`, which spoils its
    result.
    """

    def run(name: str, *arguments: Any) -> None:
        getattr(torch.ops.warmroute, name)(*arguments)
        if name == broken:
            how(arguments)

    return run


def spoil_row(at: int) -> Any:
    """Return a function that changes one row of argument `at`, which the operator writes."""

    def spoil(arguments: Any) -> None:
        arguments[at][0] += 1

    return spoil


@pytest.mark.parametrize(
    ("name", "output"), [("append", 11), ("prefill", 9), ("shared_decode", 10)]
)
def test_one_wrong_row_fails_the_trial(name: str, output: int) -> None:
    why = AttentionTrial(4, 2, 64, 16, BF16, BF16).first_fault(
        failing(name, spoil_row(output)), "cpu"
    )
    if name == "append":  # page 0 is nobody's
        assert why == ""
        return
    assert why.startswith(f"a trial: {name} is ")


def test_the_trial_reports_a_library_of_another_architecture() -> None:
    def lacks(name: str, *arguments: Any) -> None:
        raise LaunchError(f"{name}: no kernel image is available for execution on the device")

    why = AttentionTrial(4, 2, 64, 16, BF16, BF16).first_fault(lacks, "cpu")
    assert why == "a trial: append: no kernel image is available for execution on the device"
    assert "no kernel image" in int8_fault(BF16, 64, lacks, "cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, TinySettings(heads=4, kv_heads=2, head_dim=64))
    return read_config(folder)


def test_torch_replaces_a_kernel_that_fails_its_trial(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch replaces a kernel that fails its trial. The test sets the device's answers, without a
    device.
    """
    monkeypatch.setattr("engine.model.kernel_choice.device_lacks", lambda device, kernels: "")
    monkeypatch.setattr(AttentionTrial, "first_fault", lambda self, run, device: "a trial: x")
    monkeypatch.setattr(kernel_trial, "int8_fault", lambda *_: "a trial: y")
    plain = Quantization()
    made = choose_attention("auto", config, Shard(), "cuda", "bfloat16", plain, 16)
    assert (made.backend, made.why) == (TORCH, "a trial: x")
    assert "attention: torch, because of a trial: x" in caplog.messages
    with pytest.raises(ModelError, match="attention_backend kvkernels cannot be: a trial: x"):
        choose_attention(KVKERNELS, config, Shard(), "cuda", "bfloat16", plain, 16)
    weights = Quantization(weights="int8")
    products = choose_int8("auto", config, [Shard()], "cuda", "bfloat16", weights)
    assert products is not None
    assert (products.backend, products.why) == (TORCH, "a trial: y")
