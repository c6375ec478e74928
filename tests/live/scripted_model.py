"""A model that follows a script: it starts two sub-agents, which finish, and then finishes itself.

It streams server-sent events in the three protocols of agents' clients, after OpenAI's API
reference (chat completions, responses) and Anthropic's (messages, version 2023-06-01).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "scripted"
TASK, CHILD = "SPAWN two agents.", "CHILD"  # the user's prompt, and the prompt of a sub-agent
DONE, CHILD_DONE = "The main agent is done.", "The child is done."
_STARTS = ("Agent", "Task", "task", "spawn_agent")  # the clients' tools that start an agent

Call = tuple[str, dict[str, Any], str | None]  # a tool, its arguments, its namespace


@dataclass
class ScriptedModel:
    """The server of the scripted model. `asked` has each request's path, lower-case headers and
    body. Lifetime: test.
    """

    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        forms = {
            "/v1/messages": _messages,
            "/v1/responses": _responses,
            "/v1/chat/completions": _chat,
        }
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL}]})
        if request.path not in forms:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = json.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.path, headers, body))
        events = b"".join(forms[request.path](_next(body)))
        return web.Response(body=events, headers={"Content-Type": "text/event-stream"})


def _next(body: dict[str, Any]) -> str | list[Call]:
    """Return the model's next answer in this conversation: a text, or tool calls."""
    said = json.dumps(body.get("messages") or body.get("input"))
    tools = dict(_tools(body.get("tools") or []))
    start = next((name for name in _STARTS if name in tools), None)
    if TASK not in said:
        return CHILD_DONE
    results = said.count('"tool_result"') + said.count('"role": "tool"')
    results += said.count('"function_call_output"')
    if results == 0 and start is not None:
        return [_start(start, *tools[start], number) for number in (1, 2)]
    return DONE


def _tools(tools: list[Any], space: str | None = None) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from _tools(tool["tools"], tool["name"])
            continue
        function = tool.get("function") or tool
        schema = function.get("input_schema") or function.get("parameters") or {}
        yield function.get("name", ""), (schema.get("properties", {}), space)


def _start(name: str, fields: dict[str, Any], space: str | None, number: int) -> Call:
    values = {
        "prompt": f"{CHILD} {number}: end.",
        "message": f"{CHILD} {number}: end.",
        "description": f"child {number}",
        "subagent_type": "general" if name == "task" else "general-purpose",
        "run_in_background": False,
    }
    return name, {key: value for key, value in values.items() if key in fields}, space


def _event(data: dict[str, Any], named: bool = True) -> bytes:
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def _messages(what: str | list[Call]) -> Iterator[bytes]:
    usage = {"input_tokens": 9, "output_tokens": 9}
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": []}
    begun |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event({"type": "message_start", "message": begun})
    calls = [] if isinstance(what, str) else what
    if isinstance(what, str):
        blocks = [({"type": "text", "text": ""}, {"type": "text_delta", "text": what})]
    else:
        blocks = [
            (
                {"type": "tool_use", "id": f"toolu_{n}{id(calls)}", "name": name, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(arguments)},
            )
            for n, (name, arguments, _) in enumerate(what)
        ]
    for n, (block, delta) in enumerate(blocks):
        yield _event({"type": "content_block_start", "index": n, "content_block": block})
        yield _event({"type": "content_block_delta", "index": n, "delta": delta})
        yield _event({"type": "content_block_stop", "index": n})
    end = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": end, "usage": {"output_tokens": 9}})
    yield _event({"type": "message_stop"})


def _responses(what: str | list[Call]) -> Iterator[bytes]:
    items: list[dict[str, Any]] = []
    if isinstance(what, str):
        part = {"type": "output_text", "text": what, "annotations": []}
        said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        items.append(said | {"content": [part]})
    else:
        for n, (name, arguments, space) in enumerate(what):
            call = {"type": "function_call", "id": f"fc_{n}", "call_id": f"call_{n}{id(items)}"}
            call |= {"name": name, "arguments": json.dumps(arguments), "status": "completed"}
            items.append(call | ({} if space is None else {"namespace": space}))
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL}
    usage = {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18}
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield _event({"type": "response.created", "response": begun})
    for n, item in enumerate(items):
        yield _event({"type": "response.output_item.added", "output_index": n, "item": item})
        if isinstance(what, str):
            at = {"item_id": "msg_1", "output_index": n, "content_index": 0}
            yield _event({"type": "response.output_text.delta", **at, "delta": what})
        yield _event({"type": "response.output_item.done", "output_index": n, "item": item})
    done = whole | {"status": "completed", "output": items, "usage": usage}
    yield _event({"type": "response.completed", "response": done})


def _chat(what: str | list[Call]) -> Iterator[bytes]:
    begun = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}

    def chunk(delta: dict[str, Any], end: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": end}
        return _event({**begun, "choices": [choice]}, named=False)

    yield chunk({"role": "assistant", "content": ""})
    if isinstance(what, str):
        yield chunk({"content": what})
    else:
        calls = [
            {"index": n, "id": f"call_{n}{id(what)}", "type": "function"}
            | {"function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments, _) in enumerate(what)
        ]
        yield chunk({"tool_calls": calls})
    yield chunk({}, "stop" if isinstance(what, str) else "tool_calls")
    yield b"data: [DONE]\n\n"
