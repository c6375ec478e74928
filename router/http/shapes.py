"""Bodies of other APIs than completions and chats, read for what routing needs of them.

Where an engine makes a chat of them, the same chat is made here (vLLM 0.33,
`entrypoints/anthropic` and `entrypoints/openai/responses`), so that its blocks are found again;
what has no equal there stands as a part that is placed by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from router.http.errors import ClientError
from router.http.scan import (
    Common,
    Count,
    Message,
    PromptOptions,
    ScanLimits,
    Scanned,
    decode,
    messages_in,
    prompts_in,
    refused,
    scanned_of,
)

_NULL = msgspec.Raw(b"null")
_TEXTS = ("input_text", "output_text", "text")  # parts of a response's items that are text


class _Responses(Common):
    """OpenAI's API reference, "Responses" (2025)."""

    input: str | list[Message] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None


class _Whose(msgspec.Struct):
    user_id: str | None = None


class _Messages(Common):
    """Anthropic's API reference, "Messages", version 2023-06-01."""

    system: str | list[Message] | None = None
    messages: list[Message] | None = None
    max_tokens: Count | None = None
    metadata: _Whose | None = None


class _Input(Common):
    """OpenAI's embeddings; vLLM takes a chat in the place of `input`, too."""

    input: msgspec.Raw = _NULL
    messages: list[Message] | None = None


class _Pairs(Common):
    """Scores and ranks: vLLM's and SGLang's names of the two sides."""

    query: msgspec.Raw = _NULL
    queries: msgspec.Raw = _NULL
    text_1: msgspec.Raw = _NULL
    data_1: msgspec.Raw = _NULL
    documents: msgspec.Raw = _NULL
    items: msgspec.Raw = _NULL
    text_2: msgspec.Raw = _NULL
    data_2: msgspec.Raw = _NULL


class _Sampling(msgspec.Struct):
    max_new_tokens: Count | None = None
    max_tokens: Count | None = None


class _Generate(Common):
    """SGLang 0.5.23, `srt/managers/io_struct.py`."""

    text: msgspec.Raw = _NULL
    input_ids: msgspec.Raw = _NULL
    sampling_params: _Sampling | list[_Sampling] | None = None
    extra_key: str | None = None
    lora_path: str | list[str | None] | None = None


class _TokenIds(Common):
    """vLLM 0.33, `entrypoints/scale_out/token_in_token_out`."""

    token_ids: msgspec.Raw = _NULL
    sampling_params: _Sampling | None = None


class _Model(Common):
    pass


_RESPONSES = msgspec.json.Decoder(_Responses)
_MESSAGES = msgspec.json.Decoder(_Messages)
_INPUT = msgspec.json.Decoder(_Input)
_PAIRS = msgspec.json.Decoder(_Pairs)
_GENERATE = msgspec.json.Decoder(_Generate)
_TOKEN_IDS = msgspec.json.Decoder(_TokenIds)
_MODEL = msgspec.json.Decoder(_Model)


def _responses(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _Responses = decode(_RESPONSES, body, "")
    if not fields.input:
        raise refused("a response needs an input", "input", "missing_input")
    said = fields.input
    items = [{"role": "user", "content": said}] if isinstance(said, str) else list(map(_item, said))
    if fields.instructions:
        items.insert(0, {"role": "system", "content": fields.instructions})
    return scanned_of(
        fields,
        limits,
        messages=messages_in(items, limits),
        max_output_tokens=fields.max_output_tokens,
        options=PromptOptions(tools=_functions(fields.tools, "parameters")),
    )


def _item(item: Message) -> Message:
    """An item of a response's input as a message."""
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, (str, list)):
        return {"role": "tool", "content": [{"type": "item", "item": item}]}
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part["text"]}
            if isinstance(part, dict) and part.get("type") in _TEXTS and "text" in part
            else part
            for part in content
        ]
    return {"role": role, "content": content}


