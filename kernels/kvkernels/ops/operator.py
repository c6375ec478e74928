"""How a kernel becomes an operator: its schema has the order of its C entry point's arguments.

All of them write to tensors that they are given and return nothing: no allocation in an op, so
that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from kvkernels.cuda import build
from kvkernels.cuda.library import KernelLibrary

NAMESPACE = "warmroute"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@cache
def cuda_library() -> KernelLibrary:
    """The library for GPUs, built now where it is not there. Raises build.BuildError."""
    return KernelLibrary(build.find_cuda() or build.build())


def define(name: str, schema: str, on_cpu: Callable[..., None]) -> None:
    """Define `warmroute::name` with `schema` ("(Tensor q, ...) -> ()"), on CPUs by `on_cpu`.

    On CUDA devices `wr_name` runs on the current stream with the same arguments in order.
    """
    LIBRARY.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, partial(_on_cuda, name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", _nothing, lib=LIBRARY)


def _on_cuda(name: str, *arguments: Any) -> None:
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        cuda_library().call(name, arguments, stream)


def _nothing(*_: Any) -> None:
    """Outputs are arguments: there is nothing whose shape a tracer would have to know."""
