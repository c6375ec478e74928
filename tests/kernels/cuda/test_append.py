"""Tests of the operator `append`: the kernel in the emulator and the CPU implementation, against
float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.append import unsupported
from tests.kernels.cuda.append_cases import case, check_result, dequantized_pages, in_emulator
from tests.kernels.emulated import emulate, needs_compiler

pytestmark = needs_compiler


RUNS = {"emulator": in_emulator, "cpu": torch.ops.warmroute.append}
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.int8: 1e-2, torch.float8_e4m3fn: 4e-2}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
def test_append_agrees_with_float64(
    run: Any, dim: int, norm: bool, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    slots = [0, 63, -1, 17, 31, 32, 5]
    made = case(slots, 5, 3, dim, dtype, stored, norm, seed=dim)
    check_result(run, made, BOUNDS[stored or dtype])


@given(
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 16, 48]),
    order=st.randoms(use_true_random=False),
    tokens=st.integers(0, 12),
    seed=st.integers(0, 1 << 20),
)
def test_append_is_right_for_any_shape(
    heads: int, kv_heads: int, page_tokens: int, order: Any, tokens: int, seed: int
) -> None:
    there = 12 // page_tokens + 1
    slots = order.sample(range(there * page_tokens), min(tokens, there * page_tokens))
    slots = [-1 if order.random() < 0.2 else slot for slot in slots]
    made = case(
        slots, heads, kv_heads, 64, pages=there, page_tokens=page_tokens, norm=True, seed=seed
    )
    if slots:
        check_result(lambda *a: emulate("append", *a, seed=seed), made, BOUNDS[torch.bfloat16])
    else:
        in_emulator(*made.arguments())


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_zeros_and_nan_survive_quantization(stored: torch.dtype) -> None:
    for run in RUNS.values():
        made = case([0, 1], stored=stored)
        made.v[0] = 0
        made.v[1, 0, 77] = float("nan")
        run(*made.arguments())
        got = dequantized_pages(made.v_pages, made.v_scales)
        assert (got[0, 0] == 0).all()
        assert got[0, 1, 0].isnan().all()
        assert not got[0, 1, 1].isnan().any()


def test_slots_beyond_the_pool_are_not_written() -> None:
    made = case([64, 1 << 40, -5])
    in_emulator(*made.arguments())
    assert made.k_pages.isnan().all()
    assert not made.q_out.isnan().any()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("q", lambda c: c.q.float(), "q is float32, needs bfloat16 or float16"),
        ("q", lambda c: c.q[..., :80], "q has head_dim 80, append has 64 and 128"),
        ("k", lambda c: c.k.flatten(1), "q and k need [tokens, heads, head_dim]"),
        ("v", lambda c: c.v[:, :1], "v has shape [3, 1, 128], needs [3, 2, 128]"),
        ("v", lambda c: c.v.repeat_interleave(2, -1)[..., ::2], "v is not dense"),
        ("slots", lambda c: c.slots.repeat_interleave(2)[::2], "slots is not dense"),
        ("slots", lambda c: c.slots.int(), "slots is int32, needs int64"),
        ("positions", lambda c: c.positions[:2], "positions has shape [2], needs [3]"),
        ("sin", lambda c: c.sin[:5], "sin has shape [5, 64], needs [64, 64]"),
        ("q_weight", lambda c: c.q[0, 0], "q_weight and k_weight go together"),
        ("k_scales", lambda c: c.sin, "k_scales and v_scales go with quantized pages"),
        ("v_pages", lambda c: c.v_pages[..., :64], "v_pages has shape"),
        ("k_pages", lambda c: None, "k_pages is missing"),
        ("q_out", lambda c: torch.zeros(3, 4, 129).bfloat16()[..., 1:], "q_out does not have"),
    ],
)
def test_the_error_names_the_bad_argument(name: str, change: Any, says: str) -> None:
    made = case([0, 1, 2])
    with pytest.raises(RefusedError, match="append: ") as refused:
        in_emulator(*replace(made, **{name: change(made)}).arguments())
    assert says in str(refused.value)


def test_the_cpu_implementation_checks_slots_and_positions() -> None:
    for name, values in (("slots", [0, 64]), ("slots", [-2, 0]), ("positions", [0, 64])):
        bad = replace(case([0, 1]), **{name: torch.tensor(values)})
        with pytest.raises(ValueError, match=f"{name} go from"):
            torch.ops.warmroute.append(*bad.arguments())


def test_the_reason_for_an_unsupported_shape_is_reported() -> None:
    bf16 = torch.bfloat16
    assert not any(unsupported(64, bf16, stored) for stored in (bf16, torch.int8))
    for bad in ((64, torch.float32, bf16), (96, bf16, bf16), (64, bf16, torch.float16)):
        assert "the kernel has" in unsupported(*bad)


def test_the_operator_passes_opcheck() -> None:
    made = case([0, 3, -1], norm=True)
    made.k_pages, made.v_pages = made.k_pages.contiguous(), made.v_pages.contiguous()
    torch.library.opcheck(torch.ops.warmroute.append.default, tuple(made.arguments()))
