"""The plain-Python version of `kernels/src/answer`: whether a reply of status 200 is an answer.

It reads the whole body at once. The native judge reads the body as it arrives and must come to the
same result.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

Pairs: TypeAlias = list[tuple[str, Any]]  # an object, its keys in order

_ABOUT_CHOICE = {
    *("index", "stop_reason", "matched_stop", "native_finish_reason", "seed", "prompt_token_ids"),
    *("content_filter_results", "content_filter_offsets", "prompt_filter_results", "prompt_index"),
}
_ABOUT_ITEM = {
    *("type", "id", "status", "role", "annotations", "index", "name", "phase", "logprobs"),
    "object",
}
_VESSELS = {
    *("message", "reasoning", "text", "output_text", "summary_text", "reasoning_text"),
    *("refusal", "thinking"),
}
_EVENTS = {
    *("message_start", "message_delta", "message_stop", "content_block_start"),
    *("content_block_stop", "content_block_delta", "ping", "error", "keepalive"),
}
_PLAIN_ENDS = {
    *("stop", "length", "end_turn", "max_tokens", "eos", "eos_token", "stop_token"),
    *("stop_sequence", "completed"),
}
_CLIENTS = re.compile(
    "invalid_request|invalid_prompt|BadRequest|bad_request|not_found|NotFound|permission|"
    "PermissionDenied|authentication|Authentication|too_large|context_length|content_policy|"
    "content_filter|Unprocessable|unsupported"
)
_NOT_CLIENTS = {408, 425, 429, 499}
_FIELDS = ("data:", "event:", "id:", "retry:", ":")


@dataclass
class Said:
    """The facts that a JSON value states about an answer, like the struct in `said.h`."""

    content: bool = False
    ends: bool = False
    filtered: bool = False
    given_up: bool = False
    counted: bool = False
    tokens: bool = False
    failed: bool = False
    clients: bool = False
    waits: bool = False
    done: bool = False
    chosen: bool = False
    known: bool = False
    any: bool = False
    strange: bool = False

    def add(self, more: Said) -> None:
        both = self.failed and more.failed
        clients = self.clients and more.clients if both else self.clients or more.clients
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) or getattr(more, field.name))
        self.clients = clients

    def fail(self, clients: bool) -> None:
        self.clients = self.clients and clients if self.failed else clients
        self.failed = self.known = True


def said_by(value: Any, event: str = "") -> Said:
    """Return the facts that a JSON value states about an answer; objects in it are given
    as pairs.
    """
    if is_object(value):
        return _object(value, event, 0)
    said = Said()
    for one in value:
        said.add(_object(_pairs(one), event, 1))
    return said


def is_object(value: Any) -> bool:
    return isinstance(value, Object)


def _pairs(value: Any) -> Pairs:
    """Return the pairs of an object. Raises TypeError for any other value, which no engine sends
    there.
    """
    if not is_object(value):
        raise TypeError("no object")
    pairs: Pairs = value
    return pairs


class Object(list):  # type: ignore[type-arg]
    """The pairs of a JSON object, in a class of their own that tells them from an array."""


def _object(pairs: Pairs, event: str, depth: int) -> Said:
    said, kind, is_error = Said(any=bool(pairs)), "", False
    code: Any = None
    for name, value in pairs:
        match name:
            case "choices":
                said.known = True
                if value is not None and (is_object(value) or not isinstance(value, list)):
                    raise TypeError("no array")
                for choice in value or ():
                    said.chosen = True
                    _choice(said, _pairs(choice))
            case "usage":
                _counts(said, value, ("completion_tokens", "output_tokens"))
            case "error":
                _error(said, value)
            case "object":
                is_error = value == "error"
            case "type":
                kind = value if isinstance(value, str) else ""
            case "code":
                code = value
            case _:
                _rest(said, name, value, depth)
    said = _typed(said, kind or event, _clients(kind, code))
    if is_error:
        said.fail(_clients(kind, code))
    return said


def _rest(said: Said, name: str, value: Any, depth: int) -> None:
    match name:
        case "delta":
            _delta(said, value)
        case "content" | "output":
            said.chosen = said.known = True
            said.content |= _parts(value, 0)
        case "content_block" | "item" | "part":
            said.content |= _item(value, 0)
        case "response" if depth == 0 and is_object(value):
            inner = _object(value, "", 1)
            inner.waits = False
            said.add(inner)
        case "status":
            said.ends |= value in ("completed", "incomplete")
            said.waits |= value in ("queued", "in_progress")
            if value in ("failed", "cancelled") and not said.failed:
                said.fail(False)
        case "stop_reason" | "finish_reason":
            _finish(said, value)
        case "text" | "text_output" | "output_ids" | "token_ids":
            said.known = said.chosen = True
            said.content |= _something(value)
        case "meta_info":
            said.known = True
            _counts(said, value, ("completion_tokens",))
            for key, why in value if is_object(value) else ():
                if key == "finish_reason":
                    _finish(said, why)


def _typed(said: Said, kind: str, clients: bool) -> Said:
    if not kind:
        return said
    if kind == "error" and not said.failed:
        said.fail(clients)
    elif kind in ("response.failed", "response.cancelled") and not said.failed:
        said.fail(False)
    elif kind == "message_stop":
        said.done = True
    elif kind in ("response.completed", "response.incomplete"):
        said.ends = True
    elif kind in ("message_start", "response.created", "response.in_progress", "response.queued"):
        said = Said(any=True)
    said.known = True
    said.strange = not kind.startswith("response.") and kind not in _EVENTS
    return said


def _choice(said: Said, choice: Pairs) -> None:
    for name, value in choice:
        if name in ("delta", "message"):
            for part, what in () if value is None else _pairs(value):
                said.content |= part != "role" and _something(what)
        elif name == "finish_reason":
            _finish(said, value)
        elif name not in _ABOUT_CHOICE:
            said.content |= _something(value)


def _delta(said: Said, value: Any) -> None:
    if not is_object(value):
        said.content |= _something(value)
        return
    for name, part in value:
        if name == "stop_reason":
            _finish(said, part)
        elif name not in ("type", "stop_sequence", "usage", "role"):
            said.content |= _something(part)


def _parts(value: Any, depth: int) -> bool:
    if is_object(value) or not isinstance(value, list):
        return _something(value)
    return any(_item(one, depth) for one in value)


def _item(value: Any, depth: int) -> bool:
    if not is_object(value) or depth == 4:
        return _something(value)
    content = False
    for name, part in value:
        if name == "type":
            content |= isinstance(part, str) and bool(part) and part not in _VESSELS
        elif name in ("content", "summary"):
            content |= _parts(part, depth + 1)
        elif name not in _ABOUT_ITEM:
            content |= _something(part)
    return content


def _something(value: Any) -> bool:
    if isinstance(value, (str, list)):
        return bool(value)
    return value is not None and value is not False


def _finish(said: Said, value: Any) -> None:
    why, code = value, None
    if is_object(value):
        found = dict(value)
        why, code = found.get("type"), found.get("status_code")
    if not isinstance(why, str) or not why:
        return
    said.known = True
    if why not in ("abort", "error"):
        said.ends = True
        said.filtered |= why not in _PLAIN_ENDS
    elif _clients("", code):
        said.fail(True)
    else:
        said.given_up = True


def _counts(said: Said, value: Any, names: tuple[str, ...]) -> None:
    for name, count in value if is_object(value) else ():
        if name in names and type(count) in (int, float) and count >= 0:
            said.counted = True
            said.tokens |= count > 0


def _error(said: Said, value: Any) -> None:
    if not is_object(value):
        if _something(value):
            said.fail(False)
        return
    if value:
        code = kind = None
        for name, part in value:
            if name in ("code", "status_code", "status") and part is not None:
                code = part
            elif name == "type":
                kind = part
        said.fail(_clients(kind, code))


def _clients(kind: Any, code: Any) -> bool:
    if isinstance(code, str) and re.fullmatch("[0-9]{3}", code):
        code = int(code)
    if type(code) is int and 100 <= code <= 999:
        return 400 <= code < 500 and code not in _NOT_CLIENTS
    return any(isinstance(word, str) and bool(_CLIENTS.search(word)) for word in (kind, code))


def judged(
    body: bytes, form: str, tokens: bool = True, event_stream: bool = False
) -> tuple[str, bool]:
    """Return why a body is no answer ("" if it is one), and whether it is an error that the client
    caused.
    """
    text = body.decode().removeprefix("\ufeff")
    begin = text.lstrip(" \t\r\n")
    if not begin:
        return "" if form == "other" and event_stream else "has no body", False
    if begin[0] in "{[":
        return _whole(begin, form, tokens)
    if event_stream or begin.startswith(_FIELDS):
        return _stream(text, form, tokens)
    page = begin.lower().startswith(("<!doctype", "<html", "<head", "<?xml"))
    return "is not JSON" if form != "other" or page else "", False


def _whole(text: str, form: str, tokens: bool) -> tuple[str, bool]:
    squeezed = re.sub(r"[ \t\r\n]", "", text[:64])
    if form == "other" and not squeezed.startswith(('{"error":', '{"object":"error"')):
        return "", False
    try:
        said = said_by(json.loads(text, object_pairs_hook=Object))
    except (ValueError, TypeError):
        return "", False
    if said.failed:
        return ("", True) if said.clients else ("is an error", False)
    if said.given_up:
        return "was given up by the engine", False
    if form == "completions" and not said.chosen:
        return "says nothing", False
    strange = form == "generate" and said.any and not said.known
    waits = said.waits and form == "responses"
    if form == "other" or said.content or said.tokens or strange or waits:
        return "", False
    return (_ended(said, form, tokens, True) if said.chosen else "says nothing"), False


def _stream(text: str, form: str, tokens: bool) -> tuple[str, bool]:
    so_far, seen = Said(), False
    for block in re.split(r"(?:\r\n|\r|\n){2}", re.sub(r"\r\n|\r", "\n", text) + "\n\n"):
        name, data = "", list[str]()
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif field == "event":
                name = value.removeprefix(" ")
        if not data and not name:
            continue
        seen |= bool(data)
        event = "\n".join(data).strip(" \t\r\n")
        if event == "[DONE]":
            break
        if not event:
            said = Said(failed=name == "error")
        else:
            try:
                said = said_by(json.loads(event, object_pairs_hook=Object), name)
            except (ValueError, TypeError):
                return "", False
        so_far.add(said)
        if said.failed:
            return ("", True) if said.clients else ("is an error", False)
        if said.given_up:
            return "was given up by the engine", False
        strange = form == "generate" and said.any and not said.known
        strange |= form in ("responses", "messages") and said.strange
        if said.content or said.tokens or strange or (form == "other" and said.any):
            return "", False
        if said.done:
            break
    return _ended(so_far, form, tokens, seen), False


def _ended(said: Said, form: str, tokens: bool, seen: bool) -> str:
    if form == "other" or (not tokens and seen):
        return ""
    if not tokens or not said.ends:
        return "says nothing"
    return "has no token" if said.counted and not said.filtered else ""
