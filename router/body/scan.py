"""Reads the parts of a request's body that routing needs, once; the bytes stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from kvkernels import body_fields, json_items, json_text, token_ids
from policies.near import nearest
from policies.record import record
from router.config.keys import json_words
from router.http.errors import ClientError

Tokens = npt.NDArray[np.int32] | npt.NDArray[np.int64]  # int64 where an id is beyond int32
Message = dict[str, Any]

MAX_TOKEN_ID = 2**63 - 1  # ids beyond int32 represent images
_MAX_INT32 = 2**31 - 1

_WHERE = re.compile(r"^(?P<what>.*) - at `\$(?P<path>.*)`$", re.DOTALL)
_BYTE = re.compile(r"^JSON is malformed: (?P<what>.*) \(byte (?P<offset>\d+)\)$", re.DOTALL)
_EMPTY = "the request has no body; a JSON object is expected"
_TRUNCATED = "it ends too early, or has half of a surrogate pair"

_ABSENT = msgspec.Raw(b"null")
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """The limits of what one request body may contain. Lifetime: process."""

    max_messages: int = 4_096
    max_prompts: int = 1_024  # prompts in one completions request
    max_choices: int = 128  # `n`
    max_key_chars: int = 1_024  # of a session name or salt, which are kept in memory
    # Of a long body's fields that Python has to build values of.
    max_values: int = 131_072
    max_text_bytes: int = 4 << 20  # with escapes or beyond ASCII, of one message


class PromptOptions(msgspec.Struct):
    """The fields of a body that determine how its text is tokenized; names as in vLLM's API.
    Lifetime: request.

    The worker judges fields that have no type here; `engine.wire` checks them where they matter.
    """

    tools: list[Any] | None = None
    tool_choice: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


class Sequenced(msgspec.Struct, frozen=True):
    """The place of a request in a sequence of requests, all of which must go to one server.
    Lifetime: request.
    """

    id: str
    start: bool = False
    end: bool = False


@record
class Scanned:
    """The data of one request's body that routing needs. `prompts` has every prompt of a
    completions request, as text or as token ids in 0..2^63-1; no prompt is empty. `messages` has
    the conversation of a chat request. Completions without prompts and chats without messages are
    refused; for other requests, both may be empty. Lifetime: request.
    """

    model: str | None = None
    stream: bool = False
    prompts: tuple[str, ...] | tuple[Tokens, ...] = ()
    messages: tuple[Message, ...] = ()
    session: str | None = None  # `session_id`
    cache_salt: str | None = None
    priority: int = 0
    hold_s: float | None = None  # longest wait for a worker
    max_output_tokens: int | None = None
    choices: int = 1
    by_text: bool = False  # its tokens cannot be made here
    sequence: Sequenced | None = None
    runs_on: bool = False  # at its worker, when its client has left
    stops: bool = False  # it ends another request
    routed_by: str = ""  # for people, where that is not plain
    # Fields in which clients name agents and sessions, by name: texts, or JSON values. They are
    # for `router.identity`.
    agent_fields: Mapping[str, str | bytes] | None = None
    attribution: bytes | None = None  # digest of the client's attribution line, if it has one
    options: PromptOptions = field(default_factory=PromptOptions, compare=False)


class Common(PromptOptions):
    """The fields that any request body may have, with their JSON types. `null` counts as absent, as
    in OpenAI's API.
    """

    model: str | None = None
    stream: bool | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    # Of agents' clients; `AGENT_FIELDS` has their names.
    agent_hint: msgspec.Raw = _ABSENT
    agentic_context: msgspec.Raw = _ABSENT
    client_metadata: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    litellm_session_id: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    nvext: msgspec.Raw = _ABSENT
    safety_identifier: msgspec.Raw = _ABSENT
    service_tier: msgspec.Raw = _ABSENT
    vllm_xargs: msgspec.Raw = _ABSENT


AGENT_FIELDS = (
    *("agent_hint", "agentic_context", "client_metadata", "conversation", "litellm_session_id"),
    *("metadata", "nvext", "safety_identifier", "service_tier", "vllm_xargs"),
)


class _Body(Common):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: list[Message] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Int32 | None = None


# A parser builds values under Python's lock. A shorter body has too few of them to be noticed.
LONG_BYTES = 1 << 15
_LONG_TEXT_BYTES = 1 << 18
_BEGUN_BYTES = 1 << 12  # enough to see the type of a field's value
_KINDS = {ord('"'): "string", ord("{"): "object", ord("["): "array", ord("n"): "null"}

B = TypeVar("B", bound="Common")
Field = tuple[int, int, int, int, int]  # as `kvkernels.body_fields` has it


class Form(Generic[B]):
    """Reads the fields of one kind of request body. A long body is read in short pieces: its values
    are counted first, without Python's lock, before they are built. Lifetime: process.
    """

    def __init__(self, kind: type[B]) -> None:
        self._whole = msgspec.json.Decoder(kind)
        self._names = kind.__struct_fields__
        hints = get_type_hints(kind)
        self._raw = frozenset(name for name, hint in hints.items() if hint is msgspec.Raw)
        self._items = {
            name: msgspec.json.Decoder(get_args(one)[0])
            for name, hint in hints.items()
            for one in get_args(hint)
            if get_origin(one) is list and get_args(one)[0] in (Message, Any)
        }

    def read(self, body: bytes, limits: ScanLimits) -> B:
        """Return the fields of the request body `body`. Raises ClientError (400) if the body is
        invalid or exceeds a limit.
        """
        if len(body) < LONG_BYTES:
            whole: B = decode(self._whole, body, "")
            return whole
        fault, at, found = body_fields(body, self._names)
        if fault is not None:
            raise _broken(fault, at, body)
        fields = {
            name: field for name, field in zip(self._names, found, strict=True) if field is not None
        }
        lists = {n: f for n, f in fields.items() if n in self._items and body[f[0]] == ord("[")}
        others = {n: f for n, f in fields.items() if n not in lists and n not in self._raw}
        _check_sizes(lists, others, limits)
        view = memoryview(body)  # of megabytes, which are not copied
        rest: list[bytes | memoryview] = []
        for name, (begin, end, *_) in others.items():
            rest += (b'%b"%b":' % (b"," if rest else b"{", name.encode()), view[begin:end])
        read: B = decode(self._whole, b"".join((*rest, b"}")) if rest else b"{}", "")
        for name, (begin, end, _, items, _) in lists.items():
            setattr(read, name, self._list(view[begin:end], name, items))
        for name in self._raw & fields.keys():
            begin, end = fields[name][:2]
            setattr(read, name, msgspec.Raw(view[begin:end]))
        return read

    def _list(self, raw: memoryview, name: str, most: int) -> list[Any]:
        decoder, places = self._items[name], enumerate(json_items(raw, most) or ())
        return [decode(decoder, raw[begin:end], f"{name}[{i}]") for i, (begin, end) in places]


def _check_sizes(
    lists: Mapping[str, Field], others: Mapping[str, Field], limits: ScanLimits
) -> None:
    """Raise ClientError for a body that would take long to build: too many values, or too much text
    at once.
    """
    for name in lists.keys() & {"messages", "input"}:
        _check_count(lists[name][3], name, limits)
    values = together = 0
    for name, (_, _, found, _, text_bytes) in (*lists.items(), *others.items()):
        values += found
        if values > limits.max_values:
            most = f"{limits.max_values} JSON values (limits.body_values)"
            why = f"with `{name}` the body has more than {most}"
            raise ClientError(413, why, name, "too_many_values")
        if name in others:
            together += text_bytes
            text_bytes = together
        if text_bytes > limits.max_text_bytes:
            where = f"one item of `{name}`" if name in lists else f"`{name}`"
            most = f"{limits.max_text_bytes} bytes of text with escapes or beyond ASCII"
            why = f"{where} has more than {most} (limits.message_text_bytes)"
            raise ClientError(413, why, name, "text_too_long")


def _check_count(messages: int, name: str, limits: ScanLimits) -> None:
    if messages > limits.max_messages:
        what = "messages" if name == "messages" else f"items of `{name}`"
        text = (
            f"{messages} {what} are more than the {limits.max_messages} allowed (limits.messages)"
        )
        raise refused(text, name, "array_too_long")


def _broken(fault: str, at: int, body: bytes) -> ClientError:
    if fault == "too_deep":
        return refused("the body is nested too deeply", None, "invalid_json")
    if at == len(body) and fault == "no_object":
        return refused(_EMPTY, None, "invalid_json")
    if fault == "no_object" and body[at] in b'"[tfn-0123456789':
        text = f"the body: expected object, got {_kind(body[at])}"
        return refused(text, None, "invalid_type")
    text = f"the body is not valid JSON at {_place(body, at)}"
    return refused(text, None, "invalid_json")


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELD = re.compile(r"\w{1,40}", re.ASCII)  # a name that an error may repeat
_MOST_FIELDS, _ALIKE = 100, 0.75

_BODY = Form(_Body)
_TEXT = msgspec.json.Decoder(str)
_PROMPT = msgspec.json.Decoder(str | list[int | str | list[int]])
_PROMPT_OR_NONE = msgspec.json.Decoder(str | list[Any] | None)
_TOKEN_IDS = msgspec.json.Decoder(list[int])
_INTEGER = re.compile(rb"-?[0-9]+(?![-+.0-9eE])|-?[0-9]{20}")


_DEFAULT_LIMITS = ScanLimits()
_KEYS = ("session_id", "prompt_cache_key", "user", "cache_salt", "model")


def scan(body: bytes, path: str, limits: ScanLimits = _DEFAULT_LIMITS) -> Scanned:
    """Return the data in `body`, which was sent to `path`. The function is pure, and raises only
    ClientError (400). The error says what was expected and where (a byte with its line and column,
    or the path of a field). It never repeats the client's text, except the name of a field that
    resembles the missing field.
    """
    fields = _BODY.read(body, limits)
    prompts = prompts_in(fields.prompt, "prompt", limits)
    messages = messages_in(fields.messages, limits)
    if path.endswith("/chat/completions"):
        if not messages:
            why = "a chat needs at least one message"
            raise _missing(body, why, "messages", "empty_messages")
    elif path.endswith("/completions") and not prompts:
        raise _missing(body, "a completion needs a prompt", "prompt", "missing_prompt")
    choices = 1 if fields.n is None else fields.n
    if not 1 <= choices <= limits.max_choices:
        raise refused(f"`n` must be 1..{limits.max_choices}", "n", "integer_out_of_range")
    most, longest = fields.max_tokens, fields.max_completion_tokens
    most = most if longest is None else longest
    more = {"prompts": prompts, "messages": messages, "choices": choices}
    return scanned_of(fields, limits, max_output_tokens=most, **more)


def _missing(body: bytes, why: str, name: str, code: str) -> ClientError:
    """Return the error for a body without the field `name`. If a field of the body has nearly the
    same name, the error mentions it.
    """
    if len(body) < LONG_BYTES:
        fields = decode(_FIELDS, body, "")
        shown = [one for one in list(fields)[:_MOST_FIELDS] if _FIELD.fullmatch(one)]
        near = None if name in fields else nearest(name, shown, _ALIKE)
        if near is not None:
            why += f"; the body has `{near}`: did you mean `{name}`?"
    return refused(why, name, code)


def scanned_of(fields: Common, limits: ScanLimits, **more: Any) -> Scanned:
    """Return the data of a body of any kind. `more` is data that the request's API has in a form of
    its own. Raises ClientError (400) for invalid data.
    """
    # A name that is too long is refused rather than cut: two cut ones could be mixed up.
    keys = (
        fields.session_id,
        fields.prompt_cache_key,
        fields.user,
        fields.cache_salt,
        fields.model,
    )
    for name, value in zip(_KEYS, keys, strict=True):
        if value is not None and len(value) > limits.max_key_chars:
            bound = limits.max_key_chars
            raise refused(f"`{name}` has more than {bound} characters", name, "string_too_long")
    return Scanned(
        model=fields.model,
        stream=bool(fields.stream),
        session=fields.session_id or None,
        agent_fields=_agent_fields(fields),
        cache_salt=fields.cache_salt or None,
        priority=fields.priority or 0,
        options=more.pop("options", fields),
        **more,
    )


def _agent_fields(fields: Common) -> dict[str, str | bytes] | None:
    """Return the fields by which an agent's client identifies itself, or None if there are none."""
    found: dict[str, str | bytes] = {}
    if fields.prompt_cache_key:
        found["prompt_cache_key"] = fields.prompt_cache_key
    if fields.user:
        found["user"] = fields.user
    for name in AGENT_FIELDS:
        if (value := getattr(fields, name)) is not _ABSENT and value != _ABSENT:
            found[name] = bytes(value)
    return found or None


