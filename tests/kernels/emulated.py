"""Kernels run on the CPU, in the emulator, with what a GPU would not forgive checked."""

from __future__ import annotations

import ctypes
import shutil
from functools import cache
from typing import Any

import pytest
import torch

from kvkernels.cuda import library as build
from kvkernels.cuda.library import KernelLibrary

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
NAN = float("nan")


@cache
def emulator() -> KernelLibrary:
    return KernelLibrary(build.build(build.EMULATOR))


def emulate(name: str, *arguments: Any, seed: int = 1) -> None:
    """Run a kernel with the arguments of its operator, fibers in the order of `seed`."""
    emulator().functions.wr_emulator_seed(ctypes.c_uint64(seed))
    emulator().call(name, arguments)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that shows what was not written: NaN, or a byte of 0x7F."""
    if dtype == torch.int8:
        return torch.full(shape, 0x7F, dtype=dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, NAN, dtype=dtype)


def pool_of(
    pages: int, heads: int, page_tokens: int, dim: int, dtype: torch.dtype, layers: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [page, token, head, dim] of one layer of a poisoned pool, in the engine's order:
    (block, head, layer, K or V, token, dim)."""
    pool = poisoned(pages, heads, layers, 2, page_tokens, dim, dtype=dtype)
    layer = pool[:, :, layers - 1]
    return layer[:, :, 0].transpose(1, 2), layer[:, :, 1].transpose(1, 2)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||, in float64; NaN where either has one."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm())
