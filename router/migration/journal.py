"""Keeps the token ids of one stream, and writes the events that its client gets, without I/O."""

from __future__ import annotations

import json
import re
from array import array
from typing import Annotated, Any, TypeAlias

import msgspec

import kvkernels
from router.engines.adapter import StreamForm
from router.http.errors import WorkerError
from router.migration.plan import Plan


class Room:
    """The limits of memory for kept token ids, at four bytes each. Lifetime: process. The limits
    may change while streams hold ids.
    """

    def __init__(self, stream_tokens: int, tokens: int) -> None:
        self.stream_tokens = stream_tokens
        self.tokens = tokens
        self.taken = 0

    def take(self, more: int, of_stream: int) -> bool:
        """Reserve memory for `more` tokens of a stream that then has `of_stream` tokens. Return
        False and reserve nothing if a limit would be exceeded.
        """
        if of_stream > self.stream_tokens or self.taken + more > self.tokens:
            return False
        self.taken += more
        return True

    def give(self, tokens: int) -> None:
        """Free the memory of a stream's tokens."""
        self.taken -= tokens


AnyRoom: TypeAlias = "Room | kvkernels.RelayRoom"


def room_of_streams() -> AnyRoom:
    """Return the empty memory for the token ids of all streams; the relay's thread shares it if
    that thread exists.
    """
    return Room(0, 0) if kvkernels.RelayRoom is None else kvkernels.RelayRoom(0, 0)


_BREAK = re.compile(rb"\r?\n\r?\n")
_BREAK_BYTES = 4
_NOTHING = (b"null", b"[]", b'""')
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Splitter:
    """Splits the bytes of a stream into its events. Lifetime: one worker's reply."""

    def __init__(self, limit_bytes: int) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._limit_bytes = limit_bytes

    @property
    def full(self) -> bool:
        """True if the present event is longer than the longest event that is expected."""
        return len(self._buffer) > self._limit_bytes

    def feed(self, payload: bytes) -> list[bytes]:
        """Return the events that `payload` completes, each with the empty line at its end."""
        buffer = self._buffer
        if not buffer and 0 <= payload.find(b"\n\n") == len(payload) - 2 and b"\r" not in payload:
            return [payload]  # one event, as nearly always
        buffer += payload
        events = []
        start = 0
        for found in _BREAK.finditer(buffer, self._searched):
            events.append(bytes(buffer[start : found.end()]))
            start = found.end()
        if start:
            del buffer[:start]
        self._searched = max(len(buffer) - _BREAK_BYTES + 1, 0)
        return events

    def rest(self) -> bytes:
        """Return the bytes of the incomplete event, and drop them."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


class ChunkChoice(msgspec.Struct):
    """One choice in an event, of a completion or of a chat."""

    index: int = 0
    text: str | None = None
    delta: dict[str, msgspec.Raw] | None = None
    finish_reason: str | None = None
    token_ids: list[_Token] | None = None
    prompt_token_ids: list[_Token] | None = None

    @property
    def has_text(self) -> bool:
        """True if the choice has text of the answer."""
        if self.delta is None:
            return bool(self.text)
        return "content" in self.delta and bytes(self.delta["content"]) not in _NOTHING

    @property
    def parsed(self) -> bool:
        """True if the engine turned a part of the answer into something other than text, such as a
        tool call.
        """
        if self.delta is None:
            return False
        if len(self.delta) == 1 and "content" in self.delta:
            return False
        other = self.delta.keys() - {"role", "content"}
        return any(bytes(self.delta[name]) not in _NOTHING for name in other)

    @property
    def opens(self) -> bool:
        """True if the choice contains the assistant's role, with which a chat's answer begins."""
        return self.delta is not None and "role" in self.delta


class Chunk(msgspec.Struct):
    """The fields of an event's JSON that the router reads; the client gets the event's
    own bytes.
    """

    choices: list[ChunkChoice] = msgspec.field(default_factory=list)
    usage: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: list[_Token] | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def error_code(self) -> int | None:
        """The HTTP status in an event's error, in the form of vLLM and OpenAI; None if there is
        none.
        """
        error = _value(self.error)
        code = error.get("code") if isinstance(error, dict) else None
        return code if isinstance(code, int) else None

    @property
    def answer_tokens(self) -> int | None:
        """The answer's number of tokens by the usage in this event; None if it has no usage."""
        usage = _value(self.usage)
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return tokens if isinstance(tokens, int) else None


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # strings in it are no text


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk | None:
    """Return the parsed data of an event; None if it is not valid."""
    try:
        return _CHUNK.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


