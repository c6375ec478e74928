"""The operator `w8a16`: the product of a few rows and INT8 weights, for decode steps.

Its CUDA kernel is in `cuda/w8a16.cuh`.

`torch.ops.warmroute.w8a16(x, q, scales, out)`: out = x @ (q * scales[:, None]).T

    x       [rows, inputs]
    q       int8[channels, inputs], from -127 to 127
    scales  float32[channels]
    out     [rows, channels] of x's dtype

On CUDA: bfloat16 and float16, up to 64 rows, inputs in multiples of 64, rows of x and q at
multiples of 16 bytes (`unsupported` says what does not fit). Integers are exact in both, products
are added in float32, and each sum is scaled and rounded once. A row's bits do not depend on the
rows beside it.
"""

from __future__ import annotations

import torch

from kvkernels.ops.operator import define, unsupported_dtype

MAX_ROWS, INPUT_STEP, MAX_INPUTS = 64, 64, 1 << 20


def unsupported(rows: int, inputs: int, dtype: torch.dtype) -> str:
    """Return the reason why the CUDA kernel does not support this shape; "" if it supports it."""
    if why := unsupported_dtype(dtype):
        return why
    if rows > MAX_ROWS:
        return f"{rows} rows (the kernel has up to {MAX_ROWS})"
    if not 0 < inputs <= MAX_INPUTS or inputs % INPUT_STEP:
        return f"{inputs} inputs (the kernel has multiples of {INPUT_STEP} up to {MAX_INPUTS})"
    return ""


def w8a16_on_cpu(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Compute the operator on the CPU, in float64 if x is float64, else in float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out.copy_((x.to(wide) @ q.to(wide).T) * scales.to(wide))


define("w8a16", w8a16_on_cpu, ("out",))
