"""All engine adapters, in the order in which an engine that nobody named is tried."""

from __future__ import annotations

from types import MappingProxyType

from router.fleet.engines import sglang, triton, trtllm, vllm
from router.fleet.engines.adapter import Adapter, Interview, Profile
from router.fleet.engines.vllm import WARMROUTE


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    return Profile(ranks=())


OPENAI = Adapter("openai", _recognize)


ADAPTERS = MappingProxyType(
    {
        adapter.kind: adapter
        for adapter in (
            WARMROUTE,
            trtllm.ADAPTER,
            vllm.ADAPTER,
            sglang.ADAPTER,
            triton.ADAPTER,
            OPENAI,
        )
    }
)
