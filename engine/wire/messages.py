"""What servers do to messages and tools before a chat template sees them; it changes the tokens.

As vLLM 0.33 does it (`renderers/chat_utils`, `renderers/hf.py`, `openai/chat_completion/
protocol.py`), and transformers 5 after it (`utils/chat_template_utils.py`). All functions here are
pure and leave what they are given as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.wire.errors import PromptError
from engine.wire.tokens import Message, message_text, part_text

_REASONING = ("reasoning", "reasoning_content")  # the second is the older name


def prepared(messages: Iterable[Message], wants_parts: bool) -> list[Message]:
    """The messages as a template gets them, which `wants_parts` or one text as content.

    Raises PromptError for tool calls of an unknown shape.
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


def _parsed_calls(calls: object) -> list[Any]:
    """Tool calls with their arguments as objects: clients send them as JSON text.

    What is no object becomes an empty one, so that a model's broken call does not end its chat.
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
            try:
                arguments = msgspec.json.decode(arguments)
            except (msgspec.DecodeError, RecursionError, UnicodeError):
                arguments = None
        usable = arguments if isinstance(arguments, dict) else {}
        parsed.append({**call, "function": {**function, "arguments": usable}})
    return parsed


def developer_as_system(messages: list[Message]) -> list[Message]:
    """For templates that do not know `developer`: it is `system`, of which there is one, first."""
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
    """Tools as vLLM's data model writes them, whatever the order of the client's keys."""
    return None if tools is None else [_declared(tool) for tool in tools]


def _declared(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    fields = {"name": function.get("name"), "description": None, "parameters": None}
    return {"type": tool.get("type", "function"), "function": fields | function}
