"""Chat templates, rendered as transformers and vLLM render them.

The environment's settings are those of transformers 5 (`utils/chat_template_utils.py`); which
variables a template sees is vLLM 0.33's (`renderers/hf.py`). Each of them changes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.wire.content_shape import loops_over_content
from engine.wire.errors import PromptError
from engine.wire.messages import declared, developer_as_system, prepared
from engine.wire.tokens import Chat, Message, checked

ContentFormat = Literal["auto", "string", "openai"]

MAX_RENDERED_CHARS = 16 << 20
_CUT_HERE = "CUT_AT_THE_END_OF_THE_FINAL_MESSAGE "
_NOT_KWARGS = frozenset({"chat_template", "tokenize"})


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks training masks; we render its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatTemplate:
    """One compiled chat template. Lifetime: process; holds no state between renderings.

    `special` are the tokenizer's special tokens by name (`bos_token`, ...). `content_format`
    and `defaults` are vLLM's --chat-template-content-format and --default-chat-template-kwargs.
    Raises ValueError if the source is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        content_format: ContentFormat = "auto",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        # Jinja's own filter escapes HTML, which would change the tokens.
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
            loops = loops_over_content(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._wants_parts = loops if content_format == "auto" else content_format == "openai"
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._reads_content = "content" in source
        self._special = dict(special)
        self._defaults = dict(defaults or {})

    def render(self, chat: Chat, now_s: float) -> str:
        """The prompt text. Raises PromptError where the template refuses the messages."""
        messages = prepared(checked(chat), self._wants_parts)
        if not self._knows_developer:
            messages = developer_as_system(messages)
        final = ""
        if chat.continue_final_message:
            if not self._reads_content:
                raise PromptError("continue_final_message: the template reads no content")
            messages, final = _marked(messages)
        text = self._render(self._variables(chat, messages, now_s))
        return _cut_at_mark(text, final) if chat.continue_final_message else text

    def _variables(self, chat: Chat, messages: list[Message], now_s: float) -> dict[str, Any]:
        """What the template sees; of two of one name the later here counts."""
        given = chat.chat_template_kwargs or {}
        if unknown := _NOT_KWARGS & given.keys():
            names = ", ".join(sorted(unknown))
            raise PromptError(f"not among chat_template_kwargs: {names}", "chat_template_kwargs")
        if self._defaults:  # then these values mean that a request leaves it to them
            given = {key: value for key, value in given.items() if value not in (None, "auto")}
        variables = self._special | self._defaults | given
        if chat.reasoning_effort is not None:
            variables["reasoning_effort"] = chat.reasoning_effort
            if "enable_thinking" not in (chat.chat_template_kwargs or {}):
                variables["enable_thinking"] = chat.reasoning_effort != "none"
        for name, value in (("tools", declared(chat.tools)), ("documents", chat.documents)):
            if value is not None or name not in variables:
                variables[name] = value
        return variables | {
            "strftime_now": datetime.fromtimestamp(now_s).strftime,
            "messages": messages,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def _render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise PromptError(
                        f"the rendered chat exceeds {MAX_RENDERED_CHARS} characters", "messages"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise PromptError(f"chat template: {error}", "messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            if isinstance(error, PromptError):
                raise
            # The template ran into a message of a shape it does not know.
            reason = f"{type(error).__name__}: {error}"
            raise PromptError(f"chat template: {reason}", "messages") from error
        return "".join(pieces)


def _marked(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages with a mark after the final one's last text; and that text."""
    *others, final = messages
    content = final["content"]
    if isinstance(content, str):
        return [*others, final | {"content": content + _CUT_HERE}], content
    for at in reversed(range(len(content))):
        if "text" in content[at]:
            text = content[at]["text"]
            parts = [*content[:at], content[at] | {"text": text + _CUT_HERE}, *content[at + 1 :]]
            return [*others, final | {"content": parts}], text
    raise PromptError("continue_final_message: the final message has no text", "messages")


def _cut_at_mark(text: str, final: str) -> str:
    """The text up to the end of the final message, which the model is to continue.

    The mark ends in white space: a template that trims the message trims the mark too, and what
    the message ended in then has to go as well.
    """
    at = text.rfind(_CUT_HERE.rstrip())
    if at < 0 or final.strip() not in text:
        raise PromptError("continue_final_message: the template changes the message", "messages")
    kept = text[:at]
    return kept if text.startswith(_CUT_HERE, at) else kept.rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