def prompts_in(
    field: msgspec.Raw, name: str, limits: ScanLimits
) -> tuple[str, ...] | tuple[Tokens, ...]:
    """Return every prompt in the field `name`. The field may be a text, a list of token ids, or a
    list of either; the result is empty if the field is null.
    """
    view = memoryview(field)
    if len(view) >= LONG_BYTES:
        return _long_prompts(view, name, limits)
    raw = bytes(view)
    if raw.startswith(b'"'):  # nearly always
        text: str = decode(_TEXT, raw, name)
        if not text:
            raise refused("the prompt is empty", name, "empty_prompt")
        return (text,)
    if raw == b"null":
        return ()
    if re.match(rb"\[\s*-?[0-9]", raw):
        return (_tokens(decode(_TOKEN_IDS, raw, name), name),)
    value: str | list[int | str | list[int]] = decode(_PROMPT, raw, name)
    assert isinstance(value, list)  # texts were read above
    if not value or not all(item != "" and item != [] for item in value):
        raise refused("the prompt is empty", name, "empty_prompt")
    if len(value) > limits.max_prompts:
        raise refused(f"more than {limits.max_prompts} prompts", name, "array_too_long")
    texts = tuple(item for item in value if isinstance(item, str))
    if len(texts) == len(value):
        return texts
    lists = [item for item in value if isinstance(item, list)]
    if len(lists) == len(value):
        return tuple(_tokens(ids, f"{name}[{i}]") for i, ids in enumerate(lists))
    raise refused("text and token ids are mixed in one list", name, "invalid_type")


