"""The requests that migration sends: the client's own with ids asked for, and one for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.http.migration.forms import COMPLETION_TOKENS, GENERATE_TOKENS, Form
from router.http.migration.plan import Plan, value_of

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


def asking_for_ids(body: bytes, plan: Plan) -> bytes:
    """`body` with `return_token_ids`; all other bytes stay as they were where it had no such field.

    `body` may differ from the planned one in the prompt only.
    """
    if plan.shows_ids:
        return body
    if "return_token_ids" not in plan.fields:
        brace = body.index(b"{") + 1
        return body[:brace] + b'"return_token_ids":true,' + body[brace:]
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"return_token_ids": True})


def tokens_left(
    plan: Plan, form: Form, prompt_tokens: int, said: int, context_tokens: int | None
) -> int | None:
    """Tokens that the rest may have, once `said` were said; None where that cannot be known.

    `context_tokens`: prompt and answer that the model takes; None: unknown.
    """
    limit = plan.max_tokens
    if limit is None:
        limit = COMPLETION_TOKENS if plan.prompt is None else GENERATE_TOKENS
        limit = form.chat_tokens if plan.chat else limit
    if limit is None:
        if context_tokens is None:
            return None
        limit = context_tokens - prompt_tokens
    return limit - said


def rest_of(plan: Plan, ids: Sequence[int], said: int, left: int) -> bytes:
    """The body of a completion that goes on after `ids`: the prompt's, and `said` of the answer."""
    if plan.prompt is not None:
        return _rest_of_generate(plan, ids, said, left)
    fields: dict[str, Any] = {k: v for k, v in plan.fields.items() if k not in _DROPPED}
    least = value_of(plan.fields.get("min_tokens"))
    if isinstance(least, int):
        fields["min_tokens"] = max(least - said, 0)
    fields |= {"prompt": list(ids), "max_tokens": left, "stream": True, "return_token_ids": True}
    return msgspec.json.encode(fields)


def _rest_of_generate(plan: Plan, ids: Sequence[int], said: int, left: int) -> bytes:
    params: dict[str, Any] = value_of(plan.fields.get("sampling_params")) or {}
    least = params.get("min_new_tokens")
    if isinstance(least, int):
        params["min_new_tokens"] = max(least - said, 0)
    fields: dict[str, Any] = {k: v for k, v in plan.fields.items() if k != "text"}
    fields |= {"input_ids": list(ids), "sampling_params": params | {"max_new_tokens": left}}
    return msgspec.json.encode(fields)


def to_completions(target: str) -> str:
    """A chat's request target, with its query, as that of a completion at the same place."""
    path, mark, query = target.partition("?")
    return (
        path.removesuffix("/chat/completions") + "/completions" + mark + query
        if (path.endswith("/chat/completions"))
        else target
    )
