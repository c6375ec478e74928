"""Our own engine: vLLM's surface, and a snapshot of its cache at `/kv_snapshot`."""

from __future__ import annotations

from dataclasses import replace

from router.fleet.engines.adapter import Adapter, Interview, Profile, cards
from router.fleet.engines.vllm import profile_of


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    if not named and (await cards(talk))[0].owned_by != "warmroute":
        return None
    profile = await profile_of(talk, named=True)
    return profile and replace(profile, snapshot=f"{talk.spec.url}/kv_snapshot")


WARMROUTE = Adapter("warmroute", _recognize)
