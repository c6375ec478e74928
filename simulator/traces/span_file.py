"""OpenTelemetry spans of calls to models, as a collector's file exporter writes them.

    {"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1700000000000000000",
     "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "130"}}, ...]}]}]}]}

A span is a request if it has `gen_ai.usage.input_tokens` or the prompt, and its operation is a chat
or a completion; spans of agents and tools around it are left out. The prompt is read from
`gen_ai.input.messages` and similar fields, in the span or in its events, and is turned into block
hashes at once (`prompt_text`). If spans have no prompt, a turn of a `gen_ai.conversation.id` that
is no shorter than the turn before it with its answer is taken to begin with both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from policies.contract import Hashes
from simulator.traces.job import NO_IDS, ErrorLog, Job, LineError
from simulator.traces.mooncake import DECODE_ERRORS, MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS
from simulator.traces.prompt_text import PromptText, TextOptions, Tokens, session_digest

_OPERATIONS = (None, "chat", "text_completion", "generate_content")
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_PROMPTS = ("gen_ai.input.messages", "gen_ai.prompt")
_FLAT = "gen_ai.prompt."  # N.role and N.content, one attribute each
_MAX_SESSIONS = 100_000  # whose last turn is known; the oldest are forgotten first
_MAX_NS = 1 << 63


class _Value(msgspec.Struct, frozen=True, gc=False):
    """OTLP's AnyValue: exactly one of the fields is set."""

    text: str | None = msgspec.field(name="stringValue", default=None)
    integer: int | str | None = msgspec.field(name="intValue", default=None)
    number: float | None = msgspec.field(name="doubleValue", default=None)
    truth: bool | None = msgspec.field(name="boolValue", default=None)
    array: _Values | None = msgspec.field(name="arrayValue", default=None)
    fields: _Fields | None = msgspec.field(name="kvlistValue", default=None)


class _Values(msgspec.Struct, frozen=True):
    values: list[_Value] = []


class _Attribute(msgspec.Struct, frozen=True):
    key: str
    value: _Value = _Value()


class _Fields(msgspec.Struct, frozen=True):
    values: list[_Attribute] = []


class _SpanEvent(msgspec.Struct, frozen=True):
    attributes: list[_Attribute] = []


class _Span(msgspec.Struct, frozen=True):
    start: int | str = msgspec.field(name="startTimeUnixNano")
    attributes: list[_Attribute] = []
    events: list[_SpanEvent] = []


class _ScopeSpans(msgspec.Struct, frozen=True):
    spans: list[msgspec.Raw] = []


class _ResourceSpans(msgspec.Struct, frozen=True):
    scopes: list[_ScopeSpans] = msgspec.field(name="scopeSpans", default_factory=list)


class _Export(msgspec.Struct, frozen=True):
    resources: list[_ResourceSpans] = msgspec.field(name="resourceSpans")


