"""The adapter of the engine "seventh", which exists only in this project's tests (`server.py`).

Copied to `router/engines/seventh.py`, with one line in `router/engines/table.py`, it is all that
the router needs for a new engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from policies.facts import Role
from router.body.json_edit import values_in, with_fields
from router.body.legs import Handover, Leg, TransferAttempt, one_token_body
from router.body.paths import KSERVE_PATHS, OPTIONAL_PATHS
from router.engines.adapter import (
    Adapter,
    Count,
    Interview,
    LoadReader,
    Profile,
    RankLoad,
    Size,
    decoded,
)

_KV = "seventh_kv"  # the field that says what to do with a request's KV, or where it is


class _Info(msgspec.Struct):
    engine: str
    version: str
    block_tokens: Size
    kv_tokens: Count
    role: Role


class _Load(msgspec.Struct):
    running: Count
    waiting: Count
    kv_used_tokens: Count


class SeventhKv:
    """Disaggregation with prefill before decode: the prefill request has `{"keep": true}`, and its
    answer says where the KV is.
    """

    fields = (_KV,)
    serves_alone, concurrent, answers_late = True, False, False

    def prefill(self, body: bytes, of: TransferAttempt) -> Leg:
        return Leg(one_token_body(body, {_KV: b'{"keep":true}'}))

    def read(self, answer: bytes, of: TransferAttempt) -> Handover:
        (place,) = values_in(answer, (_KV,))
        return Handover(None if place in (None, b"null") else place)

    def decode(self, body: bytes, data: bytes | None, of: TransferAttempt) -> Leg:
        return Leg(body if data is None else with_fields(body, {_KV: data}))


def _loads_in(text: str) -> Mapping[int, RankLoad]:
    load = decoded(text, _Load, "/seventh/load")
    return {0: RankLoad(load.running, load.waiting, float(load.kv_used_tokens))}


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    status, body = await talk.get("/seventh")
    if status != 200:
        return None
    info = decoded(body, _Info, "/seventh")
    return Profile(
        block_size=info.block_tokens,
        kv_tokens={0: info.kv_tokens},
        version=info.version,
        transfers=True,
        role=info.role,
        loads=LoadReader(f"{talk.spec.url}/seventh/load", _loads_in),
    )


ADAPTER = Adapter(
    "seventh",
    _recognize,
    lacks=KSERVE_PATHS | OPTIONAL_PATHS,
    takes_prompt_ids=True,
    transfer=SeventhKv(),
)