def _long_prompts(
    raw: memoryview, name: str, limits: ScanLimits
) -> tuple[str, ...] | tuple[Tokens, ...]:
    """Return every prompt in a long field of well-formed JSON. The prompts are read one after the
    other.
    """
    if raw[0] == ord('"'):
        return (_long_text(raw, name),)
    if raw[0] != ord("["):
        decode(_PROMPT_OR_NONE, raw, name)
        return ()
    found = token_ids(raw)
    if not isinstance(found, tuple):
        return (_some(found, name),)
    at, count = found
    if count or raw[at] in b"-0123456789":
        raise _no_token(raw, at, name, count)
    items = json_items(raw, limits.max_prompts)
    if items is None:
        raise refused(f"more than {limits.max_prompts} prompts", name, "array_too_long")
    texts: list[str] = []
    lists: list[Tokens] = []
    for i, (begin, end) in enumerate(items):
        where, kind = f"{name}[{i}]", _kind(raw[begin])
        if kind == "string":
            texts.append(_long_text(raw[begin:end], name))
        elif kind == "array":
            lists.append(_long_ids(raw[begin:end], where))
        else:
            text = f"`{where}`: expected string or array, got {kind}"
            raise refused(text, where, "invalid_type")
    if texts and lists:
        raise refused("text and token ids are mixed in one list", name, "invalid_type")
    return tuple(texts) or tuple(lists)


