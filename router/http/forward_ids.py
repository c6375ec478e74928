"""A request's ids sent to the worker in the text's place, so that it need not tokenize again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from router.http.scan import Tokens

# Which engines take token ids as `prompt` of a completion, and which as a field beside messages.
_COMPLETIONS = frozenset({"warmroute", "vllm", "sglang", "trtllm"})
_CHATS: Mapping[str, str] = MappingProxyType({"trtllm": "prompt_token_ids"})


class _Prompt(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")


_PROMPT = msgspec.json.Decoder(_Prompt)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_token_ids(body: bytes, path: str, kind: str, ids: Sequence[Tokens]) -> bytes:
    """`body`, sent to `path` of a worker of `kind`, with the ids of its prompts instead of text.

    All other bytes stay as they were. The body as it came, where such a worker takes no ids or
    there are none.
    """
    if not ids:
        return body
    if path.endswith("/chat/completions"):
        name = _CHATS.get(kind)
        return body if name is None else _with_field(body, name, ids[0])
    if kind not in _COMPLETIONS:
        return body
    raw = _PROMPT.decode(body).prompt
    # A view of the body: where it lies tells which of several `prompt`s counts.
    at = _address(memoryview(raw)) - _address(body)
    end = at + len(memoryview(raw))
    if not 0 < at < end < len(body) or body[at:end] != bytes(raw):
        return body
    several = body[at : at + 1] == b"["  # as they came: a list of one prompt stays a list
    value = [array.tolist() for array in ids] if several else ids[0].tolist()
    return body[:at] + msgspec.json.encode(value) + body[end:]


def _with_field(body: bytes, name: str, ids: Tokens) -> bytes:
    """The body with one more field before its others; the body itself where it has that one."""
    if name in _FIELDS.decode(body):
        return body
    brace = body.index(b"{") + 1
    return (
        body[:brace]
        + b'"%s":%s,' % (name.encode(), msgspec.json.encode(ids.tolist()))
        + (body[brace:])
    )


def _address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
