"""The sampling that a body asks for: fields of OpenAI and vLLM, the model's defaults below."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.sampling.params import InvalidParam, SamplingParams
from engine.server.bodies import ChatBody, CompletionBody
from engine.server.errors import ApiError

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "n", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
)


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# By field: values that ask for nothing.
_UNSERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
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


def refuse_unserved(body: CompletionBody | ChatBody) -> None:
    """Raise ApiError 400 for what asks for another answer than the model gives here: tokens that
    pass it over would look like that answer."""
    for name, nothing in _UNSERVED.items():
        if getattr(body, name, None) not in nothing:
            raise ApiError(400, f"{name} is not served here; leave it out", name)


def sampling_of(
    body: CompletionBody | ChatBody, output_tokens: int, defaults: Mapping[str, float], vocab: int
) -> SamplingParams:
    """What `body` asks, its silence filled by `defaults`. Raises ApiError 400 naming the field."""
    fields: dict[str, Any] = dict(defaults)
    fields |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
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