def spans_of(lines: Iterable[tuple[int, bytes]], errors: ErrorLog) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the line, span) of all spans; a line holds the spans of one export."""
    decode = msgspec.json.Decoder(_Export).decode
    for number, raw in lines:
        try:
            export = decode(raw)
        except DECODE_ERRORS as error:
            errors.add(number, error)
            continue
        for resource in export.resources:
            for scope in resource.scopes:
                for span in scope.spans:
                    yield number, bytes(span)


class SpanReader:
    """Reads the spans of one file, and counts the assumptions that it has to make. Lifetime:
    stream.
    """

    def __init__(self, block_tokens: int, options: TextOptions) -> None:
        self._decode = msgspec.json.Decoder(_Span).decode
        self._options = options
        self._block_tokens = block_tokens
        self._text = PromptText(block_tokens, options)
        self._last: dict[str, tuple[Hashes, int]] = {}  # names and end of a session's last turn
        self._spans: Counter[str] = Counter()

    def parse(self, raw: bytes) -> Job | None:
        """Return the request of a span, or None if it is no request or of another model.

        Raises `LineError`.
        """
        try:
            return self._job(self._decode(raw))
        except (*DECODE_ERRORS, UnicodeEncodeError) as error:
            raise LineError(str(error)) from error

    def _job(self, span: _Span) -> Job | None:
        told = {one.key: _plain(one.value) for one in span.attributes}
        for event in span.events:
            told.update((one.key, _plain(one.value)) for one in event.attributes)
        operation = told.get("gen_ai.operation.name")
        messages = _messages(told)
        tokens = _count(told, _INPUT, MAX_PROMPT_TOKENS)
        if operation not in _OPERATIONS or (messages is None and not tokens):
            self._spans["others"] += 1
            return None
        model = told.get("gen_ai.request.model")
        if not self._text.selects(model if isinstance(model, str) else None):
            return None
        at_ns = _nanoseconds(span.start)
        output = _count(told, _OUTPUT, MAX_OUTPUT_TOKENS)
        given = told.get("gen_ai.conversation.id")
        session = given if isinstance(given, str | int) else None
        self._spans["requests"] += 1
        self._spans["no output"] += output is None
        size = self._options.output if output is None else output or 1
        if messages is None:
            assert tokens is not None
            self._spans["no prompt"] += 1
            if session is None:
                return Job(at_ns, tokens, size, NO_IDS)
            digest = session_digest(session)
            return Job(at_ns, tokens, size, self._assumed(digest, tokens, size), session=digest)
        ids = self._tokens_of(messages, told)
        names, session = self._text.named(ids, tokens, session)
        return Job(at_ns, len(ids), size, names, session=session)

    def _tokens_of(self, messages: object, told: Mapping[str, object]) -> Tokens:
        if isinstance(messages, str):
            return self._text.of_text(messages)
        chat = []
        if system := _decoded(told.get("gen_ai.system_instructions")):
            chat.append({"role": "system", "content": system})
        for number, message in enumerate(messages if isinstance(messages, list) else [messages]):
            if not isinstance(message, dict):
                raise LineError(f"gen_ai.input.messages[{number}]: expected an object")
            more = {key: value for key, value in message.items() if key != "parts"}
            chat.append({"content": message.get("parts"), **more})
        tools = _decoded(told.get("gen_ai.tool.definitions"))
        return self._text.of_chat(chat, tools if isinstance(tools, list) else None)

    def _assumed(self, session: str, tokens: int, output: int) -> Hashes:
        """Return hashes for the blocks of a turn whose prompt is unknown: those of the session's
        last turn, then new ones.
        """
        full = tokens // self._block_tokens
        names, reaches = self._last.pop(session, (NO_IDS, 0))
        if reaches > tokens:  # a new context, or another agent's prompt
            names = NO_IDS
        base = int(session_digest(f"{session}/{self._spans['requests']}"), 16)
        names = np.append(names, np.uint64(base) + np.arange(len(names), full, dtype=np.uint64))
        self._last[session] = names, tokens + output
        if len(self._last) > _MAX_SESSIONS:
            del self._last[next(iter(self._last))]
        return names

    def notes(self) -> Iterator[str]:
        """Yield notes on the assumptions that the reading had to make."""
        spans, requests = self._spans, self._spans["requests"]
        if others := spans["others"]:
            yield f"{others} spans are no calls to a model and left out"
        if without := spans["no prompt"]:
            yield (
                f"{without} of {requests} spans have no prompt: what they share is not known. A "
                "turn of one gen_ai.conversation.id is taken to begin with the turn before it and "
                "its answer, and to share nothing else"
            )
        yield from self._text.notes()
        if unknown := spans["no output"]:
            yield (
                f"{unknown} of {requests} answers have no length: {self._options.output} tokens "
                "are taken (--format 'auto?output=N')"
            )


def _plain(value: _Value) -> object:
    """Return the value as JSON would have it."""
    if value.array is not None:
        return [_plain(one) for one in value.array.values]
    if value.fields is not None:
        return {one.key: _plain(one.value) for one in value.fields.values}
    for scalar in (value.text, value.integer, value.number, value.truth):
        if scalar is not None:
            return scalar
    return None


def _decoded(value: object) -> object:
    """Return the list or object that a text holds as JSON, else the value itself."""
    if not isinstance(value, str):
        return value
    try:
        found = msgspec.json.decode(value)
    except DECODE_ERRORS:
        return value
    return found if isinstance(found, list | dict) else value


def _messages(told: Mapping[str, object]) -> object | None:
    """Return the prompt of a span as messages or a text, or None if the span has none."""
    for name in _PROMPTS:
        if told.get(name):
            return _decoded(told[name])
    flat: dict[int, dict[str, object]] = {}
    for key, value in told.items():
        number, _, field = key.removeprefix(_FLAT).partition(".")
        if key.startswith(_FLAT) and number.isdecimal() and number.isascii() and field:
            flat.setdefault(int(number), {})[field] = value
    return [flat[number] for number in sorted(flat)] or None


def _count(told: Mapping[str, object], names: tuple[str, ...], most: int) -> int | None:
    """Return a number of tokens from the first of these attributes; OTLP writes it as text. None if
    it is missing.
    """
    for name in names:
        if (value := told.get(name)) is None:
            continue
        text = str(value)
        # Longer ones are beyond `most`, and Python may refuse to read them.
        if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
            raise LineError(f"{name}: expected a whole number in 0..{most}")
        return int(text)
    return None


def _nanoseconds(start: int | str) -> int:
    text = str(start)
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < _MAX_NS):
        raise LineError("startTimeUnixNano: expected nanoseconds since 1970")
    return int(text)
