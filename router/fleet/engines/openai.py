"""Any OpenAI-compatible server: a list of models, and nothing else that we know of."""

from __future__ import annotations

from router.fleet.engines.adapter import Adapter, Interview, Profile


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    return Profile(ranks=())


OPENAI = Adapter("openai", _recognize)
