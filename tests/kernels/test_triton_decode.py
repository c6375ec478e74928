"""Decode in Triton's language: by its interpreter against float64, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.gpu.bare import ROOT
from tests.effort import examples
from tests.kernels.emulated import ON_GPU, moved, relative_error
from tests.kernels.quantized import LOSS
from tests.kernels.shared_cases import Case, alone, exact, quantized

pytest.importorskip("triton", reason="triton is not installed: make test-native does it")

from kvkernels.ops.triton_decode import SPLIT, triton_decode, unsupported

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = "cuda" if ON_GPU else "cpu"
BOUND = {BF16: 5e-3, torch.float16: 1e-3, FP32: 2e-6}
EDGES = (0, 1, 2, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 33)


def by_triton(one: Case, lengths: list[int], longest: int | None = None) -> torch.Tensor:
    """By the interpreter; on the GPU that is there, as `emulate` does."""
    context = torch.tensor(lengths, dtype=torch.int32)
    most = max(lengths) if longest is None else longest
    pages = one.k_pages, one.v_pages, one.page_table
    with moved((one.q, *pages, context, one.k_scales, one.v_scales), DEVICE) as given:
        return triton_decode(*given[:5], one.scale, most, (given[5], given[6])).cpu()


@settings(max_examples=examples(4), deadline=None)
@given(
    lengths=st.lists(st.sampled_from(EDGES), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    dim=st.sampled_from([64, 128]),
    page_tokens=st.sampled_from([1, 7, 16, 48, 64]),
    dtype=st.sampled_from([BF16, torch.float16, FP32]),
    beyond=st.integers(0, 2),
)
def test_ragged_requests_on_scattered_pages(
    lengths: list[int], group: int, dim: int, page_tokens: int, dtype: torch.dtype, beyond: int
) -> None:
    """Whatever is none of theirs is NaN; `longest` may be longer than any."""
    one = alone(lengths, group, 2, dim, page_tokens, dtype)
    made = by_triton(one, lengths, max(lengths) + beyond * SPLIT)
    expected = exact(one, torch.tensor(lengths))
    assert made.dtype == dtype
    for row, length in enumerate(lengths):
        if length:
            assert relative_error(made[row], expected[row]) < BOUND[dtype]
        else:
            assert not made[row].any()


@pytest.mark.parametrize("dim", [64, 128])
def test_pages_of_int8(dim: int) -> None:
    lengths = [1, SPLIT + 5, 100]
    context, one = torch.tensor(lengths), alone(lengths, 4, 2, dim)
    kept = quantized(one, torch.int8)
    made = by_triton(kept, lengths)
    assert relative_error(made, exact(kept, context)) < BOUND[BF16]
    assert relative_error(made, exact(one, context)) < LOSS[torch.int8]


@pytest.mark.parametrize("dim", [16, 96])
def test_other_heads_are_padded(dim: int) -> None:
    one = alone([33, 70], 2, 1, dim, dtype=FP32)
    made = by_triton(one, [33, 70])
    assert relative_error(made, exact(one, torch.tensor([33, 70]))) < BOUND[FP32]


def test_a_requests_bits_are_its_own() -> None:
    """Whoever stands beside it, however much room there is."""
    lengths = [600, 40, 1100]
    one = alone(lengths, dtype=BF16)
    together = by_triton(one, lengths, 4 * SPLIT)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        single = one._replace(q=one.q[own], page_table=one.page_table[own])
        assert torch.equal(by_triton(single, [length])[0], together[row])


def test_what_it_does_not_have_is_named() -> None:
    assert unsupported(BF16, BF16) == unsupported(torch.float16, torch.int8) == ""
    assert "torch.float64" in unsupported(torch.float64, torch.float64)
    assert "float8_e4m3fn" in unsupported(BF16, torch.float8_e4m3fn)
    one = alone([5])
    with pytest.raises(ValueError, match="equal strides"):
        by_triton(one._replace(v_pages=one.v_pages.contiguous()), [5])


COMPILED = """
import sys
from tests.bench.gpu import bare
bare.make_importable()
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvkernels.ops import triton_decode as module

def compiled(kernel, given):
    types = {name: "constexpr" for name in kernel.arg_names} | {
        name: kind for name, kind in given.items() if isinstance(kind, str)}
    fixed = {(kernel.arg_names.index(name),): value
             for name, value in given.items() if not isinstance(value, str)}
    source = ASTSource(kernel, types, constexprs=fixed)
    return compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))

ints = dict.fromkeys(("splits", "page_stride", "token_stride", "head_stride", "scale_page",
                      "scale_token", "scale_head", "table_row"), "i32")
sizes = dict(group=4, padded_group=16, head_dim=128, padded_dim=128, page_tokens=16,
             split_tokens=module.SPLIT)
floats = dict(partial="*fp32", partial_lse="*fp32")
for kind, stored, scales, wide in (
    ("bf16", "bf16", None, False), ("bf16", "i8", "*fp32", False), ("fp32", "fp32", None, True)
):
    made = compiled(module._split, ints | sizes | floats | dict(
        q="*" + kind, k_pages="*" + stored, v_pages="*" + stored, k_scales=scales,
        v_scales=scales, table="*i32", context="*i32", scale="fp32", tile=32 if wide else 64,
        is_quantized=scales is not None, is_wide=wide))
    print("split", kind, made.metadata.shared, "mma" in made.asm["ptx"], len(made.asm["cubin"]))
made = compiled(module._merge, floats | dict(
    context="*i32", out="*bf16", splits="i32", head_dim=128, padded_dim=128,
    split_tokens=module.SPLIT))
print("merge", "bf16", made.metadata.shared, False, len(made.asm["cubin"]))
"""
SMALLEST = 99 << 10  # bytes of shared memory a CTA has on GPUs since compute capability 8.0


@pytest.mark.parametrize("capability", ["90", pytest.param("80", marks=pytest.mark.full)])
def test_both_kernels_compile(capability: str, tmp_path: object) -> None:
    """By Triton's own compiler and ptxas, which need no GPU."""
    surroundings = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, capability],
        env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["split", "split", "split", "merge"]
    assert all(int(row[2]) < SMALLEST and int(row[4]) > 0 for row in rows)
    assert [row[3] for row in rows] == ["True", "True", "False", "False"]  # tensor cores