def _long_text(raw: memoryview, path: str) -> str:
    """Return the text of a JSON string. A string of megabytes is decoded without Python's lock."""
    data = json_text(raw) if len(raw) >= _LONG_TEXT_BYTES else None
    text: str = decode(_TEXT, raw, path) if data is None else data.decode()
    if not text:
        raise refused("the prompt is empty", path, "empty_prompt")
    return text


def _long_ids(raw: memoryview, path: str) -> Tokens:
    found = token_ids(raw)
    if isinstance(found, tuple):
        raise _no_token(raw, found[0], path, found[1])
    return _some(found, path.partition("[")[0])


def _some(ids: Tokens, path: str) -> Tokens:
    if not len(ids):
        raise refused("the prompt is empty", path, "empty_prompt")
    return ids


def _no_token(raw: memoryview, at: int, path: str, index: int) -> ClientError:
    """Return the error for item `index` of a list, at byte `at` of the body, because the item is no
    token id.
    """
    kind = _kind(raw[at])
    if kind == "number" and _INTEGER.match(raw, at, at + 64):
        text = f"a token id must be 0..{MAX_TOKEN_ID}"
        return refused(text, path, "integer_out_of_range")
    where = f"{path}[{index}]"
    return refused(f"`{where}`: expected integer, got {kind}", where, "invalid_type")


