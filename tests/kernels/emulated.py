"""Runs kernels on the CPU in the emulator, which checks for faults that a GPU would not report.

With WARMROUTE_KERNEL_TESTS=cuda the same calls run on the GPU at hand, by the library for GPUs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkernels.cuda import library as build
from kvkernels.cuda.library import KernelLibrary

ON_GPU = os.environ.get("WARMROUTE_KERNEL_TESTS") == "cuda"
needs_compiler = pytest.mark.skipif(
    not (ON_GPU or shutil.which("g++")), reason="g++ is not installed"
)
NAN = float("nan")


@cache
def emulator() -> KernelLibrary:
    return KernelLibrary(build.build(build.EMULATOR))


def emulator_beside(source: Path, folder: Path) -> KernelLibrary:
    """Build the emulator in `folder` with the kernels of `source` instead of ours, and load it."""
    made, out = folder / "beside.o", folder / "beside.so"
    command = ["g++", *build.EMULATOR.compile_flags, "-O1", f"-I{build.source_folder()}"]
    subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True, timeout=100)
    build.build(build.EMULATOR)
    parts = build.objects(build.EMULATOR).items()
    machine = [part for at, part in parts if at.parent.name == "emulator" or at.stem == "abi"]
    link = ["g++", *build.EMULATOR.link_flags, "-o", str(out), str(made), *map(str, machine)]
    subprocess.run(link, check=True, timeout=100)
    return KernelLibrary(out)


def emulate(name: str, *arguments: Any, seed: int = 1) -> None:
    """Run a kernel with the arguments of its operator; `seed` decides the order of the fibers."""
    if ON_GPU:
        from kvkernels.ops.operator import cuda_library

        with moved(arguments, "cuda") as given:
            cuda_library().call(name, given, torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
        return
    emulator().functions.wr_emulator_seed(ctypes.c_uint64(seed))
    emulator().call(name, arguments)


@contextmanager
def moved(arguments: Sequence[Any], device: str) -> Iterator[list[Any]]:
    """Yield the arguments on `device` with their whole storages, so that strides and gaps stay the
    same; copy back what the kernel wrote.
    """
    storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    given = []
    for one in arguments:
        if isinstance(one, torch.Tensor):
            own = one.untyped_storage()
            there = storages.setdefault(own.data_ptr(), (own, own.clone().to(device=device)))[1]
            empty = torch.empty(0, dtype=one.dtype, device=device)
            one = empty.set_(there, one.storage_offset(), one.shape, one.stride())
        given.append(one)
    yield given
    for own, there in storages.values():
        own.copy_(there)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which every element that was not written shows, as NaN or as a byte of
    0x7F.
    """
    if dtype == torch.int8:
        return torch.full(shape, 0x7F, dtype=dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, NAN, dtype=dtype)


def pool_of(
    pages: int, heads: int, page_tokens: int, dim: int, dtype: torch.dtype, layers: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V [page, token, head, dim] of one layer of a poisoned pool, in the engine's
    order: (block, head, layer, K or V, token, dim).
    """
    pool = poisoned(pages, heads, layers, 2, page_tokens, dim, dtype=dtype)
    layer = pool[:, :, layers - 1]
    return layer[:, :, 0].transpose(1, 2), layer[:, :, 1].transpose(1, 2)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ||got - wanted|| / ||wanted|| in float64, or NaN if one of them has a NaN."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm())
