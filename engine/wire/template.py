"""Renders chat templates as transformers and vLLM do, after preparing the messages as they do.

The environment's settings are those of transformers 5 (`utils/chat_template_utils.py`). The
variables of a template, and the preparation of messages and tools, are those of vLLM 0.33
(`renderers/hf.py`, `renderers/chat_utils`, `openai/chat_completion/protocol.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.wire.tokens import Chat, Message, PromptError, checked, message_text, part_text


def loops_over_content(tree: nodes.Template) -> bool:
    """Return whether the template in `tree` iterates over the content of a message."""
    messages = _names_of(tree, {"messages"})
    one = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_name(loop.iter, messages)
    }
    message = _names_of(tree, one)
    inside: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        given = _parameters_given_content(tree, macro, message)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return True
    return any(
        _is_content(loop.iter, message)
        or (_is_plain(loop.iter, "content") and id(loop) not in inside)
        for loop in tree.find_all(nodes.For)
    )


def _names_of(tree: nodes.Template, names: set[str]) -> set[str]:
    """Return `names`, and all names to which the template assigns one of them, or a slice or
    filtering of one.
    """
    known = set(names)
    assignments = list(tree.find_all(nodes.Assign))
    grew = True
    while grew:
        grew = False
        for assignment in assignments:
            target = assignment.target
            if not isinstance(target, nodes.Name) or target.name in known:
                continue
            if _is_name(assignment.node, known):
                known.add(target.name)
                grew = True
    return known


def _parameters_given_content(
    tree: nodes.Template, macro: nodes.Macro, message: set[str]
) -> set[str]:
    """Return the parameters of `macro` for which some call passes a message's content."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in tree.find_all(nodes.Call):
        if not _is_plain(call.node, macro.name):
            continue
        passed = zip(names, call.args, strict=False)
        named = ((keyword.key, keyword.value) for keyword in call.kwargs)
        given |= {name for name, value in (*passed, *named) if _is_content(value, message)}
    return given


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """Return the node to which filters, tests and slices are applied."""
    while True:
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if isinstance(node, nodes.Filter | nodes.Test) or sliced:
            node = node.node  # type: ignore[union-attr]
        else:
            return node


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    node = _unwrapped(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _is_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_content(node: nodes.Node | None, message: set[str]) -> bool:
    """Return whether the node is `message.content` or `message['content']`, perhaps filtered or
    sliced.
    """
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, message)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == "content" and _is_name(node.node, message)
    return False


_REASONING = ("reasoning", "reasoning_content")  # the second is the older name


def prepared(messages: Iterable[Message], wants_parts: bool) -> list[Message]:
    """Return the messages for a template, with content as parts (`wants_parts`) or as one text.

    Raises PromptError for tool calls of an unknown form.
    """
    return [_prepared(message, wants_parts) for message in messages]


def _prepared(message: Message, wants_parts: bool) -> Message:
    role = message["role"]
    content = message.get("content")
    if not wants_parts or role == "tool":  # tool templates rarely know parts
        ready: Message = {"role": role, "content": message_text(message)}
    elif isinstance(content, str):
        ready = {"role": role, "content": [{"type": "text", "text": content}]}
    else:
        texts = [part_text(part) for part in content or ()]
        parts = [{"type": "text", "text": text} for text in texts if text is not None]
        ready = {"role": role, "content": parts}
    if role == "assistant":
        if message.get("tool_calls"):
            ready["tool_calls"] = _parsed_calls(message["tool_calls"])
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if reasoning is not None:
            # Under all names: which one a template reads depends on its model.
            ready |= dict.fromkeys((*_REASONING, "thinking"), reasoning)
    elif role == "tool" and message.get("tool_call_id") is not None:
        ready["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        ready["tools"] = message["tools"]
    if isinstance(message.get("name"), str):
        ready["name"] = message["name"]
    return ready


_ARGUMENTS_PARTS = 1 << 16  # a parser builds them while all other threads wait


def _parsed_calls(calls: object) -> list[Any]:
    """Return tool calls with their arguments as objects; clients send arguments as JSON text.
    Arguments that are no object become an empty one, so that a model's broken call does not end its
    chat.
    """
    if not isinstance(calls, list):
        raise PromptError("tool_calls must be an array", "messages")
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise PromptError("each tool call must be an object with a function", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        usable = arguments if isinstance(arguments, dict) else {}
        parsed.append({**call, "function": {**function, "arguments": usable}})
    return parsed


def _parsed(arguments: str) -> Any:
    """Return the object in the JSON text `arguments`; return another value if the text has no
    object.
    """
    if not arguments.lstrip(" \t\r\n").startswith("{"):
        return None
    if sum(map(arguments.count, ",[{")) > _ARGUMENTS_PARTS:
        raise PromptError("the arguments of a tool call have too many parts", "messages")
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def developer_as_system(messages: list[Message]) -> list[Message]:
    """Return the messages for templates without the role `developer`: its text joins the one
    `system` message, which comes first.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    renamed = [_as_system(message) for message in messages]
    if all(message["role"] != "system" for message in renamed[1:]):
        return renamed
    texts = [message_text(message) for message in renamed if message["role"] == "system"]
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    kept = {key: value for key, value in message.items() if key != "tools"}
    return kept | {"role": "system"}


def declared(tools: Iterable[Any] | None) -> list[Any] | None:
    """Return the tools as vLLM's data model writes them: with the keys that vLLM knows, in its
    order.
    """
    return None if tools is None else [_declared(tool) for tool in tools]


def _declared(tool: Any) -> Any:
    """Return the fields of a tool that vLLM knows; two of them only if they are set."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    deferred = _set_field(tool, "defer_loading")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    fields |= _set_field(function, "strict") | deferred | _set_field(function, "defer_loading")
    return {"type": tool.get("type", "function"), "function": fields} | deferred


def _set_field(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return {} if value is None else {name: value}


ContentFormat = Literal["auto", "string", "openai"]

MAX_RENDERED_CHARS = 16 << 20
_CUT_HERE = "CUT_AT_THE_END_OF_THE_FINAL_MESSAGE "
_NOT_KWARGS = frozenset({"chat_template", "tokenize"})


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which marks training masks; its body is
    rendered.
    """

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
        """Return the prompt text. Raises PromptError if the template rejects the messages."""
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
        """Return the template's variables; if two have one name, the later one in this function
        counts.
        """
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
    """Return the messages with a mark after the text of the last message, and that text."""
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
    """Return the text up to the end of the final message, which the model is to continue.

    The mark ends in white space: a template that trims the message trims the mark, too, and then
    the end of the message has to be removed as well.
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
