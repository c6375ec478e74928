"""Makes calls of the operator `append` for tests, and checks their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.emulated import emulate, poisoned, pool_of, relative_error

EPS = 1e-6
POSITIONS = 64


@dataclass
class Case:
    """The arguments of one call of `append` in their order; `wide()` gives the same call in
    float64.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    q_out: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None

    def arguments(self) -> list[Any]:
        return list(vars(self).values())

    def wide(self) -> Case:
        shape = (*self.k_pages.shape,)
        double = {"dtype": torch.float64}
        return Case(
            **{
                name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for name, x in vars(self).items()
                if not name.endswith(("pages", "scales", "out"))
            },
            q_out=poisoned(*self.q.shape, **double),
            k_pages=poisoned(*shape, **double),
            v_pages=poisoned(*shape, **double),
            k_scales=None,
            v_scales=None,
        )


def case(
    slots: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    norm: bool = False,
    pages: int = 4,
    page_tokens: int = 16,
    seed: int = 0,
) -> Case:
    draw = torch.Generator().manual_seed(seed)
    tokens, stored = len(slots), stored or dtype
    # One tensor of q, k and v, as the engine's projection gives them.
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=draw).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.randn(POSITIONS, dim // 2, generator=draw) * 3
    k_pages, v_pages = pool_of(pages, kv_heads, page_tokens, dim, stored)
    scales = None
    if stored != dtype:
        scales = torch.full((pages, kv_heads, 2, page_tokens), float("nan"))
    weights = torch.randn(2, dim, generator=draw).to(dtype) if norm else (None, None)
    return Case(
        *(q, k, v, angles.cos(), angles.sin()),
        positions=torch.randint(0, POSITIONS, (tokens,), generator=draw),
        slots=torch.tensor(slots, dtype=torch.int64),
        q_weight=weights[0],
        k_weight=weights[1],
        eps=EPS,
        q_out=poisoned(tokens, heads, dim, dtype=dtype),
        k_pages=k_pages,
        v_pages=v_pages,
        k_scales=None if scales is None else scales[:, :, 0].transpose(1, 2),
        v_scales=None if scales is None else scales[:, :, 1].transpose(1, 2),
    )


def dequantized_pages(pages: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    wide = pages.double()
    return wide if scales is None else wide * scales.double()[..., None]


def check_result(run: Any, made: Case, bound: float) -> None:
    """Assert that `run` on `made` agrees with float64 in the slots that are written, and leaves the
    rest poisoned.
    """
    wide = made.wide()
    torch.ops.warmroute.append(*wide.arguments())
    run(*made.arguments())
    assert relative_error(made.q_out, wide.q_out) < bound
    for pages, scales, wanted in (
        (made.k_pages, made.k_scales, wide.k_pages),
        (made.v_pages, made.v_scales, wide.v_pages),
    ):
        got, kept = dequantized_pages(pages, scales), ~wanted.isnan()
        assert got[~kept].isnan().all(), "written where no slot is"
        if kept.any():
            assert relative_error(got[kept], wanted[kept]) < bound


def in_emulator(*arguments: Any) -> None:
    emulate("append", *arguments)
