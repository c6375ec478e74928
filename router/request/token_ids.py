"""Replaces a prompt's text by token ids for workers whose engines accept them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvkernels import body_fields
from router.body.json_edit import with_fields
from router.body.scan import Tokens
from router.engines.table import adapter_of

_WRITTEN_IDS = 1 << 16  # ids that are written as JSON at a time; other threads wait meanwhile


def with_token_ids(body: bytes, path: str, kind: str, ids: Sequence[Tokens]) -> bytes:
    """Return `body`, sent to `path` of a worker of this `kind`, with the token ids of its prompts
    instead of their text.

    All other bytes are unchanged. The whole body is unchanged if the worker accepts no ids or there
    are none.
    """
    if not ids:
        return body
    if path.endswith("/chat/completions"):
        name = adapter_of(kind).chat_ids
        return body if name is None else _with_field(body, name, ids[0])
    if not adapter_of(kind).takes_prompt_ids:
        return body
    fault, _, (prompt,) = body_fields(body, ("prompt",))
    if fault is not None or prompt is None:
        return body
    at, end = prompt[:2]
    several = body[at : at + 1] == b"["  # as they came: a list of one prompt stays a list
    lists = b",".join(map(_written, ids))
    return b"".join((body[:at], b"[%b]" % lists if several else lists, body[end:]))


def _with_field(body: bytes, name: str, ids: Tokens) -> bytes:
    """Return the body with the additional field `name` in front; unchanged if it already has that
    field.
    """
    fault, _, (there,) = body_fields(body, (name,))
    if fault is not None or there is not None:
        return body
    return with_fields(body, {name: _written(ids)})


def _written(ids: Tokens) -> bytes:
    """Return the token ids as JSON."""
    parts = (ids[at : at + _WRITTEN_IDS] for at in range(0, len(ids), _WRITTEN_IDS))
    return b"[%b]" % b",".join(msgspec.json.encode(part.tolist())[1:-1] for part in parts)
