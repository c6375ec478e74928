"""Tests of the operator `w8a16` (INT8 weights): the kernel in the emulator and the CPU
implementation, against float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.w8a16 import unsupported
from tests.effort import examples
from tests.kernels.cuda.w8a16_cases import case, exact
from tests.kernels.emulated import emulate, needs_compiler, poisoned, relative_error

pytestmark = needs_compiler
BOUND = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
WIDE = 64 * 132  # from this many channels on, a CTA takes 64


def check_result(made: list[torch.Tensor], seed: int = 1) -> None:
    emulate("w8a16", *made, seed=seed)
    assert relative_error(made[3], exact(made)) < BOUND[made[0].dtype]


def test_the_cpu_implementation_equals_the_formula() -> None:
    made = case(3, 5, 64)
    x, q, scales, out = made
    wanted = [
        [sum(float(x[m, k]) * int(q[n, k]) for k in range(64)) * float(scales[n]) for n in range(5)]
        for m in range(3)
    ]
    assert torch.allclose(exact(made), torch.tensor(wanted).double(), rtol=1e-5)
    torch.ops.warmroute.w8a16(*made)
    assert relative_error(out, exact(made)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 33, 64])
def test_products_are_right_for_all_numbers_of_rows(rows: int, dtype: torch.dtype) -> None:
    check_result(case(rows, 40, 320, dtype, seed=rows))


@pytest.mark.parametrize("rows", [3, 12, 40])
def test_products_are_right_for_many_channels(rows: int) -> None:
    check_result(case(rows, WIDE + 24, 64))


@settings(max_examples=examples(15))
@given(
    rows=st.integers(1, 64),
    channels=st.integers(1, 70),
    runs=st.integers(1, 40),
    seed=st.integers(0, 1 << 20),
)
def test_products_are_right_for_any_shape(rows: int, channels: int, runs: int, seed: int) -> None:
    """Products are right for any shape: fewer runs of 64 inputs than warps, fewer than pipeline
    stages, and more.
    """
    check_result(case(rows, channels, runs * 64, seed=seed), seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_byte_is_read_as_its_number(dtype: torch.dtype) -> None:
    """Every weight byte is read as its number: a single input of 1 among zeros makes the output
    that column of the weights.
    """
    q = torch.arange(-127, 128, dtype=torch.int16).to(torch.int8)[:, None].repeat(1, 64)
    for column in (0, 1, 2, 3, 17, 63):
        x = torch.zeros(1, 64, dtype=dtype)
        x[0, column] = 1
        only = torch.zeros_like(q)
        only[:, column] = q[:, column]
        out = poisoned(1, 255, dtype=dtype)
        emulate("w8a16", x, only, torch.full((255,), 0.5), out)
        assert torch.equal(out[0].double(), q[:, column].double() / 2)


def test_a_row_is_the_same_in_any_batch() -> None:
    for channels in (40, WIDE):
        made = case(33, channels, 64 * 9 if channels == 40 else 64)
        emulate("w8a16", *made)
        for rows in (1, 9, 17):
            x, q, scales, _ = made
            out = poisoned(rows, channels, dtype=x.dtype)
            emulate("w8a16", x[:rows], q, scales, out, seed=rows)
            assert torch.equal(out, made[3][:rows])


def test_products_are_right_for_strided_rows_and_weights() -> None:
    x, q, scales, out = case(5, 20, 128)
    wanted = exact([x, q, scales, out])
    wide_x, wide_q = (torch.cat((part, part), dim=1)[:, :128] for part in (x, q))
    wide_out = poisoned(5, 33, dtype=x.dtype)
    emulate("w8a16", wide_x, wide_q, scales, wide_out[:, 3:23])
    assert relative_error(wide_out[:, 3:23], wanted) < BOUND[x.dtype]
    assert wide_out[:, :3].isnan().all()
    assert wide_out[:, 23:].isnan().all()


def test_a_call_without_rows_does_nothing() -> None:
    emulate("w8a16", *case(0, 20, 64))


@pytest.mark.parametrize(
    ("at", "change", "says"),
    [
        (0, lambda x: x.float(), "x is float32, needs bfloat16 or float16"),
        (0, lambda x: x.repeat(17, 1), "x has 68 rows, w8a16 takes up to 64"),
        (0, lambda x: x[:, :96], "x has 96 inputs, w8a16 takes multiples of 64"),
        (0, lambda x: x[0], "x and q need [rows, inputs]"),
        (0, lambda x: torch.zeros(4, 129).bfloat16()[:, 1:], "x does not have its rows at mult"),
        (1, lambda q: q[:, :64], "q has shape [20, 64], needs [20, 128]"),
        (1, lambda q: q.half(), "q is float16, needs int8"),
        (2, lambda s: s.half(), "scales is float16, needs float32"),
        (2, lambda s: s[:3], "scales has shape [3], needs [20]"),
        (3, lambda o: o.half(), "out is float16, needs bfloat16"),
        (3, lambda o: o.T.contiguous().T, "out is not dense in its last dimension"),
        (3, lambda o: None, "out is missing"),
    ],
)
def test_the_error_names_the_bad_argument(at: int, change: Any, says: str) -> None:
    made: list[Any] = case(4, 20, 128)
    made[at] = change(made[at])
    with pytest.raises(RefusedError) as refused:
        emulate("w8a16", *made)
    assert says in str(refused.value)


def test_the_reason_for_an_unsupported_shape_is_reported() -> None:
    assert unsupported(64, 4096, torch.bfloat16) == ""
    for bad in ((65, 64, torch.float16), (1, 96, torch.float16), (1, 64, torch.float32)):
        assert "the kernel has" in unsupported(*bad)


def test_the_operator_passes_opcheck() -> None:
    x, q, scales, out = case(3, 20, 64)
    torch.library.opcheck(torch.ops.warmroute.w8a16.default, (x, q, scales, out.zero_()))
