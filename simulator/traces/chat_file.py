"""Requests as clients send them, one JSON body a line: OpenAI chats, completions and responses.

    {"model": "m", "messages": [{"role": "user", "content": "..."}]}
    {"timestamp": 1700000000, "model": "m", "prompt": "..."}
    {"model": "m", "instructions": "...", "input": "..."}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"created_at": "2026-11-21T10:00:00Z", "request": {"messages": [...]},
     "response": {"usage": {"prompt_tokens": 21, "completion_tokens": 40}}}

Text is turned into tokens and block hashes as its line is read (`prompt_text`), and is not kept.
The length of an answer comes from `usage`, else from its text: a `response` or `completion`, or a
last message of the assistant. An `input` is read as the router reads it: `instructions` come first,
and an item without a role counts as its JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from random import Random
from typing import Annotated, Any

import msgspec

from simulator.traces.job import Job, LineError
from simulator.traces.mooncake import DECODE_ERRORS, MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS, SessionId
from simulator.traces.prompt_text import PromptText, TextOptions, Tokens
from simulator.traces.request_log import MAX_UNIX_S
from simulator.traces.session_file import Positive
from simulator.traces.timing import NS

_TIMES = ("timestamp", "time", "created_at", "created", "start_time", "ts")
# A time of at least the first number is in units of which the second number make a second.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))

Time = float | str | None


class ChatOptions(TextOptions, frozen=True):
    """The options of a file of chats."""

    rate: Annotated[
        Positive,
        msgspec.Meta(description="requests per second (Poisson) if lines have no time"),
    ] = 1.0


class _ChatBody(msgspec.Struct, frozen=True, gc=False):
    """The fields of a request body that a replay reads."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int | str] | None = None
    system: Any = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    input: Any = None
    instructions: Any = None
    max_output_tokens: int | None = None
    previous_response_id: Any = None


class _ChatUsage(msgspec.Struct, frozen=True, gc=False):
    """The token counts of an answer; responses call them `input_tokens` and `output_tokens`."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    input_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None


class _ChatAnswer(msgspec.Struct, frozen=True, gc=False):
    """A response, or the object that a batch's results wrap around it."""

    usage: _ChatUsage | None = None
    choices: list[dict[str, Any]] | None = None
    output: Any = None
    created: Time = None
    created_at: Time = None
    body: _ChatAnswer | None = None


class _ChatLine(_ChatBody, frozen=True, gc=False):
    """A request's body, or a line that contains one."""

    body: _ChatBody | None = None
    request: _ChatBody | None = None
    response: _ChatAnswer | str | None = None
    completion: str | None = None
    usage: _ChatUsage | None = None
    timestamp: Time = None
    time: Time = None
    created_at: Time = None
    created: Time = None
    start_time: Time = None
    ts: Time = None
    session_id: SessionId | int | None = None
    conversation_id: SessionId | int | None = None


def is_chat(raw: bytes) -> bool:
    """Return True if a line of a file is a chat request or contains one."""
    try:
        line = msgspec.json.decode(raw)
    except DECODE_ERRORS:
        return False
    if not isinstance(line, dict):
        return False
    bodies = (line, line.get("body"), line.get("request"))
    return any(isinstance(one, dict) and _has_prompt(one) for one in bodies)


def _has_prompt(body: dict[str, Any]) -> bool:
    """Return True if the object is a request's body.

    Many other files have an `input`, but no `model` in the same object.
    """
    return "messages" in body or "prompt" in body or ("input" in body and "model" in body)