def _messages(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _Messages = decode(_MESSAGES, body, "")
    if not fields.messages:
        raise refused("a message needs at least one before it", "messages", "empty_messages")
    said = list(fields.messages)
    if isinstance(fields.system, list):
        texts = [text for part in fields.system if isinstance(text := part.get("text"), str)]
        said.insert(0, {"role": "system", "content": "".join(texts)})
    elif fields.system:
        said.insert(0, {"role": "system", "content": fields.system})
    whose = fields.metadata.user_id if fields.metadata else None
    fields.user = fields.user or whose
    return scanned_of(
        fields,
        limits,
        messages=messages_in([_told(message) for message in said], limits),
        max_output_tokens=fields.max_tokens,
        options=PromptOptions(tools=_functions(fields.tools, "input_schema")),
    )


def _told(message: Message) -> Message:
    """A message whose one part is a text, as the text."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1:
        part = content[0]
        if isinstance(part, dict) and part.get("type") == "text" and "text" in part:
            return {"role": message.get("role"), "content": part["text"]}
    return message


def _functions(tools: list[Any] | None, schema: str) -> list[Any] | None:
    """Tools in the shape of chats; `schema`: where the API has a function's parameters."""
    return tools and [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get(schema),
            },
        }
        if isinstance(tool, dict) and "name" in tool
        else tool
        for tool in tools
    ]


def _input(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _Input = decode(_INPUT, body, "")
    raw = bytes(fields.input)
    if fields.messages and raw == b"null":
        return scanned_of(fields, limits, messages=messages_in(fields.messages, limits))
    if raw == b"null":
        raise refused("there is no input", "input", "missing_input")
    if raw[:1] == b"{" or raw[1:].lstrip()[:1] == b"{":  # images beside text: engines' own shapes
        return _by_text(fields, limits, raw)
    return scanned_of(fields, limits, prompts=prompts_in(raw, "input", limits))


def _pairs(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _Pairs = decode(_PAIRS, body, "")
    one = (fields.query, fields.queries, fields.text_1, fields.data_1)
    other = (fields.documents, fields.items, fields.text_2, fields.data_2)
    sides = [bytes(raw) for raw in (*one, *other) if raw != _NULL]
    if not sides:
        raise refused("there is nothing to compare", None, "missing_input")
    return _by_text(fields, limits, b"".join(sides))


def _by_text(fields: Common, limits: ScanLimits, raw: bytes) -> Scanned:
    """What engines make tokens of in ways of their own."""
    return scanned_of(fields, limits, prompts=(raw.decode("utf-8", "replace"),), by_text=True)


def _generate(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _Generate = decode(_GENERATE, body, "")
    prompts = prompts_in(bytes(fields.input_ids), "input_ids", limits) or prompts_in(
        bytes(fields.text), "text", limits
    )
    if not prompts:
        raise refused("give text or input_ids", "text", "missing_prompt")
    params = fields.sampling_params
    first = (params[0] if params else None) if isinstance(params, list) else params
    lora = fields.lora_path if isinstance(fields.lora_path, str) else None
    # An adapter's blocks are nobody else's, as if it were a salt.
    fields.cache_salt = f"{lora}\n{fields.extra_key or ''}" if lora else fields.extra_key
    most = first.max_new_tokens if first else None
    return scanned_of(fields, limits, prompts=prompts, max_output_tokens=most)


def _token_ids(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _TokenIds = decode(_TOKEN_IDS, body, "")
    prompts = prompts_in(bytes(fields.token_ids), "token_ids", limits)
    if not prompts:
        raise refused("give token_ids", "token_ids", "missing_prompt")
    most = fields.sampling_params.max_tokens if fields.sampling_params else None
    return scanned_of(fields, limits, prompts=prompts, max_output_tokens=most)


def _model(body: bytes, limits: ScanLimits) -> Scanned:
    fields: _Model = decode(_MODEL, body, "")
    return Scanned(model=scanned_of(fields, limits).model)


def _opaque(body: bytes, limits: ScanLimits) -> Scanned:
    try:
        return _model(body, limits)
    except ClientError:
        return Scanned()


SHAPES: Mapping[str, Callable[[bytes, ScanLimits], Scanned]] = MappingProxyType(
    {
        "responses": _responses,
        "messages": _messages,
        "input": _input,
        "pairs": _pairs,
        "generate": _generate,
        "token_ids": _token_ids,
        "model": _model,
        "opaque": _opaque,
    }
)
