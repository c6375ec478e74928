"""Makes bodies of replies with status 200 for tests: answers of any length, and bodies that are no
answers.
"""

from __future__ import annotations

import json
from typing import Any

Case = tuple[str, bytes]  # name, body


def case_id(given: object) -> str:
    """Return the part of a test's name for a parameter, or "" for bodies."""
    return given if isinstance(given, str) else ""


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """Return one event of a streamed chat."""
    choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [choice]} | more


def text(content: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a completion, or one event of a streamed completion."""
    choice = {"index": 0, "text": content, "logprobs": None, "finish_reason": finish}
    return {"id": "x", "object": "text_completion", "model": "m", "choices": [choice]} | more


def chat(message: Any, finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    """Return an unstreamed chat answer."""
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": []} | message
    choice = {"index": 0, "message": said, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]} | more


def events(*said: Any, end: str = "\n\n", done: bool = True) -> bytes:
    """Return a stream of server-sent events."""
    lines = [f"data: {json.dumps(one)}{end}" for one in said]
    return "".join([*lines, f"data: [DONE]{end}" if done else ""]).encode()


def usage(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}}


ROLE = chunk({"role": "assistant", "content": ""})
ERROR = {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}
CLIENTS = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
PAGE = b"<!DOCTYPE html><html><body>It works!</body></html>"
COUNT = {"id": "x", "choices": [], **usage(0)}

BAD_STREAMS: tuple[Case, ...] = (
    ("nothing", b""),
    ("blanks", b"\n\n"),
    ("done_alone", events()),
    ("comment_and_done", b": hello\n\n" + events()),
    ("error_first", events(ERROR)),
    ("error_text", events({"error": "boom"})),
    ("error_named", b'event: error\ndata: {"message":"boom"}\n\n'),
    ("error_flat", events({"object": "error", "message": "boom", "code": 500})),
    ("error_after_role", events(ROLE, ERROR)),
    ("error_too_many", events({"error": {"message": "later", "code": 429}})),
    ("abort", events(chunk({}, "abort"))),
    ("abort_after_role", events(ROLE, chunk({"content": ""}, "abort"))),
    ("error_finish", events(text("", "error"))),
    ("role_alone", events(ROLE)),
    ("role_alone_undone", events(ROLE, done=False)),
    ("zero_tokens", events(ROLE, chunk({}, "stop"), COUNT)),
    ("zero_tokens_at_once", events(text("", "stop", **usage(0)))),
    ("no_choices", events({"id": "x", "choices": []})),
    ("page", PAGE),
    ("error_whole", json.dumps(ERROR).encode()),
)
BAD_WHOLE: tuple[Case, ...] = (
    ("nothing", b""),
    ("blanks", b" \r\n"),
    ("page", PAGE),
    ("words", b"OK"),
    ("error", json.dumps(ERROR).encode()),
    ("error_text", b'{"error":"boom"}'),
    ("error_flat", b'{"object":"error","message":"boom","type":"ServerError","code":500}'),
    ("object", b"{}"),
    ("null_choices", b'{"id":"x","choices":null}'),
    ("no_choices", json.dumps({"id": "x", "choices": [], **usage(0)}).encode()),
    ("empty_choice", b'{"choices":[{}]}'),
    ("abort", json.dumps(text("half of", "abort", **usage(2))).encode()),
    ("error_finish", json.dumps(text("", "error")).encode()),
    ("zero_tokens", json.dumps(text("", "stop", **usage(0))).encode()),
    ("zero_tokens_chat", json.dumps(chat({"content": ""}, **usage(0))).encode()),
)
GOOD_STREAMS: tuple[Case, ...] = (
    ("first_token_ends", events(ROLE, chunk({}, "stop"), {"choices": [], **usage(1)})),
    ("first_token_ends_uncounted", events(ROLE, chunk({}, "stop"))),
    ("length_without_text", events(text("", "length"))),
    ("one_token", events(ROLE, chunk({"content": "x"}), chunk({}, "length"))),
    ("tool_calls", events(ROLE, chunk({"tool_calls": [{"index": 0, "id": "c"}]}))),
    ("function_call", events(chunk({"function_call": {"name": "f"}}))),
    ("reasoning", events(ROLE, chunk({"reasoning": "hm"}), chunk({}, "stop"))),
    ("reasoning_content", events(ROLE, chunk({"reasoning_content": "hm"}))),
    ("refusal", events(chunk({"refusal": "no"}))),
    ("audio", events(chunk({"audio": {"id": "a"}}))),
    ("content_filter", events(chunk({}, "content_filter"), COUNT)),
    ("token_ids", events({"choices": [{"index": 0, "text": "", "token_ids": [5]}]})),
    ("counted_only", events(chunk({}, None, **usage(1)))),
    ("second_choice", events({"choices": [{"text": ""}, {"index": 1, "text": "x"}]})),
    ("pings", b": ping\n\n: ping\n\n" + events(text("x", "stop"))),
    ("returns", events(text("x", "stop"), end="\r\n\r\n")),
    ("lone_returns", events(text("x", "stop"), end="\r\r")),
    ("named", b'id: 1\nevent: message\ndata: {"choices":[{"text":"x"}]}\n\n'),
    ("several_lines", b'data: {"choices":\ndata: [{"text":"x"}]}\n\n'),
    ("mark_of_order", b"\xef\xbb\xbf" + events(text("x"))),
    ("long", events(text("x" * 100_000))),
    ("unreadable", b"data: hello\n\n"),
    ("clients_fault", events(CLIENTS)),
)
GOOD_WHOLE: tuple[Case, ...] = (
    ("first_token_ends", json.dumps(text("", "stop", **usage(1))).encode()),
    ("uncounted", json.dumps(text("", "stop")).encode()),
    ("length", json.dumps(text("", "length", usage=None)).encode()),
    ("text", json.dumps(text("x", "length", **usage(1))).encode()),
    ("several", json.dumps({"choices": [{"text": ""}, {"text": "x"}]}).encode()),
    ("chat", json.dumps(chat({"content": "x"})).encode()),
    ("tool_calls", json.dumps(chat({"tool_calls": [{"id": "c"}]}, "tool_calls")).encode()),
    ("reasoning", json.dumps(chat({"reasoning_content": "hm"}, **usage(0))).encode()),
    ("refusal", json.dumps(chat({"refusal": "no"})).encode()),
    ("content_filter", json.dumps(chat({}, "content_filter", **usage(0))).encode()),
    ("no_error", json.dumps(text("x", "stop", error=None)).encode()),
    ("blanks_before", b"\n\n  " + json.dumps(text("x")).encode()),
    ("long", json.dumps(text("x" * 100_000, "abort")).encode()),
    ("half_json", b'{"choices":[{"text":"x"'),
    ("clients_fault", json.dumps(CLIENTS).encode()),
)


def anthropic(*said: dict[str, Any]) -> bytes:
    """Return a stream of Anthropic's messages."""
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (one["type"].encode(), json.dumps(one).encode())
        for one in said
    )


