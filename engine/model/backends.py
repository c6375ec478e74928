"""The backends of attention and of INT8 products: their names, and which one was chosen.

The module imports no torch until a function is called, so that command lines know the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCH, KVKERNELS = "torch", "kvkernels"  # the backends that compute a part of a model
BACKENDS = ("auto", TORCH, KVKERNELS)
# Ways to compute a part of a step that has one of these shapes; `calibrate-kernels` times them.
MMA = "kvkernels_mma"  # prefill by the kernel of all GPUs, on Hopper, too
CUDNN = "cudnn"  # torch's attention over gathered pages, by that backend
FLASHINFER = "flashinfer"  # over the pages where they lie
_DECODE = (KVKERNELS, FLASHINFER, TORCH)
_PREFILL = (KVKERNELS, MMA, FLASHINFER, CUDNN, TORCH)
SHAPES = MappingProxyType(
    {
        "decode_short": _DECODE,
        "decode_long": _DECODE,  # some context beyond LONG_TOKENS
        "decode_shared": _DECODE,  # requests that read pages once
        "prefill_fresh": _PREFILL,
        "prefill_hit": _PREFILL,  # some prompt with tokens in the cache
    }
)
LONG_TOKENS = 8192
Ways = Mapping[str, str]  # by shape
ALL_KERNELS: Ways = MappingProxyType(dict.fromkeys(SHAPES, KVKERNELS))
FellBack = Mapping[str, str]  # by part, "attention" or "int8": why torch computes it by now
LEAST_CAPABILITY = (8, 0)
ATTENTION_KERNELS = ("append", "prefill", "shared_decode")
INT8_KERNELS = ("w8a16",)
MOST_ROWS = 64  # of a step, that the INT8 kernel takes: all that it has


def device_lost(device: str | torch.device) -> str:
    """Return the reason why nothing more can be computed on `device` in this process; "" if the
    device still works.

    Some of CUDA's errors break the context (an illegal address, an ECC error): each later call
    repeats them, and only a new process gets a new context. The function waits for launched work.
    """
    import torch

    if torch.device(device).type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"{error!s:.300}"
    return ""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The backend that computes a part of the model, and the reason if it is not the kernels. For
    the kernels, `ways` has the way in which attention is computed by shape of step. Lifetime:
    worker.
    """

    backend: str = TORCH
    why: str = ""
    ways: Ways = field(default_factory=lambda: ALL_KERNELS)

    def __str__(self) -> str:
        others = [f"{shape} by {way}" for shape, way in self.ways.items() if way != KVKERNELS]
        told = f"{self.backend}, because of {self.why}" if self.why else self.backend
        return "; ".join((told, *others))


class Int8Choice(KernelChoice):
    """The backend of products with INT8 weights. The kernel moves one byte a weight; torch widens
    the weights first and moves five or more. Torch computes steps of more than MOST_ROWS rows.
    Lifetime: worker.
    """

    __slots__ = ()

    def __str__(self) -> str:
        if self.backend == KVKERNELS:
            return f"{self.backend}, torch beyond {MOST_ROWS} rows"
        return KernelChoice.__str__(self)

    def of_step(self, rows: int) -> str:
        """Return the backend that computes a step of `rows` rows, padding included."""
        return self.backend if rows <= MOST_ROWS else TORCH
