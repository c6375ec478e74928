"""Lists models in the form of Anthropic's API, for clients that use it.

The form is that of Anthropic's API reference, "List Models" and "Get a Model", version 2023-06-01.
The fields of OpenAI's form are kept. Claude Code sends `GET /v1/models?limit=1000`, and offers the
ids that contain `claude` or `anthropic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.http.errors import ClientError
from router.http.messages import Request

_VERSION_HEADER = "anthropic-version"  # all clients of that API send it
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"  # the time of a model is unknown
_MOST, _USUAL = 1_000, 20  # models on one page


def wants_anthropic_form(request: Request) -> bool:
    """Return True if the client uses Anthropic's API."""
    return request.headers.get(_VERSION_HEADER) is not None


def anthropic_card(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's card with the additional fields of Anthropic's API."""
    return {
        **card,
        "type": "model",
        "display_name": card["id"],
        "created_at": _UNKNOWN_TIME,
    }


def anthropic_page(cards: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the list of models.

    `query` is the request's query. It may have `limit` (1 to 1,000; 20 if missing), and `after_id`
    or `before_id`, the id of a model that the page follows or precedes. Raises ClientError(400) if
    one of them is wrong.
    """
    limit = _limit(query.get("limit"))
    ids = [card["id"] for card in cards]
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise ClientError(400, "give one of `after_id` and `before_id`", "after_id")
    if before is not None:
        stop = _place(ids, before, "before_id")
        start = max(stop - limit, 0)
        has_more = start > 0
    else:
        start = 0 if after is None else _place(ids, after, "after_id") + 1
        stop = min(start + limit, len(ids))
        has_more = stop < len(ids)
    return {
        "object": "list",
        "data": [anthropic_card(card) for card in cards[start:stop]],
        "has_more": has_more,
        "first_id": ids[start] if start < stop else None,
        "last_id": ids[stop - 1] if start < stop else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _USUAL
    known = text.isascii() and text.isdecimal() and len(text) <= 4
    if not known or not 1 <= int(text) <= _MOST:
        raise ClientError(400, f"`limit` must be 1..{_MOST:,}", "limit")
    return int(text)


def _place(ids: Sequence[str], model: str, field: str) -> int:
    try:
        return ids.index(model)
    except ValueError:
        why = f"`{field}`: the model {model[:200]!r} does not exist"
        raise ClientError(400, why, field, "model_not_found") from None
