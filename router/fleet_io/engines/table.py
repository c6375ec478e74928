"""All adapters, in the order in which an engine that nobody named is tried.

Those come first that know theirs from the list of models alone, last the one that takes anybody.
"""

from __future__ import annotations

from types import MappingProxyType

from router.fleet_io.engines import sglang, triton, trtllm, vllm
from router.fleet_io.engines.openai import OPENAI
from router.fleet_io.engines.warmroute import WARMROUTE

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
