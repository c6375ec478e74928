"""GPUs: figures of their data sheets, and the shares of them that kernels reach.

Figures are NVIDIA's, of one GPU, dense, SXM form if there is one. Shares are fitted to measured
kernels, the tables of AIConfigurator 0.12.0, by tests/simulator/step_times/fit_shares.py, which can
fit them again. The tables are vLLM's, except for two kinds of rows: in vLLM's tables each product
of weights in FP8 blocks takes at least 60 to 170 us, as long as launches take without a CUDA graph,
and so do DeepSeek's on Blackwell. Those rows are SGLang's; DeepSeek's decodes on the H200 are
TensorRT-LLM's. Errors are those of models that the shares were not fitted to, if the tables have
another model of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from simulator.step_times.storage import Arithmetic

ModelKind = Literal["dense", "experts", "latent"]  # of a model: latent attention goes with experts


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of the data sheet's rates that the kernels on one kind of GPU reach, and some
    times in seconds.
    """

    gemm: Mapping[Arithmetic, float]  # of the FLOPs, in large matrix products
    experts: Mapping[Arithmetic, float]  # in products grouped by expert
    attention: float  # of the FLOPs in BF16, in prefill with heads of 128
    narrow_attention: float  # with heads of 64 or less
    latent_attention: float
    weights: float  # of the memory's bandwidth, where weights are read
    kv: float  # where decodes read keys and values in BF16
    kv_fp8: float  # in FP8
    kv_latent: float  # where decodes read latent vectors
    layer_s: float  # of small kernels in a layer, whatever the batch
    p: float  # of the soft maximum, of dense models
    experts_p: float  # of models with experts


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU: its data sheet, and the shares of it that kernels reach."""

    name: str
    title: str
    memory_bytes: float
    bytes_s: float
    flops: Mapping[Arithmetic, float]
    link_bytes_s: float  # to other GPUs, one direction
    all_reduce: Mapping[int, float]  # measured: bytes a second of large ones, by GPUs taking part
    all_reduce_s: float  # measured: of a small one
    shares: Shares
    unmeasured: frozenset[str]  # shares that no table had rows for: another GPU's
    errors: Mapping[ModelKind, tuple[int, int]]  # median and 90th percentile, %

    def all_reduce_bytes_s(self, gpus: int) -> float:
        """Return the rate of an all-reduce over this many GPUs; for more GPUs than were measured,
        the last rate.
        """
        sizes = [size for size in self.all_reduce if size >= gpus]
        return self.all_reduce[min(sizes, default=max(self.all_reduce))]

    def used(self, arithmetic: Arithmetic) -> Arithmetic:
        """Return the number format in which the GPU multiplies: BF16 if its tensor cores lack the
        wanted one.
        """
        return arithmetic if arithmetic in self.flops else "bf16"

    def gemm_flops_s(self, arithmetic: Arithmetic) -> float:
        """Return the FLOP/s that large matrix products reach."""
        used = self.used(arithmetic)
        return self.flops[used] * self.shares.gemm[used]

    def expert_flops_s(self, arithmetic: Arithmetic) -> float:
        """Return the FLOP/s that products grouped by expert reach."""
        used = self.used(arithmetic)
        return self.flops[used] * self.shares.experts[used]


_LATENT = frozenset({"kv_latent", "latent_attention"})
_INT8 = frozenset({"gemm int8", "experts int8"})

_A100 = Gpu(
    "a100",
    "A100 80 GB SXM",
    80e9,
    2.039e12,
    {"bf16": 312e12, "int8": 624e12},
    300e9,
    {2: 175e9, 4: 128e9, 8: 114e9},
    5.8e-6,
    Shares(
        gemm={"bf16": 0.856, "int8": 0.692},
        experts={"bf16": 0.442, "int8": 0.4},
        attention=0.566,
        narrow_attention=0.45,
        latent_attention=0.539,
        weights=0.793,
        kv=0.735,
        kv_fp8=0.6,
        kv_latent=0.788,
        layer_s=63.8e-6,
        p=1.23,
        experts_p=0.842,
    ),
    frozenset({"experts int8", "narrow_attention", "kv_fp8"}) | _LATENT,
    {"dense": (3, 9), "experts": (4, 15)},
)
_H100 = Gpu(
    "h100",
    "H100 80 GB SXM",
    80e9,
    3.35e12,
    {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12},
    450e9,
    {2: 242e9, 4: 209e9, 8: 209e9},
    4.8e-6,
    Shares(
        gemm={"bf16": 0.754, "fp8": 0.578, "int8": 0.578},
        experts={"bf16": 0.658, "fp8": 0.336, "int8": 0.336},
        attention=0.679,
        narrow_attention=0.5,
        latent_attention=0.539,
        weights=0.97,
        kv=0.938,
        kv_fp8=0.676,
        kv_latent=0.788,
        layer_s=59e-6,
        p=1.44,
        experts_p=0.69,
    ),
    _LATENT | _INT8,
    {"dense": (4, 15), "experts": (6, 18)},
)
_H200 = Gpu(
    "h200",
    "H200 SXM",
    141e9,
    4.8e12,
    {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12},
    450e9,
    {2: 242e9, 4: 209e9, 8: 209e9},
    4.8e-6,
    Shares(
        gemm={"bf16": 0.757, "fp8": 0.595, "int8": 0.595},
        experts={"bf16": 0.673, "fp8": 0.537, "int8": 0.537},
        attention=0.666,
        narrow_attention=0.507,
        latent_attention=0.539,
        weights=0.97,
        kv=0.916,
        kv_fp8=0.555,
        kv_latent=0.788,
        layer_s=61e-6,
        p=1.54,
        experts_p=0.6,
    ),
    _INT8,
    {"dense": (3, 15), "experts": (11, 20), "latent": (10, 21)},
)
_B200 = Gpu(
    "b200",
    "B200 SXM",
    180e9,
    8e12,
    {"bf16": 2.25e15, "fp8": 4.5e15, "int8": 4.5e15, "fp4": 9e15},
    900e9,
    {2: 450e9, 4: 367e9, 8: 302e9},
    7.4e-6,
    Shares(
        gemm={"bf16": 0.665, "fp8": 0.55, "int8": 0.55, "fp4": 0.35},
        experts={"bf16": 0.281, "fp8": 0.161, "int8": 0.161, "fp4": 0.368},
        attention=0.583,
        narrow_attention=0.327,
        latent_attention=0.912,
        weights=0.938,
        kv=0.91,
        kv_fp8=0.757,
        kv_latent=0.881,
        layer_s=56.8e-6,
        p=1.29,
        experts_p=0.742,
    ),
    _INT8,
    {"dense": (6, 16), "experts": (9, 27), "latent": (12, 31)},
)
_GB200 = Gpu(
    "gb200",
    "one GPU of a GB200 NVL72",
    186e9,
    8e12,
    {"bf16": 2.5e15, "fp8": 5e15, "int8": 5e15, "fp4": 10e15},
    900e9,
    {2: 176e9, 4: 335e9, 8: 287e9},
    5.7e-6,
    Shares(
        gemm={"bf16": 0.583, "fp8": 0.506, "int8": 0.506, "fp4": 0.318},
        experts={"bf16": 0.261, "fp8": 0.15, "int8": 0.15, "fp4": 0.332},
        attention=0.56,
        narrow_attention=0.319,
        latent_attention=0.888,
        weights=0.97,
        kv=0.949,
        kv_fp8=0.823,
        kv_latent=0.895,
        layer_s=59.8e-6,
        p=1.58,
        experts_p=0.784,
    ),
    _INT8,
    {"dense": (7, 21), "experts": (7, 24), "latent": (12, 36)},
)
_L40S = Gpu(
    "l40s",
    "L40S 48 GB, PCIe 4.0",
    48e9,
    864e9,
    {"bf16": 362e12, "fp8": 733e12, "int8": 733e12},
    32e9,
    {2: 19e9, 4: 2.5e9, 8: 1.1e9},
    15e-6,
    Shares(
        gemm={"bf16": 0.645, "fp8": 0.472, "int8": 0.472},
        experts={"bf16": 0.513, "fp8": 0.3, "int8": 0.3},
        attention=0.514,
        narrow_attention=0.48,
        latent_attention=0.539,
        weights=0.778,
        kv=0.8,
        kv_fp8=0.747,
        kv_latent=0.788,
        layer_s=9.86e-6,
        p=1.45,
        experts_p=1.07,
    ),
    frozenset({"experts fp8"}) | _LATENT | _INT8,
    {"dense": (5, 12), "experts": (6, 29)},
)
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {gpu.name: gpu for gpu in (_A100, _H100, _H200, _B200, _GB200, _L40S)}
)