class ChatReader:
    """Reads the lines of one file, and counts the assumptions that it has to make. Lifetime:
    stream.
    """

    def __init__(self, block_tokens: int, options: ChatOptions, seed: int) -> None:
        self._decode = msgspec.json.Decoder(_ChatLine).decode
        self._options = options
        self._text = PromptText(block_tokens, options)
        self._random = Random(f"chats {seed}")
        self._has_times: bool | None = None  # as the first request has it
        self._made_s = 0.0
        self._answers: Counter[str] = Counter()  # how their lengths are known
        self._continued = 0  # requests whose earlier turns only the server has

    def parse(self, raw: bytes) -> Job | None:
        """Return the request of a line, or None if it is for another model. Raises `LineError`."""
        try:
            return self._job(self._decode(raw))
        except (*DECODE_ERRORS, UnicodeEncodeError) as error:
            raise LineError(str(error)) from error

    def _job(self, line: _ChatLine) -> Job | None:
        request = line.request or line.body or line
        if not self._text.selects(request.model or line.model):
            return None
        response = line.response
        answer = response if isinstance(response, _ChatAnswer) else None
        answer = (answer and answer.body) or answer
        tokens, said = self._prompt(request)
        usage = line.usage or (answer and answer.usage) or _ChatUsage()
        if isinstance(response, str) or line.completion:
            said = response if isinstance(response, str) else line.completion
        elif answer is not None:
            said = _text_of_answer(answer) or said
        at_ns = self._arrival_ns(line, answer)
        output, known_by = self._output_tokens(request, usage, said)
        session = line.session_id if line.session_id is not None else line.conversation_id
        told = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        names, session = self._text.named(tokens, told, session)
        self._answers[known_by] += 1
        self._continued += request.previous_response_id is not None
        return Job(at_ns, len(tokens), output, names, session=session)

    def _prompt(self, request: _ChatBody) -> tuple[Tokens, str | None]:
        """Return the prompt's tokens, and the answer if the last message is one."""
        prompt = request.prompt
        messages, said = request.messages, None
        if messages is None and prompt is None and request.input is not None:
            messages = _messages_of(request.input)
        if messages is not None:
            if first := request.system or request.instructions:
                messages = [{"role": "system", "content": first}, *messages]
            if len(messages) > 1 and messages[-1].get("role") == "assistant":
                said = messages[-1].get("content")
                messages = messages[:-1]
            tokens = self._text.of_chat(messages, [*map(_function, request.tools or ())])
            return tokens, said if isinstance(said, str) else None
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return self._text.of_text(prompt), None
        if isinstance(prompt, list) and prompt:
            ids = [one for one in prompt if isinstance(one, int)]
            if len(ids) == len(prompt):
                return self._text.of_ids(ids), None
            raise LineError("prompt: has several texts; expected one, or token ids")
        raise LineError(
            "has neither `messages` nor `prompt` nor `input`, in itself or in `body` or `request`"
        )

    def _output_tokens(
        self, request: _ChatBody, usage: _ChatUsage, said: str | None
    ) -> tuple[int, str]:
        """Return the number of tokens of the answer, and the way in which it is known."""
        told = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        if told is not None:
            return told or 1, "usage"
        if said:
            return min(self._text.count(said), MAX_OUTPUT_TOKENS), "text"
        most = request.max_completion_tokens or request.max_tokens or request.max_output_tokens or 0
        output = self._options.output
        return (min(output, most) if most > 0 else output), "default"

    def _arrival_ns(self, line: _ChatLine, answer: _ChatAnswer | None) -> int:
        field, value = _time_of(line, answer)
        if self._has_times is None:
            self._has_times = value is not None
        if self._has_times != (value is not None):
            if value is None:
                raise LineError(f"has no time, as earlier lines have; expected {', '.join(_TIMES)}")
            raise LineError(f"{field}: is a time, and earlier lines have none")
        if value is not None:
            return _unix_ns(field, value)
        self._made_s += self._random.expovariate(self._options.rate)
        return round(self._made_s * NS)

    def notes(self) -> Iterator[str]:
        """Yield notes on the assumptions that the reading had to make."""
        options, requests = self._options, self._answers.total()
        if self._has_times is False:
            yield (
                f"no line has a time ({', '.join(_TIMES)}): arrivals are drawn, Poisson, "
                f"{options.rate:g} a second "
                "where --rate does not say; latencies are of that load"
            )
        yield from self._text.notes()
        if unknown := self._answers["default"]:
            yield (
                f"{unknown} of {requests} answers have no length: {options.output} tokens or "
                "max_tokens are taken, whichever is less (--format 'auto?output=N')"
            )
        if estimated := self._answers["text"]:
            yield f"{estimated} of {requests} answers have no usage: their text is counted"
        if self._continued:
            yield (
                f"{self._continued} of {requests} requests have a previous_response_id: the turns "
                "before them are not in the file, so their prompts count as too short"
            )


def _messages_of(said: Any) -> list[dict[str, Any]]:
    """Return the messages of a response's `input`, which is a text or a list of items."""
    if isinstance(said, str) and said:
        return [{"role": "user", "content": said}]
    if not isinstance(said, list) or not said or not all(isinstance(one, dict) for one in said):
        raise LineError("input: expected a text or a list of items, not empty")
    return [
        {"role": item["role"], "content": item["content"]}
        if isinstance(item.get("role"), str) and isinstance(item.get("content"), str | list)
        else {"role": "tool", "content": [item]}
        for item in said
    ]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form that chats have. Responses name its fields without a `function`
    object around them.
    """
    if tool.get("type") != "function" or "function" in tool:
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _text_of_answer(answer: _ChatAnswer) -> str | None:
    """Return the text of a chat, a completion or a response, or None if it has none."""
    if answer.choices:
        choice = answer.choices[0]
        message = choice.get("message")
        said = message.get("content") if isinstance(message, dict) else choice.get("text")
        return said if isinstance(said, str) else None
    parts: list[Any] = []
    for item in answer.output if isinstance(answer.output, list) else ():
        if isinstance(item, dict):
            content = item.get("content")
            parts += content if isinstance(content, list) else [{"text": item.get("arguments")}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str)) or None


def _time_of(line: _ChatLine, answer: _ChatAnswer | None) -> tuple[str, float | str | None]:
    """Return the name and value of the first field that has a time, or ("", None) without one."""
    for name in _TIMES:
        if (value := getattr(line, name)) is not None:
            return name, value
    if answer is not None and (answer.created or answer.created_at) is not None:
        return "response.created", answer.created or answer.created_at
    return "", None


def _unix_ns(field: str, value: float | str) -> int:
    """Return a time as nanoseconds since 1970.

    The time is in seconds or fractions of them, or ISO 8601, in UTC if it has no time zone.
    """
    try:
        seconds = float(value)
        seconds /= next((unit for least, unit in _UNITS if seconds >= least), 1.0)
    except ValueError:
        seconds = _calendar_s(str(value))
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_UNIX_S):
        raise LineError(
            f"{field}: is no time; expected seconds or milliseconds since 1970, or ISO 8601, as "
            "2026-11-21T10:00:00Z"
        )
    return round(seconds * 1e6) * 1000  # a float that counts from 1970 tells no more


def _calendar_s(text: str) -> float:
    try:
        told = datetime.fromisoformat(text)
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan
