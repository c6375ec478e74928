"""Tests of the whole model in bfloat16 with the kernels' device code, run in the emulator.

What the engine passes (views of the pool, plans inside a batch, tables, slots, weights) must be
what the kernels accept. They refuse anything else by name and check every address.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.batch import Piece, fixed_batch, flat_batch
from engine.model.checkpoint import Checkpoint
from engine.model.config import Quantization, read_config
from engine.model.kernel_attention import KernelAttention, KernelPlanner
from engine.model.tiny import TinySettings
from engine.model.transformer import Transformer
from kvkernels.ops.shared_costs import AttentionShape
from tests.engine.tiny_models import cache, full_logits, loaded, some_ids, written
from tests.kernels.emulated import emulate, needs_compiler, relative_error

pytestmark = needs_compiler
PAGE, BF16 = 16, torch.bfloat16
TOLERANCES = {"auto": 2e-2, "int8": 3e-2, "fp8": 8e-2}


class Emulated(TorchDispatchMode):
    """Runs the kernels' operators in the emulator, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "warmroute":
            return func(*args, **(kwargs or {}))
        self.names.append(func._opname)
        return emulate(func._opname, *args)


@pytest.mark.parametrize(
    ("arch", "head_dim", "kv_dtype"),
    [("llama", 64, "auto"), ("qwen3", 128, "auto"), ("qwen3", 64, "int8"), ("llama", 128, "fp8")],
)
def test_emulated_mixed_steps_and_decodes_on_fixed_buffers_are_right(
    arch: str, head_dim: int, kv_dtype: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, TinySettings(arch, head_dim=head_dim))
    with Checkpoint(folder) as checkpoint:
        model = Transformer(
            read_config(folder), checkpoint, dtype=BF16, attention=KernelAttention()
        )
    exact = loaded(folder)
    kv = cache(model, 16, PAGE, kv_dtype)
    kv.pool.view(torch.uint8).fill_(0xFF)  # NaN, or -1
    if kv.scales is not None:
        kv.scales.fill_(float("nan"))
    before = kv.pool[kv.blocks].view(torch.uint8).clone()
    planner = KernelPlanner(AttentionShape(4, 2, head_dim, layers=2), kv.blocks, PAGE)
    prompts = [some_ids(60), some_ids(50)[7:]]
    first, second = [9, 2, 5, 7, 11], [1, 8, 0, 3]
    steps = [
        [Piece(prompts[0][:33], 0, first)],
        [Piece(prompts[0][33:34], 33, first), Piece(prompts[1][:20], 0, second)],
        [Piece(prompts[0][34:59], 34, first), Piece(prompts[1][20:42], 20, second)],
    ]
    with Emulated() as emulated:
        for pieces in steps:
            model.forward(flat_batch(pieces, PAGE, planner=planner), kv)
        decodes = [Piece(prompts[0][59:], 59, first), Piece(prompts[1][42:], 42, second)]
        static = fixed_batch([], 4, 6, PAGE, planner=planner)
        model.forward(static, kv)
        static.data.copy_(fixed_batch(decodes, 4, 6, PAGE, planner=planner).data)
        logits = model.forward(static, kv)
    decode = ["shared_decode"] * 2
    wanted = ["prefill"] * 2 + ["shared_decode", "prefill"] * 2 + ["prefill"] * 2 + decode * 2
    assert [name for name in emulated.names if name != "append"] == wanted
    for row, prompt in enumerate(prompts):
        expected = full_logits(exact, prompt, kv_dtype)[-1]
        assert relative_error(logits[row], expected) < TOLERANCES[kv_dtype]
    # Padding is kept nowhere, not in the scratch block.
    assert torch.equal(kv.pool[kv.blocks].view(torch.uint8), before)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_int8_weights_give_the_same_numbers_in_kernel_and_torch(arch: str, tmp_path: Path) -> None:
    """INT8 weights give the same numbers by the kernel, in steps of up to 64 rows, and by torch in
    larger steps; with biases too.
    """
    folder = written(tmp_path, TinySettings(arch, head_dim=64, intermediate_size=192))
    ids, blocks = some_ids(100), list(range(7))
    made = {}
    for int8_kernel in (False, True):
        with Checkpoint(folder) as checkpoint:
            model = Transformer(
                *(read_config(folder), checkpoint, "cpu", BF16),
                quantization=Quantization("int8-all"),
                int8_kernel=int8_kernel,
            )
        kv = cache(model, 7, PAGE)
        with Emulated() as emulated:
            rows = [
                model.forward(flat_batch([Piece(ids[at:end], at, blocks, True, True)], PAGE), kv)
                for at, end in ((0, 65), (65, 99), (99, 100))
            ]
        # Four matrices a layer, and the last one; those of 65 rows are torch's.
        assert emulated.names == ["w8a16"] * (2 * (2 * 4 + 1) if int8_kernel else 0)
        made[int8_kernel] = torch.cat(rows)
    assert relative_error(made[True], made[False].double()) < 2e-2