def _kind(first: int) -> str:
    """Return the name of a JSON value's type, by its first byte."""
    return _KINDS.get(first, "boolean" if first in b"tf" else "number")


def _tokens(ids: list[int], path: str) -> Tokens:
    """Return token ids as int32, or as int64 if one needs it."""
    try:
        wide = np.array(ids, dtype=np.int64)
    except OverflowError:
        wide = np.array([-1])
    if wide.min() < 0:
        raise refused(f"a token id must be 0..{MAX_TOKEN_ID}", path, "integer_out_of_range")
    return wide if wide.max() > _MAX_INT32 else wide.astype(np.int32)


def messages_in(messages: list[Message] | None, limits: ScanLimits) -> tuple[Message, ...]:
    """Return the messages of a chat. Raises ClientError unless each message has a role and content
    that templates can render.
    """
    if messages is None:
        return ()
    _check_count(len(messages), "messages", limits)
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise refused("a message needs a role", f"messages[{i}].role", "invalid_type")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, f"messages[{i}].content")
        elif content is not None and not isinstance(content, str):
            expected = "content must be a text, a list of parts, or null"
            raise refused(expected, f"messages[{i}].content", "invalid_type")
    return tuple(messages)


def _check_parts(parts: list[Any], path: str) -> None:
    for i, part in enumerate(parts):
        if isinstance(part, str):
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise refused("a content part needs a type", f"{path}[{i}].type", "invalid_type")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise refused("a text part needs a text", f"{path}[{i}].text", "invalid_type")


def decode(decoder: msgspec.json.Decoder[Any], data: bytes | memoryview, path: str) -> Any:
    """Return `data` decoded from JSON. `path` is the place of the data in the body, for error
    messages. Raises ClientError (400) if decoding fails.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        found = _WHERE.match(str(error))
        inner = found["path"] if found else ""
        where = (path + inner).lstrip(".") or None
        what = found["what"] if found else str(error)
        at = f"`{where}`" if where else "the body"
        raise refused(f"{at}: {json_words(what)}", where, "invalid_type") from error
    except msgspec.DecodeError as error:
        raise refused(
            _malformed(str(error), bytes(data), path), path or None, "invalid_json"
        ) from error
    except UnicodeDecodeError as error:
        text = "the body is not valid UTF-8"
        raise refused(text, path or None, "invalid_json") from error
    except RecursionError as error:
        raise refused("the body is nested too deeply", path or None, "invalid_json") from error


def _malformed(message: str, data: bytes, path: str) -> str:
    """Return a text that says where and how the JSON is malformed."""
    if not data.strip():
        return _EMPTY
    found = _BYTE.match(message)
    if found is None:
        return f"the body is not valid JSON: {_TRUNCATED}"
    if path:
        return f"`{path}` is not valid JSON: {found['what']}"
    offset = int(found["offset"])
    return f"the body is not valid JSON at {_place(data, offset)}: {found['what']}"


def _place(data: bytes, offset: int) -> str:
    line = data.count(b"\n", 0, offset) + 1
    column = offset - data.rfind(b"\n", 0, offset)
    return f"byte {offset} (line {line}, column {column})"


def refused(message: str, param: str | None, code: str) -> ClientError:
    return ClientError(400, message, param, code)


# Claude Code's first text of a system prompt: billing data, and a hash that differs by conversation
# or request. vLLM makes no tokens of it (its pull request 36829, 2026).
_ATTRIBUTION = "x-anthropic-billing-header"
_TEXTS = ("input_text", "output_text", "text")  # parts of a response's items that are text


class _Responses(Common):
    """The fields of OpenAI's Responses API ("Responses", 2025)."""

    input: str | list[Message] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    reasoning: Any = None


