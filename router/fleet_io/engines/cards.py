"""`GET /v1/models`, which every engine has."""

from __future__ import annotations

import msgspec

from engine.wire import WireError
from router.fleet_io.engines.adapter import UnrecognizedError
from router.fleet_io.engines.figures import Count
from router.fleet_io.engines.interview import Interview, decoded

MAX_MODELS = 1_024


class Card(msgspec.Struct):
    """One model, an adapter among them."""

    id: str
    max_model_len: Count | None = None
    owned_by: str | None = None
    parent: str | None = None  # the base model of a LoRA adapter


class _Cards(msgspec.Struct):
    data: list[Card]


async def cards(talk: Interview) -> list[Card]:
    """The models it serves, 1 to MAX_MODELS. Raises UnrecognizedError for anything else."""
    where = f"GET {talk.spec.url}/v1/models"
    status, body = await talk.get("/v1/models")
    if status != 200:
        raise UnrecognizedError(f"{where} answered {status}, not a list of models")
    try:
        models = decoded(body, _Cards, f"{where} is not a list of models").data
    except WireError as error:
        raise UnrecognizedError(str(error)) from error
    if not models:
        raise UnrecognizedError(f"{where} lists no model")
    if len(models) > MAX_MODELS:
        raise UnrecognizedError(f"{where} lists more than {MAX_MODELS} models")
    return models
