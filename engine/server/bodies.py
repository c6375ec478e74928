"""Request bodies of the OpenAI endpoints: what we read of them, and how they are checked.

Fields that we do not know are ignored, as vLLM does. Those that ask for another answer than the
model gives here are refused by a worker that computes (`asked.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.server.errors import ApiError
from engine.server.retained import RetentionBody
from engine.wire.tokens import Chat, Message

MAX_PROMPTS = 64  # prompts in one completions request; each becomes a sequence of its own
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default
DEFAULT_CHAT_TOKENS = 256  # a timed worker never stops by itself, so there must be an end

_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
_Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Kept = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: _Salt | None = None
    priority: _Priority | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: _Kept | None = None
    kv_cache_retention_config: RetentionBody | None = None
    truncation_side: Literal["left", "right"] | None = None
    # What shapes an answer and is not built: read to be refused, not to be passed over.
    logit_bias: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None

    @property
    def include_usage(self) -> bool:
        """The stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(_Common, frozen=True, kw_only=True):
    """Body of /v1/completions. Lifetime: request."""

    prompt: msgspec.Raw
    add_special_tokens: bool = True
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None

    @property
    def output_tokens(self) -> int:
        """Tokens to give at most."""
        return self.max_tokens or self.max_completion_tokens or DEFAULT_COMPLETION_TOKENS


class ChatBody(_Common, frozen=True, kw_only=True):
    """Body of /v1/chat/completions. Lifetime: request."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = False
    tool_choice: Any = None
    chat_template: Any = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens to give at most; None: as many as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def chat(self) -> Chat:
        """The part that shapes the prompt."""
        return Chat(
            messages=self.messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
            add_special_tokens=self.add_special_tokens,
        )


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize: a prompt or messages. Special tokens: by default a prompt's only."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[_TokenId]


T = TypeVar("T")
COMPLETION = msgspec.json.Decoder(CompletionBody)
CHAT = msgspec.json.Decoder(ChatBody)
TOKENIZE = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_token_ids = msgspec.json.Decoder(list[_TokenId])
_texts = msgspec.json.Decoder(list[str])
_token_lists = msgspec.json.Decoder(list[list[_TokenId]])
_text = msgspec.json.Decoder(str)


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body; raises ApiError 400 saying what is wrong and where (`$.field`)."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"request body: {error}") from error


def prompts_of(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """The prompts: a string, token ids, or an array of either, one form throughout.

    Raises ApiError 400 for other shapes, for none and for more than MAX_PROMPTS.
    """
    text = bytes(raw).lstrip()
    inside = text[1:].lstrip()[:1]
    prompts: list[str] | list[list[int]]
    try:
        if text[:1] == b'"':
            prompts = [_text.decode(text)]
        elif text[:1] != b"[":
            raise ApiError(400, "prompt must be a string or an array", "prompt")
        elif inside == b'"':
            prompts = _texts.decode(text)
        elif inside == b"[":
            prompts = _token_lists.decode(text)
        else:
            prompts = [_token_ids.decode(text)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"prompt: {error}", "prompt") from error
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"{len(prompts)} prompts; at most {MAX_PROMPTS}", "prompt")
    if not all(prompts):
        raise ApiError(400, "prompt must not be empty", "prompt")
    return prompts
