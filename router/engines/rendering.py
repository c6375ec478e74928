"""The renderers that the router knows: vLLM's, SGLang's and llama.cpp's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.wire.events import WireError
from kvkernels import token_ids
from router.body.json_edit import values_in, with_last_field
from router.body.scan import Tokens
from router.engines.adapter import decoded
from router.engines.media import Features, media_of
from router.engines.render_way import (
    CHATS,
    COMPLETIONS,
    MAX_TOKENS,
    NotRenderedError,
    Post,
    Rendered,
)

_MAX_PROMPTS = 4_096
_LONG_BYTES = 1 << 19  # of an answer that is read in a thread
_LOOKED_AT = 64


class _RenderedRequest(msgspec.Struct):
    token_ids: msgspec.Raw
    features: Features | None = None


_GENERATE = msgspec.json.Decoder(_RenderedRequest)
_LIST = msgspec.json.Decoder(
    Annotated[list[_RenderedRequest], Meta(min_length=1, max_length=_MAX_PROMPTS)]
)


@dataclass(frozen=True, slots=True)
class VllmRender:
    """Renders prompts by vLLM's `/render` routes (0.16 and later; behind a flag since 0.29). The
    client's body is sent unchanged, because another order of keys can lead to other token ids. The
    field `mm_payload` keeps the pixels of images out of the answer.
    """

    flag: str | None = "vllm serve --enable-scale-out"
    has_media: bool = True

    def takes(self, path: str) -> bool:
        """Return True if requests to `path` can be rendered."""
        return path in (CHATS, COMPLETIONS)

    async def render(self, post: Post, path: str, body: bytes) -> Sequence[Rendered]:
        """Return each prompt of a request as vLLM renders it."""
        url = f"{path}/render"
        reply = await post(url, with_last_field(body, "mm_payload", b'"none"'))
        return await _read(reply, lambda: _all_rendered(reply, path == COMPLETIONS, url))


def _all_rendered(reply: bytes, several: bool, where: str) -> list[Rendered]:
    try:
        found = _LIST.decode(reply) if several else [_GENERATE.decode(reply)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{where}: {error}") from error
    return [_rendered(one, where) for one in found]


def _rendered(answer: _RenderedRequest, where: str) -> Rendered:
    ids = _ids(answer.token_ids, where)
    if answer.features is None:
        return Rendered(ids)
    try:
        return Rendered(ids, media_of(answer.features, len(ids)))
    except ValueError as error:
        raise WireError(f"{where}: {error}") from error


def _ids(raw: msgspec.Raw, where: str) -> Tokens:
    """Return the token ids of a JSON array. Raises WireError if it contains anything else."""
    view = memoryview(raw)
    found = token_ids(view) if bytes(view[:1]) == b"[" else (0, 0)
    if isinstance(found, tuple):
        raise WireError(f"{where}: not a list of token ids")
    if not 0 < len(found) <= MAX_TOKENS:
        raise WireError(f"{where}: {len(found)} token ids")
    return found


_TOKENIZE_ONLY = ("add_generation_prompt", "add_special_tokens")


class _TokensAnswer(msgspec.Struct):
    tokens: msgspec.Raw


@dataclass(frozen=True, slots=True)
class SglangRender:
    """Renders prompts by SGLang's `/v1/tokenize` (0.5.23), which accepts the same chats as SGLang's
    chat path.
    """

    flag: str | None = None
    has_media: bool = False

    def takes(self, path: str) -> bool:
        """Return True if requests to `path` can be rendered."""
        return path in (CHATS, COMPLETIONS)

    async def render(self, post: Post, path: str, body: bytes) -> Sequence[Rendered]:
        """Return each prompt of a request as SGLang renders it. Raises NotRenderedError for a chat
        with one of two fields that `/v1/tokenize` obeys and SGLang's chat path ignores.
        """
        url = "/v1/tokenize"
        if path == CHATS and any(value is not None for value in values_in(body, _TOKENIZE_ONLY)):
            raise NotRenderedError
        reply = await post(url, body)
        return await _read(reply, lambda: _all_tokens(reply, url))


def _all_tokens(reply: bytes, where: str) -> list[Rendered]:
    """Return the prompts in an answer that contains one list of token ids, or a list of
    such lists.
    """
    raw = decoded(reply, _TokensAnswer, where).tokens
    several = bytes(memoryview(raw)[1:_LOOKED_AT]).lstrip().startswith(b"[")
    lists = decoded(bytes(raw), list[msgspec.Raw], where) if several else [raw]
    return [Rendered(_ids(one, where)) for one in lists[:_MAX_PROMPTS]]


class _TemplateAnswer(msgspec.Struct):
    prompt: str


@dataclass(frozen=True, slots=True)
class LlamaCppRender:
    """Renders prompts by llama.cpp's server: `/apply-template` turns a chat into text, and
    `/tokenize` turns text into token ids.
    """

    flag: str | None = "llama-server --jinja"
    has_media: bool = False

    def takes(self, path: str) -> bool:
        """Return True if requests to `path` can be rendered."""
        return path in (CHATS, COMPLETIONS)

    async def render(self, post: Post, path: str, body: bytes) -> Sequence[Rendered]:
        """Return the prompt of a request, which must be one text or a chat."""
        if path == CHATS:
            reply = await post("/apply-template", body)
            text = decoded(reply, _TemplateAnswer, "/apply-template").prompt
        else:
            (raw,) = values_in(body, ("prompt",))
            if raw is None or not raw.startswith(b'"'):
                raise NotRenderedError
            text = decoded(raw, str, "prompt")
        asked = {"content": text, "add_special": True, "parse_special": True}
        tokens = await post("/tokenize", msgspec.json.encode(asked))
        return await _read(tokens, lambda: _all_tokens(tokens, "/tokenize"))


async def _read(reply: bytes, read: Callable[[], Sequence[Rendered]]) -> Sequence[Rendered]:
    """Return the prompts that `read` finds in an answer. A long answer is read in a thread."""
    return await asyncio.to_thread(read) if len(reply) >= _LONG_BYTES else read()