CHOICES = b'"choices":'
_IDS = re.compile(rb'"(prompt_)?token_ids":(?:null|\[[^\]]*\])')
_COMMA_IDS = re.compile(rb',"(prompt_)?token_ids":(?:null|\[[^\]]*\])')
_TEXT = re.compile(rb'"text":("(?:[^"\\]|\\.)*")')
_USAGE = re.compile(rb'"usage":(?=\{)')
_CHOICE_PROMPT = re.compile(rb',"prompt_token_ids":(?:null|\[[^\]]*\])')
_NO_STOP = b',"finish_reason":null,"stop_reason":null'
_DECODER = json.JSONDecoder()
_DONE = b"data: [DONE]\n\n"


def prefix_of(data: bytes) -> bytes | None:
    """Return the part of an event before its choices, with id, object, time and model; None if the
    event has no choices.
    """
    at = data.find(CHOICES)
    return None if at < 0 else data[:at]


def with_prefix(data: bytes, prefix: bytes) -> bytes:
    """Return the event with the id, object, time and model of the stream's first worker."""
    at = data.find(CHOICES)
    return data if at < 0 else prefix + data[at:]


def without_ids(data: bytes, hidden: bytes, prompt_only: bool = False) -> bytes:
    """Return the event with `hidden` in place of its token ids, or without these fields if `hidden`
    is empty. With `prompt_only`, only the prompt's ids are replaced.
    """
    if b'token_ids":' not in data:
        return data

    def cut(found: re.Match[bytes]) -> bytes:
        return found[0] if prompt_only and found[1] is None else b""

    def blank(found: re.Match[bytes]) -> bytes:
        if prompt_only and found[1] is None:
            return found[0]
        return b'"%btoken_ids":%b' % (found[1] or b"", hidden)

    return _IDS.sub(blank, data) if hidden else _COMMA_IDS.sub(cut, data)


def as_chat(data: bytes) -> bytes:
    """Return a completion's event as an event of a chat, as vLLM writes both.

    A chat's choices have no prompt ids, and have a stop reason only at the end.
    """
    data, texts = _TEXT.subn(lambda found: b'"delta":{"content":%b}' % found[1], data, count=1)
    if not texts:
        return data
    return _CHOICE_PROMPT.sub(b"", data).replace(_NO_STOP, b',"finish_reason":null', 1)


def with_usage(data: bytes, prompt_tokens: int, earlier_tokens: int) -> bytes:
    """Return the event with the token counts of the whole answer, of which earlier workers wrote
    `earlier_tokens` tokens.
    """
    found = _USAGE.search(data)
    if found is None:
        return data
    try:
        text = data[found.end() :].decode()
        usage, chars = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return data
    if isinstance(answer := usage.get("completion_tokens"), int):
        usage |= counts(
            prompt_tokens, answer + earlier_tokens
        )  # keys that are there keep their order
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
        usage["prompt_tokens_details"] = details | {"cached_tokens": min(cached, prompt_tokens)}
    return data[: found.end()] + msgspec.json.encode(usage) + text[chars:].encode()


