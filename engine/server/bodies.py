"""Reads and checks the bodies of inference requests, and turns them into parameters.

Unknown fields are ignored, as in vLLM. A worker that computes rejects fields that ask for another
answer than its model gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.block_pool import DEFAULT_PRIORITY, InvalidRetention, Retention, TokenRange
from engine.sampling.params import InvalidParam, SamplingParams
from engine.server.errors import ApiError
from engine.wire.kv_transfer import TransferParams
from engine.wire.tokens import Chat, Message

FIELD = "kv_cache_retention_config"
_RANGES = "retention_token_range_"
# Each tensor: its datatype, the field, and whether it is one of a range's.
TENSORS = (
    (f"{_RANGES}starts", "INT32", "token_start", True),
    (f"{_RANGES}ends", "INT32", "token_end", True),
    (f"{_RANGES}priorities", "INT32", "priority", True),
    (f"{_RANGES}durations_ms", "INT32", "duration_ms", True),
    ("retention_decode_priority", "INT32", "decode_retention_priority", False),
    ("retention_decode_duration_ms", "INT32", "decode_duration_ms", False),
)
_NONE = -1  # in a tensor of ends or durations: there is none


class RangeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of `token_range_retention_configs` in a request: a range of tokens, and the worth of
    its blocks.
    """

    token_start: int
    priority: int
    token_end: int | None = None
    duration_ms: float | None = None


class RetentionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `retention_config` of a request. Lifetime: request."""

    token_range_retention_configs: list[RangeBody] = []
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: float | None = None


def retention_of(body: RetentionBody | None) -> Retention | None:
    """Return the retention that the field asks for. Raises ApiError 400."""
    if body is None:
        return None
    try:
        ranges = [
            TokenRange.of(one.token_start, one.token_end, one.priority, one.duration_ms)
            for one in body.token_range_retention_configs
        ]
        return Retention.of(ranges, body.decode_retention_priority, body.decode_duration_ms)
    except InvalidRetention as error:
        raise ApiError(400, f"{FIELD}: {error}", FIELD) from error


def from_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with the retention tensors joined into the one field that they describe.

    Raises ApiError 400 unless each tensor has one value for each range.
    """
    found = {name: fields[name] for name, *_ in TENSORS if name in fields}
    if not found:
        return fields
    left = {name: value for name, value in fields.items() if name not in found}
    columns: dict[str, list[Any]] = {}
    config: dict[str, Any] = {}
    for name, _, field, is_range in TENSORS:
        value = found.get(name)
        if value is None:
            continue
        if not is_range:
            config[field] = value
            continue
        values = value if isinstance(value, list) else [value]
        if field in ("token_end", "duration_ms"):
            values = [None if one == _NONE else one for one in values]
        columns[field] = values
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        message = f"{_RANGES}starts, ends, priorities and durations_ms must be of one length"
        raise ApiError(400, message, f"{_RANGES}starts")
    ranges = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return left | {FIELD: config | {"token_range_retention_configs": ranges}}


MAX_PROMPTS = 64  # prompts in one completions request; each becomes a sequence of its own
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default
DEFAULT_CHAT_TOKENS = 256  # a timed worker never stops by itself, so there must be an end

_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
_Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_PromptLimit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The field `stream_options` of a request."""

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
    truncate_prompt_tokens: _PromptLimit | None = None
    kv_cache_retention_config: RetentionBody | None = None
    kv_transfer_params: TransferParams | None = None
    truncation_side: Literal["left", "right"] | None = None
    # Fields that would change an answer and are not supported: they are read to be refused.
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
        """True if the stream ends with a chunk of usage."""
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
        """The limit of output tokens."""
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
        """The limit of output tokens; None means as many as fit into the context."""
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize: a prompt or messages. By default, special tokens are added to prompts
    only.
    """

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
    """Return the decoded body of a request. Raises ApiError 400, which says what is wrong and where
    (`$.field`).
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"request body: {error}") from error


def chat_of(body: msgspec.Struct) -> Chat:
    """Return the part of a body that shapes the prompt of its messages; missing fields have Chat's
    defaults.
    """
    given = {name: getattr(body, name, None) for name in Chat.__struct_fields__}
    return Chat(**{name: value for name, value in given.items() if value is not None})


def prompts_of(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """Return the prompts: a string, token ids, or an array of either, all in one form.

    Raises ApiError 400 for other forms, for none, and for more than MAX_PROMPTS.
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


_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "n", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
)


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# By field: values that have no effect.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "response_format": (*_NOTHING, {"type": "text"}),
        "tool_choice": (*_NOTHING, "auto", "none"),
        "prompt_logprobs": (None,),  # 0 asks for those of the prompt's own tokens
        **dict.fromkeys(
            (
                *("logit_bias", "structured_outputs", "guided_json", "guided_regex"),
                *("guided_choice", "guided_grammar", "bad_words", "use_beam_search"),
                *("suffix", "chat_template"),
            ),
            _NOTHING,
        ),
    }
)


def refuse_unsupported(body: CompletionBody | ChatBody) -> None:
    """Raise ApiError 400 for a body that asks for another answer than the model gives.

    If the field were ignored, the tokens would look like the answer that was asked for.
    """
    for name, nothing in _UNSUPPORTED.items():
        if getattr(body, name, None) not in nothing:
            raise ApiError(400, f"{name} is not served here; leave it out", name)


def sampling_of(
    body: CompletionBody | ChatBody, output_tokens: int, defaults: Mapping[str, float], vocab: int
) -> SamplingParams:
    """Return the sampling parameters of `body`, completed by `defaults`. Raises ApiError 400 with
    the field.
    """
    fields: dict[str, Any] = dict(defaults)
    fields |= {
        name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None
    }
    stop = body.stop
    if stop:
        fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if body.stop_token_ids:
        fields["stop_token_ids"] = frozenset(body.stop_token_ids)
    fields["logprobs"] = _logprobs(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of must be n: answers are not ranked here", "best_of")
    if isinstance(body, CompletionBody) and body.echo:
        raise ApiError(400, "echo is not served: the prompt is yours already", "echo")
    try:
        params = SamplingParams(**fields)
        params.check_against(output_tokens, vocab)
    except InvalidParam as error:
        raise ApiError(400, str(error), error.field) from error
    return params


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
