"""All engine adapters, in the order in which an engine that nobody named is tried."""

from __future__ import annotations

from types import MappingProxyType

from router.fleet.engines import sglang, triton, trtllm, vllm
from router.fleet.engines.openai import OPENAI
from router.fleet.engines.warmroute import WARMROUTE

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
