"""Reads the ids and hints in bodies of agents' clients.

Each field is used as its client or router defined it in 2026: OpenAI's `prompt_cache_key`, `user`,
`safety_identifier`, `conversation` and `service_tier`; Anthropic's `metadata.user_id` as Claude
Code fills it in; LiteLLM's `litellm_session_id` and `metadata.session_id`; vllm-router's
`agentic_context` and `agent_hint`; Codex's `client_metadata`; Dynamo's `nvext.agent_hints`. A field
of an unexpected type or form is ignored, and the worker decides whether it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from router.identity.families import Ids
from router.identity.ids import id_in, within

MAX_FIELD_BYTES = 16_384  # of a field as JSON; a longer one is not read (vllm-router's limit)

_JSON = msgspec.json.Decoder(Any)
# Claude Code's older form of `metadata.user_id`.
_USER_ID = re.compile(r"(user_[^\s]{1,200}?)_account_[^\s]{0,100}?_session_([a-f0-9-]{8,64})")

Fields = Mapping[str, str | bytes]  # texts, or JSON values


def values_in(fields: Fields) -> dict[str, Any]:
    """Return the parsed JSON values of the fields, without those that are too long or invalid."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, str):
            values[name] = value
        elif len(value) <= MAX_FIELD_BYTES:
            try:
                values[name] = _JSON.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
    return values


def read_body(values: Mapping[str, Any], ids: Ids) -> None:
    """Add to `ids` the ids that the body's fields have and that the headers did not give."""
    ids.cache_group = id_in(values.get("prompt_cache_key"))
    for name in ("user", "safety_identifier"):
        ids.user = ids.user or id_in(values.get(name))
    context = context_in(values)
    if context is not None:
        _from_context(context, ids)
    if (codex := _dict(values.get("client_metadata"))) is not None:
        _from_codex(codex, ids)
    if (metadata := _dict(values.get("metadata"))) is not None:
        _from_user_id(id_in_json(metadata.get("user_id")), ids)
        ids.add(id_in(metadata.get("session_id")), None, None)
    ids.add(id_in(values.get("litellm_session_id")), None, None)
    conversation = values.get("conversation")
    if (by_id := _dict(conversation)) is not None:
        conversation = by_id.get("id")
    ids.add(id_in(conversation), None, None)


def context_in(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the description of an agent that vllm-router's clients put into the body, or None."""
    inner = _dict(values.get("vllm_xargs")) or {}
    for name in ("agentic_context", "agent_hint"):
        for place in (inner, values):
            if (found := _dict(place.get(name))) is not None:
                return found
    return None


def _from_context(context: Mapping[str, Any], ids: Ids) -> None:
    group = id_in(context.get("root_program_id")) or id_in(context.get("session_id"))
    group = group or id_in(context.get("task_id"))
    session = id_in(context.get("program_id"))
    if session is None and group is not None:
        agent = id_in(context.get("agent_id"))
        session = group if agent is None else within(group, agent)
    parent = id_in(context.get("parent_program_id"))
    ids.add(session, group or parent, parent)


def _from_codex(metadata: Mapping[str, Any], ids: Ids) -> None:
    def first(*names: str) -> str | None:
        return next(filter(None, (id_in(metadata.get(name)) for name in names)), None)

    group = first("session_id", "session-id")
    session = first("thread_id", "thread-id") or group
    parent = first("parent_thread_id", "x-codex-parent-thread-id")
    ids.add(session, group, parent)


def id_in_json(value: Any) -> Any:
    """Return the object that a text spells as JSON, or the value itself if it spells none."""
    if isinstance(value, str) and value[:1] == "{" and len(value) <= MAX_FIELD_BYTES:
        try:
            return _JSON.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def _from_user_id(user_id: Any, ids: Ids) -> None:
    """Add the ids in Anthropic's `metadata.user_id` to `ids`: Claude Code puts a session into it,
    other clients a person.
    """
    if (parts := _dict(user_id)) is not None:
        session, group = id_in(parts.get("session_id")), id_in(parts.get("parent_session_id"))
        ids.add(session, group or session, group)
        ids.user = ids.user or id_in(parts.get("account_uuid")) or id_in(parts.get("device_id"))
        return
    text = id_in(user_id)
    if text is None:
        return
    if (found := _USER_ID.fullmatch(text)) is not None:
        ids.add(found[2], found[2], None)
        text = found[1]
    ids.user = ids.user or text


def _dict(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None