def counts(prompt_tokens: int, answer_tokens: int) -> dict[str, int]:
    """Return a request's token counts in OpenAI's form."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "completion_tokens": answer_tokens,
    }


def closing(prefix: bytes, usage: dict[str, int] | None) -> bytes:
    """Return the end of a stream whose answer is complete: the event with `usage`, if it is not
    None, and the last line.
    """
    if usage is None:
        return _DONE
    return b'data: %b"choices":[],"usage":%b}\n\n' % (prefix, msgspec.json.encode(usage)) + _DONE


WITHHELD_TOKENS = 256  # without text; more than any character or special token explains
_EVENT_BYTES = 1 << 16  # of the longest event, besides the prompt's ids in the first one
_ID_BYTES = 12  # of one id there
SAYS_NOTHING = (b":", b"\r", b"\n")  # a comment, as engines keep connections open by; no line
GIVEN_UP = ("abort", "error")  # why an engine ends an answer that it could not finish


class Journal:
    """Reads the events of a stream's workers, keeps their token ids, and returns the bytes for the
    client. Lifetime: request; `close` frees the ids.
    """

    def __init__(self, plan: Plan, room: AnyRoom) -> None:
        self.prompt = array("i")
        self.answer_ids = array("i")  # tokens of the answer that the client has seen all of
        self.prompt_tokens = 0
        self.unfit = ""  # why it cannot go on elsewhere, in a word
        # The answer is complete, though its usage or last line may be missing.
        self.finished = False
        self.complete = False  # nothing more follows
        self.miscounted = False  # the worker counted other tokens than it gave ids of
        self.failure: WorkerError | None = None  # the worker gave up in good form
        self._plan = plan
        self._room = room
        self._kept_tokens = 0
        self._form = StreamForm()
        self._events = Splitter(_EVENT_BYTES + _ID_BYTES * room.stream_tokens)
        self._held: list[bytes] = []
        self._withheld = array("i")  # tokens whose text the engine keeps back
        self._prefix: bytes | None = None
        self._opened = False
        self._prompt_shown = False
        self._prompt_held = False  # shown in an event that waits
        self._usage_sent = False
        self.said_before = 0  # tokens, at the last seam
        self._seams = 0

    def begin(self, form: StreamForm) -> None:
        """Expect events in this form from now on, at the first worker or after a move to
        the next.
        """
        self._form = form

    def adopt(self, first: kvkernels.RelayJournal) -> None:
        """Continue with the ids that the relay's thread kept of the first worker, which
        was lost.
        """
        self.prompt.frombytes(first.prompt)
        self.answer_ids.frombytes(first.said)
        self._kept_tokens = first.leave_room()
        self.prompt_tokens = first.prompt_tokens
        self.unfit = first.unfit
        self.finished, self.complete = first.finished, first.complete
        self.miscounted = first.miscounted
        self._prefix = first.prefix
        self._opened = first.opened
        self._usage_sent = first.usage_sent

    def seam(self) -> None:
        """Drop the incomplete output of a worker that was lost, because the next worker generates
        it again.
        """
        self._events.rest()
        self._held.clear()
        if self._prompt_held:
            self._prompt_shown = self._prompt_held = False
        del self._withheld[:]
        self.said_before = len(self.answer_ids)
        self._seams += 1
        self.failure = None

    def feed(self, payload: bytes) -> bytes:
        """Return the bytes for the client that result from the next bytes of the reply. If
        `failure` is set afterwards, the reply must not be read on.
        """
        out: list[bytes] = []
        for event in self._events.feed(payload):
            out.append(self._take(event))
            if self.failure is not None:
                break
        if self._events.full and self.failure is None:
            self._mark_unmovable("long_event")
            out += (*self._held, self._events.rest())
            self._held.clear()
        return b"".join(out)

    def flush(self) -> bytes:
        """Return the bytes that are still held back when the worker has ended its reply in good
        order.
        """
        held, self._held = self._held, []
        return b"".join(held) + self._events.rest()

    @property
    def _must_add_usage(self) -> bool:
        return self._plan.shows_usage and not self._usage_sent and not self.complete

    @property
    def closable(self) -> bool:
        """True if the answer is complete, so that the router can write the end of the stream
        without a worker.
        """
        return self.finished and not (self.unfit and self._must_add_usage)

    def closing(self) -> bytes:
        """Return the end of a `closable` stream whose worker is gone."""
        if self.complete:
            return b""
        usage = counts(self.prompt_tokens, len(self.answer_ids)) if self._must_add_usage else None
        return closing(self._prefix or b"{", usage)

    def close(self) -> None:
        """Free the memory of the token ids."""
        self._room.give(self._kept_tokens)
        self._kept_tokens = 0
        self.prompt, self.answer_ids = array("i"), array("i")

    # One event.

    def _take(self, event: bytes) -> bytes:
        if event[:1] in SAYS_NOTHING:
            return event
        data = event[5:].strip() if event[:5] == b"data:" else b""
        if data == b"[DONE]":
            self.complete = True
            return self._with_held(event)
        chunk = read_chunk(data)
        if chunk is None:
            self._mark_unmovable("unreadable")
            return self._with_held(self._cleaned(event))
        if bytes(chunk.error) != b"null":
            return self._with_held(self._cleaned(event)) if self._is_answer(chunk) else b""
        if self._prefix is None:
            self._prefix = prefix_of(data)
            if self._prefix is None:
                self._mark_unmovable("unreadable")
        if not chunk.choices:
            self._usage_sent |= bytes(chunk.usage) != b"null"
            if not self.unfit and not self._seams and chunk.answer_tokens is not None:
                # Parsers of some versions swallow ids along with the text they keep.
                self.miscounted = chunk.answer_tokens != len(self.answer_ids)
            return self._with_held(self._written(event, data, chunk))
        choice = chunk.choices[0]
        if len(chunk.choices) > 1 or choice.index:
            self._mark_unmovable("several_choices")
        return self._take_choice(event, data, chunk, choice)

    def _take_choice(self, event: bytes, data: bytes, chunk: Chunk, choice: ChunkChoice) -> bytes:
        if choice.finish_reason in GIVEN_UP and not self.unfit:
            self.failure = WorkerError("early_close", "the worker gave the answer up")
            return b""
        prompt = choice.prompt_token_ids or chunk.prompt_token_ids
        ends = choice.finish_reason is not None
        says = choice.has_text
        if not self.unfit:
            self._remember(prompt, choice, says, ends)
        opens = choice.opens and not says
        if self._seams and self._opened and opens and not ends:
            return b""
        written = self._written(event, data, chunk)
        self._opened |= opens
        shows_prompt = prompt is not None and not self._prompt_shown
        self._prompt_shown |= shows_prompt
        self.finished |= ends
        if says or ends or not self._withheld:
            return self._with_held(written)
        self._held.append(written)
        self._prompt_held |= shows_prompt
        return b""

    def _remember(
        self, prompt: list[int] | None, choice: ChunkChoice, has_text: bool, ends: bool
    ) -> None:
        ids = choice.token_ids or ()
        if prompt is not None and not self.prompt:
            self.prompt.extend(prompt)
            self.prompt_tokens = len(prompt)
        self._withheld.extend(ids)
        if choice.parsed:
            self._mark_unmovable("parsed")
        elif has_text and not (self._withheld and self.prompt):
            self._mark_unmovable("no_token_ids")
        elif has_text or ends:
            self.answer_ids.extend(self._withheld)
            del self._withheld[:]
        elif len(self._withheld) > WITHHELD_TOKENS:
            self._mark_unmovable("withheld")
        self._keep()

    def _keep(self) -> None:
        """Reserve memory for the token ids that are kept now; if there is none, the stream can no
        longer move.
        """
        kept = len(self.prompt) + len(self.answer_ids)
        if not self.unfit and not self._room.take(kept - self._kept_tokens, kept):
            self._mark_unmovable("room")
        elif not self.unfit:
            self._kept_tokens = kept

    def _is_answer(self, chunk: Chunk) -> bool:
        """Return whether an event with an error goes to the client; if not, another worker may
        continue the answer.
        """
        error = chunk.error_code
        if not self.unfit and not self.finished and (error is None or error >= 500):
            self.failure = WorkerError("status_5xx", "the worker sent an error in mid-stream")
            return False
        self.finished = True
        return True

    def _written(self, event: bytes, data: bytes, chunk: Chunk) -> bytes:
        """Return the event as the client gets it."""
        new = data
        if self._seams:
            new = with_prefix(new, self._prefix or b"")
            if self._plan.chat:
                new = as_chat(new)
            new = with_usage(new, self.prompt_tokens, self.said_before)
        if not self._plan.shows_ids:
            new = without_ids(new, self._form.hidden)
        elif self._prompt_shown:
            new = without_ids(new, self._form.hidden, prompt_only=True)
        return event if new is data else event.replace(data, new, 1)

    def _cleaned(self, event: bytes) -> bytes:
        """Return an event that is not part of the answer, without token ids that the client did not
        ask for.
        """
        shown = self._plan.shows_ids
        return event if shown else without_ids(event, self._form.hidden)

    def _with_held(self, event: bytes) -> bytes:
        if not self._held:
            return event
        held, self._held, self._prompt_held = self._held, [], False
        return b"".join((*held, event))

    def _mark_unmovable(self, why: str) -> None:
        """Note the reason, in a word, why the stream can no longer move to another worker, and free
        its ids.
        """
        if not self.unfit:
            self.unfit = why
            del self._withheld[:]  # no token waits for its text any more
            self._room.give(self._kept_tokens)
            self._kept_tokens = 0
            self.prompt, self.answer_ids = array("i"), array("i")