class _Messages(Common):
    """The fields of Anthropic's Messages API, version 2023-06-01."""

    system: str | list[Message] | None = None
    messages: list[Message] | None = None
    max_tokens: Count | None = None


class _Input(Common):
    """The fields of OpenAI's embeddings; vLLM also accepts a chat in place of `input`."""

    input: msgspec.Raw = _ABSENT
    messages: list[Message] | None = None


class _Pairs(Common):
    """The fields of requests for scores and ranks, with the names that vLLM and SGLang give to the
    two sides of each pair of texts.
    """

    query: msgspec.Raw = _ABSENT
    queries: msgspec.Raw = _ABSENT
    text_1: msgspec.Raw = _ABSENT
    data_1: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    items: msgspec.Raw = _ABSENT
    text_2: msgspec.Raw = _ABSENT
    data_2: msgspec.Raw = _ABSENT


class _Sampling(msgspec.Struct):
    max_new_tokens: Count | None = None
    max_tokens: Count | None = None


class _Generate(Common):
    """The fields of SGLang's own API (0.5.23, `srt/managers/io_struct.py`)."""

    text: msgspec.Raw = _ABSENT
    input_ids: msgspec.Raw = _ABSENT
    sampling_params: _Sampling | list[_Sampling] | None = None
    extra_key: str | None = None
    lora_path: str | list[str | None] | None = None


class _TokenIds(Common):
    """The fields of vLLM's token-in API (0.33, `entrypoints/scale_out/token_in_token_out`)."""

    token_ids: msgspec.Raw = _ABSENT
    sampling_params: _Sampling | None = None


class _Model(Common):
    pass


_RESPONSES = Form(_Responses)
_MESSAGES = Form(_Messages)
_INPUT = Form(_Input)
_PAIRS = Form(_Pairs)
_GENERATE = Form(_Generate)
_SHAPES_TOKEN_IDS = Form(_TokenIds)
_MODEL = Form(_Model)


def _responses(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _RESPONSES.read(body, limits)
    if not fields.input:
        raise _missing(body, "a response needs an input", "input", "missing_input")
    said = fields.input
    items = [{"role": "user", "content": said}] if isinstance(said, str) else list(map(_item, said))
    if fields.instructions:
        items.insert(0, {"role": "system", "content": fields.instructions})
    return scanned_of(
        fields,
        limits,
        messages=messages_in(items, limits),
        max_output_tokens=fields.max_output_tokens,
        options=PromptOptions(
            tools=_functions(fields.tools, "parameters"),
            reasoning_effort=fields.reasoning.get("effort")
            if isinstance(fields.reasoning, dict)
            else None,
        ),
    )


def _item(item: Message) -> Message:
    """Return an item of a Responses input as a message."""
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, (str, list)):
        return {"role": "tool", "content": [{"type": "item", "item": item}]}
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part["text"]}
            if isinstance(part, dict) and part.get("type") in _TEXTS and "text" in part
            else part
            for part in content
        ]
    return {"role": role, "content": content}