_START = {"type": "message_start", "message": {"content": [], "usage": {"output_tokens": 1}}}
_STOP = {"type": "message_stop"}
_BLOCK = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}
_TEXT = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}
_CREATED = {"type": "response.created", "response": {"status": "in_progress", "output": []}}


def _stopped(tokens: int, why: str = "end_turn") -> dict[str, Any]:
    return {
        "type": "message_delta",
        "delta": {"stop_reason": why, "stop_sequence": None},
        "usage": {"output_tokens": tokens},
    }


def _response(status: str, output: list[Any], **more: Any) -> dict[str, Any]:
    return {"object": "response", "status": status, "output": output, "error": None} | more


# (form, body, whether it is an answer)
OTHER_FORMS: tuple[tuple[str, bytes, bool], ...] = (
    ("messages", anthropic(_START, {"type": "ping"}, _BLOCK, _TEXT, _stopped(1), _STOP), True),
    ("messages", anthropic(_START, _stopped(2), _STOP), True),
    ("messages", anthropic(_START, _stopped(0, "refusal"), _STOP), True),
    ("messages", anthropic(_START, _stopped(0), _STOP), False),
    ("messages", anthropic(_START, {"type": "ping"}, _BLOCK, _STOP), False),
    ("messages", anthropic(_START, {"type": "error", "error": {"type": "api_error"}}), False),
    (
        "messages",
        anthropic({"type": "error", "error": {"type": "invalid_request_error"}}),
        True,
    ),
    (
        "messages",
        anthropic(
            _START,
            {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}},
        ),
        True,
    ),
    (
        "messages",
        b'{"type":"message","content":[{"type":"text","text":"x"}],"stop_reason":"end_turn"}',
        True,
    ),
    (
        "messages",
        b'{"type":"message","content":[],"stop_reason":"end_turn","usage":{"output_tokens":2}}',
        True,
    ),
    (
        "messages",
        b'{"type":"message","content":[],"stop_reason":"end_turn","usage":{"output_tokens":0}}',
        False,
    ),
    ("messages", b'{"type":"error","error":{"type":"overloaded_error","message":"x"}}', False),
    ("responses", json.dumps(_response("completed", [{"type": "function_call"}])).encode(), True),
    ("responses", json.dumps(_response("queued", [])).encode(), True),
    (
        "responses",
        json.dumps(_response("completed", [], usage={"output_tokens": 0})).encode(),
        False,
    ),
    (
        "responses",
        json.dumps(_response("failed", []) | {"error": {"code": "server_error"}}).encode(),
        False,
    ),
    ("responses", anthropic(_CREATED, {"type": "response.output_text.delta", "delta": "x"}), True),
    (
        "responses",
        anthropic(
            _CREATED,
            {"type": "response.output_item.added", "item": {"type": "message", "content": []}},
            {
                "type": "response.completed",
                "response": _response("completed", [], usage={"output_tokens": 0}),
            },
        ),
        False,
    ),
    (
        "responses",
        anthropic(
            _CREATED,
            {
                "type": "response.incomplete",
                "response": _response("incomplete", [], usage={"output_tokens": 9}),
            },
        ),
        True,
    ),
    (
        "responses",
        anthropic(_CREATED, {"type": "response.failed", "response": {"status": "failed"}}),
        False,
    ),
    ("responses", anthropic(_CREATED), False),
    ("responses", anthropic({"type": "error", "code": "server_error", "message": "x"}), False),
    ("generate", b'{"text":"x","meta_info":{"finish_reason":{"type":"stop"}}}', True),
    (
        "generate",
        b'{"text":"","meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":1}}',
        True,
    ),
    (
        "generate",
        b'{"text":"","meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":0}}',
        False,
    ),
    (
        "generate",
        b'[{"text":"x","meta_info":{}},{"text":"","meta_info":{"completion_tokens":0}}]',
        True,
    ),
    ("generate", b'{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}', False),
    (
        "generate",
        b'{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":400}}}',
        True,
    ),
    ("generate", b'{"generated":"x"}', True),
    ("generate", b"{}", False),
    ("generate", b'data: {"error":{"message":"boom"}}\n\ndata: [DONE]\n\n', False),
    ("other", b'{"data":[]}', True),
    ("other", b"\x00\x01binary", True),
    ("other", b" ", False),
    ("other", PAGE, False),
    ("other", b'{"error":{"message":"boom"}}', False),
    ("other", b'{ "object": "error", "message": "boom", "code": 500}', False),
    ("other", b'{"object":"list","data":[]}', True),
    ("other", b'data: {"error":"boom"}\n\n', False),
    ("other", b'data: {"text_output":""}\n\n', True),
)
