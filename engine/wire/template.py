"""Chat templates, rendered as transformers and vLLM render them.

The environment's settings are those of transformers 5 (`utils/chat_template_utils.py`); what
is done to messages before is vLLM 0.33's (`renderers/hf.py`). Each of them changes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.wire.errors import PromptError
from engine.wire.tokens import Chat, Message, checked, message_text, part_text

MAX_RENDERED_CHARS = 16 << 20


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks training masks; we render its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatTemplate:
    """One compiled chat template. Lifetime: process; holds no state between renderings.

    `special` are the tokenizer's special tokens by name (`bos_token`, ...). Raises ValueError
    if the source is not a Jinja template.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
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
            self._wants_parts = _iterates_content(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._names_developer = "developer" in source
        self._special = dict(special)

    def render(self, chat: Chat, now_s: float) -> str:
        """The prompt text. Raises PromptError where the template refuses the messages."""
        messages = [self._prepared(message) for message in checked(chat)]
        if not self._names_developer:
            messages = _developer_as_system(messages)
        now = datetime.fromtimestamp(now_s)
        variables: dict[str, Any] = {
            **self._special,
            "strftime_now": now.strftime,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        if chat.reasoning_effort is not None:
            variables["reasoning_effort"] = chat.reasoning_effort
        reserved = {"messages", "tools", "documents", "strftime_now"}
        kwargs = chat.chat_template_kwargs or {}
        variables.update((name, value) for name, value in kwargs.items() if name not in reserved)
        text = self._render(variables)
        return _cut_after_final(text, messages[-1]) if chat.continue_final_message else text

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

    def _prepared(self, message: Message) -> Message:
        prepared = dict(message)
        content = message.get("content")
        if isinstance(content, list):
            if self._wants_parts:
                prepared["content"] = [{"type": "text", "text": part_text(p)} for p in content]
            else:
                prepared["content"] = message_text(message)
        elif isinstance(content, str) and self._wants_parts:
            prepared["content"] = [{"type": "text", "text": content}]
        if message.get("tool_calls") is not None:
            prepared["tool_calls"] = _parsed_calls(message["tool_calls"])
        return prepared


def _parsed_calls(calls: object) -> list[Any]:
    """Tool calls with their arguments as objects: clients send them as JSON text."""
    if not isinstance(calls, list):
        raise PromptError("tool_calls must be an array", "messages")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise PromptError("each tool call must be an object with a function", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
            except msgspec.DecodeError as error:
                raise PromptError(f"tool call arguments: {error}", "messages") from error
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """Where a template does not know `developer`, it and `system` become one first message."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    leading = [m for m in messages if m["role"] in ("developer", "system")]
    others = [m for m in messages if m["role"] not in ("developer", "system")]
    text = "\n\n".join(message_text(message) for message in leading)
    return [{"role": "system", "content": text}, *others]


def _cut_after_final(text: str, final: Message) -> str:
    """The text up to the end of the final message, which the model is to continue."""
    content = message_text(final)
    for candidate in (content, content.strip()):
        start = text.rfind(candidate) if candidate else -1
        if start >= 0:
            return text[: start + len(candidate)]
    raise PromptError("continue_final_message: the final message has no text", "messages")


def _iterates_content(tree: nodes.Template) -> bool:
    """True if the template loops over a message's content: then it wants parts, not a string."""
    names = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


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
