"""Lists the engines that the router knows, one line for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from router.body.legs import NAMED_TRANSFERS, Transfer
from router.body.paths import GRPC_PATHS
from router.engines import sglang, triton, trtllm, vllm
from router.engines.adapter import Adapter, Interview, Profile


async def _nothing_more(talk: Interview, named: bool) -> Profile | None:
    return Profile(ranks=())


OPENAI = Adapter("openai", _nothing_more, lacks=GRPC_PATHS)  # any other that lists its models
# The order in which engines are tried if the operator did not name one.
_ENGINES = (
    vllm.WARMROUTE,
    trtllm.ADAPTER,
    vllm.ADAPTER,
    sglang.ADAPTER,
    triton.ADAPTER,
    OPENAI,
)
ADAPTERS: Mapping[str, Adapter] = MappingProxyType({one.kind: one for one in _ENGINES})
# By the name in a worker's options, else by the kind of engine.
TRANSFERS: Mapping[str, Transfer] = MappingProxyType(
    {
        **NAMED_TRANSFERS,
        **{one.kind: one.transfer for one in _ENGINES if one.transfer is not None},
    }
)
# Fields of a request that say where a worker fetches KV; only routers may set them.
TRANSFER_FIELDS: tuple[str, ...] = tuple(
    dict.fromkeys(name for one in TRANSFERS.values() for name in one.fields)
)


def adapter_of(kind: str | None) -> Adapter:
    """Return the adapter of a kind of engine, or the adapter for any OpenAI-compatible server if
    the kind is not known yet.
    """
    return ADAPTERS.get(kind or OPENAI.kind, OPENAI)
