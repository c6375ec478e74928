"""What the router must know of a request's body, read once; the bytes themselves go on as they are.

Unknown fields are left to the worker. A field that occurs twice counts as its last occurrence,
as engines' own parsers have it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from policies.record import record
from router.http.errors import ClientError
from router.json_words import json_words

Tokens = npt.NDArray[np.int32]
Message = dict[str, Any]

MAX_TOKEN_ID = 2**31 - 1

_WHERE = re.compile(r"^(?P<what>.*) - at `\$(?P<path>.*)`$", re.DOTALL)
_BYTE = re.compile(r"^JSON is malformed: (?P<what>.*) \(byte (?P<offset>\d+)\)$", re.DOTALL)
_TRUNCATED = "it ends too early, or has half of a surrogate pair"

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Bounds of what one body may ask for. Lifetime: process."""

    max_messages: int = 4_096
    max_prompts: int = 1_024  # prompts in one completions request
    max_choices: int = 128  # `n`
    max_key_chars: int = 1_024  # of a session name or salt, which are kept in memory


class PromptOptions(msgspec.Struct):
    """How a body wants its tokens made of its text; names as in vLLM's API.

    What is not typed here is left to the worker to judge: `engine.wire` checks it where it matters.
    Lifetime: request.
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


@record
class Scanned:
    """One request's body. Lifetime: request.

    `prompts` holds every prompt of a completions request: either texts or int32 token ids in
    0..2^31-1, none of them empty; `messages` the conversation of a chat request. Each is empty
    where the body has none, which completions and chat requests are refused for.
    """

    model: str | None = None
    stream: bool = False
    prompts: tuple[str, ...] | tuple[Tokens, ...] = ()
    messages: tuple[Message, ...] = ()
    session: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    max_output_tokens: int | None = None
    choices: int = 1
    by_text: bool = False  # its tokens cannot be made here
    options: PromptOptions = field(default_factory=PromptOptions, compare=False)


class Common(PromptOptions):
    """Fields of any body, as JSON types. `null` counts as absent, as in OpenAI's API."""

    model: str | None = None
    stream: bool | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None


class _Body(Common):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: list[Message] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Int32 | None = None


_BODY = msgspec.json.Decoder(_Body)
_TEXT = msgspec.json.Decoder(str)
_PROMPT = msgspec.json.Decoder(str | list[int | str | list[int]])
_TOKEN_IDS = msgspec.json.Decoder(list[int])


_USUAL = ScanLimits()
_KEYS = ("session_id", "prompt_cache_key", "user", "cache_salt", "model")


def scan(body: bytes, path: str, limits: ScanLimits = _USUAL) -> Scanned:
    """Read `body`, sent to `path`. Pure; raises ClientError(400) and nothing else.

    The error's message says what was expected and where (a byte with its line and column, or the
    path of a field), never what the client wrote there.
    """
    fields: _Body = decode(_BODY, body, "")
    prompts = prompts_in(bytes(fields.prompt), "prompt", limits)
    messages = messages_in(fields.messages, limits)
    if path.endswith("/chat/completions"):
        if not messages:
            raise refused("a chat needs at least one message", "messages", "empty_messages")
    elif path.endswith("/completions") and not prompts:
        raise refused("a completion needs a prompt", "prompt", "missing_prompt")
    choices = 1 if fields.n is None else fields.n
    if not 1 <= choices <= limits.max_choices:
        raise refused(f"`n` must be 1..{limits.max_choices}", "n", "integer_out_of_range")
    most, longest = fields.max_tokens, fields.max_completion_tokens
    most = most if longest is None else longest
    more = {"prompts": prompts, "messages": messages, "choices": choices}
    return scanned_of(fields, limits, max_output_tokens=most, **more)


def scanned_of(fields: Common, limits: ScanLimits, **more: Any) -> Scanned:
    """What any body tells, with what its API says in its own way. Raises ClientError(400)."""
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
        session=fields.session_id or fields.prompt_cache_key or fields.user or None,
        cache_salt=fields.cache_salt or None,
        priority=fields.priority or 0,
        options=more.pop("options", fields),
        **more,
    )


def prompts_in(raw: bytes, name: str, limits: ScanLimits) -> tuple[str, ...] | tuple[Tokens, ...]:
    """Every prompt within the field `name`: text, token ids, or a list of either; none: null."""
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


def _tokens(ids: list[int], path: str) -> Tokens:
    """Token ids as int32, each checked."""
    try:
        wide = np.array(ids, dtype=np.int64)
    except OverflowError:
        wide = np.array([-1])
    if wide.min() < 0 or wide.max() > MAX_TOKEN_ID:
        raise refused(f"a token id must be 0..{MAX_TOKEN_ID}", path, "integer_out_of_range")
    return wide.astype(np.int32)


def messages_in(messages: list[Message] | None, limits: ScanLimits) -> tuple[Message, ...]:
    """The messages, each with a role, and content that templates can render."""
    if messages is None:
        return ()
    if len(messages) > limits.max_messages:
        bound = limits.max_messages
        text = f"{len(messages)} messages are more than the {bound} allowed"
        raise refused(text, "messages", "array_too_long")
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


def decode(decoder: msgspec.json.Decoder[Any], data: bytes, path: str) -> Any:
    """Decode `data`, found at `path` of the body; failures become ClientError(400)."""
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
        raise refused(_malformed(str(error), data, path), path or None, "invalid_json") from error
    except UnicodeDecodeError as error:
        text = "the body is not valid UTF-8"
        raise refused(text, path or None, "invalid_json") from error
    except RecursionError as error:
        raise refused("the body is nested too deeply", path or None, "invalid_json") from error


def _malformed(message: str, data: bytes, path: str) -> str:
    """Where and how the JSON is broken, in words."""
    if not data.strip():
        return "the request has no body; a JSON object is expected"
    found = _BYTE.match(message)
    if found is None:
        return f"the body is not valid JSON: {_TRUNCATED}"
    if path:
        return f"`{path}` is not valid JSON: {found['what']}"
    offset = int(found["offset"])
    line = data.count(b"\n", 0, offset) + 1
    column = offset - data.rfind(b"\n", 0, offset)
    where = f"byte {offset} (line {line}, column {column})"
    return f"the body is not valid JSON at {where}: {found['what']}"


def refused(message: str, param: str | None, code: str) -> ClientError:
    return ClientError(400, message, param, code)
