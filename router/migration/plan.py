"""Decides which streamed requests may continue at another worker, and writes the requests for the
rest of their answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from router.body.scan import Tokens
from router.engines.adapter import StreamForm

GENERATE_TOKENS = 128  # what SGLang's own API gives then (0.5, `sampling/sampling_params.py`)
COMPLETION_TOKENS = 16  # what a completion gets that sets no limit: OpenAI's API, all of the above


Fields = Mapping[str, msgspec.Raw]

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

# Fields that tie an answer to more than the tokens so far, and the values that do no harm; null
# never does. Of an answer's second half an engine would not know: how far a grammar, a parser or a
# stop string had got, which of the prompt's tokens were output that penalties count, log
# probabilities of what was said before.
_ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "prompt_logprobs": (),
        "echo": (False,),
        "suffix": ("",),
        "stop": ("", []),
        "bad_words": ([],),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "tools": ([],),
        "functions": ([],),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "structural_tag": (),
        "thinking_token_budget": (),
        "continue_final_message": (False,),
        "prompt_embeds": (),
        "mm_processor_kwargs": ({},),
        "kv_transfer_params": ({},),
        "session_params": ({},),
        "logits_processors": ([],),
        "custom_logit_processor": (),
        "vllm_xargs": ({},),
        "return_hidden_states": (False,),
        "audio": (),
        "modalities": (["text"],),
    }
)
# The same of SGLang's own API: fields of the request, and of its `sampling_params`. How its penalty
# of repetitions counts a prompt differs between versions.
_ONLY_GENERATE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "return_logprob": (False,),
        "top_logprobs_num": (0,),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "session_params": ({},),
        "custom_logit_processor": (),
        "input_embeds": (),
        "image_data": ([], ""),
        "video_data": ([], ""),
        "audio_data": ([], ""),
        "bootstrap_host": (),
        "bootstrap_room": (),
        "n": (1,),
        "stop": ("", []),
        "stop_regex": ("", []),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "structural_tag": (),
        "custom_params": ({},),
    }
)
_HARMLESS_BYTES = 256  # no value that is in these tables is longer, blanks included
GENERATE = "/generate"
MOVABLE = (None, GENERATE)  # of what is only some engines' (`policies.facts.Arrival.needs`)
# Types of content parts that are text, and of tool calls in earlier turns.
_TEXT_PARTS = rb"text|input_text|output_text|refusal|thinking|function"
_OTHER_PART = re.compile(rb'"type"\s*:\s*"(?!(?:' + _TEXT_PARTS + rb')")')
_SEVERAL = re.compile(rb'\[\s*(?:\[[^\]]*\]|"(?:[^"\\]|\\.)*")\s*,')


@dataclass(frozen=True, slots=True)
class Plan:
    """The facts of a request that the router needs in order to ask another worker for the rest of
    the answer. Lifetime: request.
    """

    fields: Fields
    chat: bool
    max_tokens: int | None
    shows_ids: bool  # the client asked for token ids itself
    shows_usage: bool  # at the stream's end
    prompt: Sequence[int] | None = None  # of SGLang's own API, whose streams do not tell its ids

    @property
    def salt(self) -> str | None:
        """The salt that, besides its tokens, identifies the request's blocks, as `router.body.scan`
        reads it.
        """
        if self.prompt is not None:
            key, lora = (value_of(self.fields.get(name)) for name in ("extra_key", "lora_path"))
            return f"{lora}\n{key or ''}" if isinstance(lora, str) and lora else key or None
        value = value_of(self.fields.get("cache_salt"))
        return value if isinstance(value, str) and value else None


def plan_of(
    body: bytes, path: str, max_tokens: int | None, encoded: Sequence[Tokens] = ()
) -> Plan | str:
    """Return the plan by which a streamed request may continue at another worker, or a word for why
    it may not.

    `body` was read before (`scan`), so it is a JSON object. `max_tokens` is the requested limit of
    the answer. `encoded` has the token ids that the router made of the prompts.
    """
    if path == GENERATE:
        return _generate_plan(_FIELDS.decode(body), max_tokens, encoded)
    chat = path.endswith("/chat/completions")
    if not chat and not path.endswith("/completions"):
        return "path"
    fields = _FIELDS.decode(body)
    for name, harmless in _ONLY.items():
        if name in fields and len(memoryview(fields[name])) > _HARMLESS_BYTES:
            return name
        if name in fields and (value := value_of(fields[name])) is not None:
            if name == "logprobs" and not chat:  # a number there: 0 asks for the token's own
                return name
            if value not in harmless:
                return name
    if max_tokens == 0:
        return "max_tokens"
    if chat and _OTHER_PART.search(fields["messages"]):
        return "media"
    if not chat and _SEVERAL.match(fields["prompt"]):
        return "prompts"
    options = value_of(fields.get("stream_options"))
    return Plan(
        fields,
        chat,
        max_tokens,
        shows_ids=bool(value_of(fields.get("return_token_ids"))),
        shows_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _generate_plan(fields: Fields, max_tokens: int | None, encoded: Sequence[Tokens]) -> Plan | str:
    params = value_of(fields.get("sampling_params")) or {}
    if not isinstance(params, dict):
        return "prompts"
    for name, harmless in _ONLY_GENERATE.items():
        for value in (value_of(fields.get(name)), params.get(name)):
            if value is not None and value not in harmless:
                return name
    if max_tokens == 0:
        return "max_tokens"
    ids = value_of(fields.get("input_ids"))
    if ids is None:
        if not isinstance(value_of(fields.get("text")), str):
            return "prompts"
        if len(encoded) != 1:
            return "no_token_ids"
        ids = encoded[0].tolist()
    if not ids or not isinstance(ids[0], int):
        return "prompts"
    return Plan(fields, False, max_tokens, shows_ids=True, shows_usage=False, prompt=ids)


def value_of(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


# Of no meaning to a prompt of ids, or in the way: how a chat becomes text and what is parsed out of
# its answer, what was cut off a prompt, and what is set anew.
_DROPPED = frozenset(
    {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
        "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message", "reasoning_effort", "include_reasoning", "separate_reasoning",
        "stream_reasoning", "response_format", "logprobs", "top_logprobs", "add_special_tokens",
        "truncate_prompt_tokens", "truncation_side", "max_completion_tokens", "echo",
    }
)  # fmt: skip


def with_return_token_ids(body: bytes, plan: Plan) -> bytes:
    """Return `body` with `return_token_ids`. If it did not have this field, all its other bytes
    stay the same.

    `body` may differ from the body of the plan only in the prompt.
    """
    if plan.shows_ids:
        return body
    if "return_token_ids" not in plan.fields:
        brace = body.index(b"{") + 1
        return body[:brace] + b'"return_token_ids":true,' + body[brace:]
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"return_token_ids": True})


def tokens_left(
    plan: Plan, form: StreamForm, prompt_tokens: int, answer_tokens: int, context_tokens: int | None
) -> int | None:
    """Return how many more tokens the answer may have after `answer_tokens` tokens; None if that is
    unknown.

    `context_tokens` is the model's limit for prompt and answer together, or None if unknown.
    """
    limit = plan.max_tokens
    if limit is None:
        limit = COMPLETION_TOKENS if plan.prompt is None else GENERATE_TOKENS
        limit = form.chat_tokens if plan.chat else limit
    if limit is None:
        if context_tokens is None:
            return None
        limit = context_tokens - prompt_tokens
    return limit - answer_tokens


def rest_of(plan: Plan, ids: Sequence[int], answer_tokens: int, left: int) -> bytes:
    """Return the body of a completion request that continues after `ids`, which are those of the
    prompt and of the `answer_tokens` tokens of the answer.
    """
    if plan.prompt is not None:
        return _rest_of_generate(plan, ids, answer_tokens, left)
    fields: dict[str, Any] = {k: v for k, v in plan.fields.items() if k not in _DROPPED}
    least = value_of(plan.fields.get("min_tokens"))
    if isinstance(least, int):
        fields["min_tokens"] = max(least - answer_tokens, 0)
    fields |= {"prompt": list(ids), "max_tokens": left, "stream": True, "return_token_ids": True}
    return msgspec.json.encode(fields)


def _rest_of_generate(plan: Plan, ids: Sequence[int], answer_tokens: int, left: int) -> bytes:
    params: dict[str, Any] = value_of(plan.fields.get("sampling_params")) or {}
    least = params.get("min_new_tokens")
    if isinstance(least, int):
        params["min_new_tokens"] = max(least - answer_tokens, 0)
    fields: dict[str, Any] = {k: v for k, v in plan.fields.items() if k != "text"}
    fields |= {"input_ids": list(ids), "sampling_params": params | {"max_new_tokens": left}}
    return msgspec.json.encode(fields)


def to_completions(target: str) -> str:
    """Return the target for a completion on the same server as a chat's target, with the same
    query.
    """
    path, mark, query = target.partition("?")
    return (
        path.removesuffix("/chat/completions") + "/completions" + mark + query
        if (path.endswith("/chat/completions"))
        else target
    )