def _messages(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _MESSAGES.read(body, limits)
    if not fields.messages:
        why = "a message needs at least one before it"
        raise _missing(body, why, "messages", "empty_messages")
    said, attribution = list(fields.messages), None
    if isinstance(fields.system, list):
        texts = [text for part in fields.system if isinstance(text := part.get("text"), str)]
        if texts and texts[0].startswith(_ATTRIBUTION):
            attribution = _digest(texts[0])
        texts = [text for text in texts if not text.startswith(_ATTRIBUTION)]
        said.insert(0, {"role": "system", "content": "".join(texts)})
    elif fields.system:
        said.insert(0, {"role": "system", "content": fields.system})
    return scanned_of(
        fields,
        limits,
        messages=messages_in([_without_cache_marks(message) for message in said], limits),
        max_output_tokens=fields.max_tokens,
        attribution=attribution,
        options=PromptOptions(tools=_functions(fields.tools, "input_schema")),
    )


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _without_cache_marks(message: Message) -> Message:
    """Return the message with its text as its content if that text is its only part. Marks of
    `cache_control` are left out: clients move them to the last message in each turn, and no engine
    makes tokens of them.
    """
    content = _unmarked(message.get("content"))
    if isinstance(content, list) and len(content) == 1:
        part = content[0]
        if isinstance(part, dict) and part.get("type") == "text" and "text" in part:
            return {"role": message.get("role"), "content": part["text"]}
    return message if content is message.get("content") else message | {"content": content}


def _unmarked(content: Any, nested: bool = True) -> Any:
    """Return the parts of a message without marks of `cache_control`. If there are no marks, the
    same object is returned. With `nested`, the parts within a tool's result are also searched.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, dict) and ("cache_control" in part or (nested and "content" in part)):
            part = {name: value for name, value in part.items() if name != "cache_control"}
            if nested and "content" in part:
                part["content"] = _unmarked(part["content"], nested=False)
        parts.append(part)
    return content if parts == content else parts


def _functions(tools: list[Any] | None, schema: str) -> list[Any] | None:
    """Return tools in the form that OpenAI's chat API has. `schema` is the key under which this API
    has the parameters of a function.
    """
    return tools and [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get(schema),
            },
        }
        if isinstance(tool, dict) and "name" in tool
        else tool
        for tool in tools
    ]


def _input(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _INPUT.read(body, limits)
    raw = memoryview(fields.input)
    if fields.messages and fields.input == _ABSENT:
        return scanned_of(fields, limits, messages=messages_in(fields.messages, limits))
    if fields.input == _ABSENT:
        raise refused("there is no input", "input", "missing_input")
    begun = bytes(raw[:_BEGUN_BYTES])
    if begun[:1] == b"{" or begun[1:].lstrip()[:1] == b"{":  # images beside text: engines' own
        return _by_text(fields, limits, bytes(raw))
    return scanned_of(fields, limits, prompts=prompts_in(fields.input, "input", limits))


def _pairs(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _PAIRS.read(body, limits)
    one = (fields.query, fields.queries, fields.text_1, fields.data_1)
    other = (fields.documents, fields.items, fields.text_2, fields.data_2)
    sides = [bytes(raw) for raw in (*one, *other) if raw != _ABSENT]
    if not sides:
        raise refused("there is nothing to compare", None, "missing_input")
    return _by_text(fields, limits, b"".join(sides))


def _by_text(fields: Common, limits: ScanLimits, raw: bytes) -> Scanned:
    """Return the data of a request that each engine tokenizes in its own way, so that the router
    matches its prompts as text.
    """
    return scanned_of(fields, limits, prompts=(raw.decode("utf-8", "replace"),), by_text=True)


def _generate(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _GENERATE.read(body, limits)
    prompts = prompts_in(fields.input_ids, "input_ids", limits) or prompts_in(
        fields.text, "text", limits
    )
    if not prompts:
        raise refused("give text or input_ids", "text", "missing_prompt")
    params = fields.sampling_params
    first = (params[0] if params else None) if isinstance(params, list) else params
    lora = fields.lora_path if isinstance(fields.lora_path, str) else None
    # An adapter's blocks are shared with no other adapter, as with a salt.
    fields.cache_salt = f"{lora}\n{fields.extra_key or ''}" if lora else fields.extra_key
    most = first.max_new_tokens if first else None
    return scanned_of(fields, limits, prompts=prompts, max_output_tokens=most)


def _token_ids(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _SHAPES_TOKEN_IDS.read(body, limits)
    prompts = prompts_in(fields.token_ids, "token_ids", limits)
    if not prompts:
        raise refused("give token_ids", "token_ids", "missing_prompt")
    most = fields.sampling_params.max_tokens if fields.sampling_params else None
    return scanned_of(fields, limits, prompts=prompts, max_output_tokens=most)


def _model(body: bytes, limits: ScanLimits) -> Scanned:
    fields = _MODEL.read(body, limits)
    return Scanned(model=scanned_of(fields, limits).model)


def _opaque(body: bytes, limits: ScanLimits) -> Scanned:
    try:
        return _model(body, limits)
    except ClientError:
        return Scanned()


SHAPES: Mapping[str, Callable[[bytes, ScanLimits], Scanned]] = MappingProxyType(
    {
        "responses": _responses,
        "messages": _messages,
        "input": _input,
        "pairs": _pairs,
        "generate": _generate,
        "token_ids": _token_ids,
        "model": _model,
        "opaque": _opaque,
    }
)
