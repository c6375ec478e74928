"""What is remembered of one stream, and the bytes its client gets. No I/O.

The client reads one stream whoever gives it: events go out whole, under the first worker's id, and
without the token ids that only the router asked for. An event without text says that the engine
keeps some back (half a character); it waits for the next one with text, so that whatever the
client has seen ends where a token ends.
"""

from __future__ import annotations

from array import array

import kvkernels
from router.http.errors import WorkerError
from router.http.migration import splice
from router.http.migration.events import Choice, Chunk, Splitter, read_chunk
from router.http.migration.forms import Form
from router.http.migration.plan import Plan
from router.http.migration.room import AnyRoom

WITHHELD_TOKENS = 256  # without text; more than any character or special token explains
_EVENT_BYTES = 1 << 16  # of the longest event, besides the prompt's ids in the first one
_ID_BYTES = 12  # of one id there
SAYS_NOTHING = (b":", b"\r", b"\n")  # a comment, as engines keep connections open by; no line
GIVEN_UP = ("abort", "error")  # why an engine ends an answer that it could not finish


class Journal:
    """Events in, the client's bytes out, ids kept. Lifetime: request; `close` frees the ids."""

    def __init__(self, plan: Plan, room: AnyRoom) -> None:
        self.prompt = array("i")
        self.said = array("i")  # tokens of the answer that the client has seen all of
        self.prompt_tokens = 0
        self.unfit = ""  # why it cannot go on elsewhere, in a word
        self.finished = False  # the answer is, though its usage or last line may not have come
        self.complete = False  # nothing is to follow
        self.miscounted = False  # the worker counted other tokens than it gave ids of
        self.failure: WorkerError | None = None  # the worker gave up in good form
        self._plan = plan
        self._room = room
        self._kept_tokens = 0
        self._form = Form()
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

    def begin(self, form: Form) -> None:
        """Events of a worker of this form follow, of the first one or after a seam."""
        self._form = form

    def adopt(self, first: kvkernels.RelayJournal) -> None:
        """Go on from what the relay's thread remembers of the first worker, which was lost."""
        self.prompt.frombytes(first.prompt)
        self.said.frombytes(first.said)
        self._kept_tokens = first.leave_room()
        self.prompt_tokens = first.prompt_tokens
        self.unfit = first.unfit
        self.finished, self.complete = first.finished, first.complete
        self.miscounted = first.miscounted
        self._prefix = first.prefix
        self._opened = first.opened
        self._usage_sent = first.usage_sent

    def seam(self) -> None:
        """The worker is lost: what it had begun to say is forgotten, the next one says it again."""
        self._events.rest()
        self._held.clear()
        if self._prompt_held:
            self._prompt_shown = self._prompt_held = False
        del self._withheld[:]
        self.said_before = len(self.said)
        self._seams += 1
        self.failure = None

    def feed(self, payload: bytes) -> bytes:
        """The client's part of the reply's next bytes; stops where `failure` is set."""
        out: list[bytes] = []
        for event in self._events.feed(payload):
            out.append(self._take(event))
            if self.failure is not None:
                break
        if self._events.full and self.failure is None:
            self._spoil("long_event")
            out += (*self._held, self._events.rest())
            self._held.clear()
        return b"".join(out)

    def flush(self) -> bytes:
        """What waits, once the worker has ended its reply in good form."""
        held, self._held = self._held, []
        return b"".join(held) + self._events.rest()

    @property
    def _owes_usage(self) -> bool:
        return self._plan.shows_usage and not self._usage_sent and not self.complete

    @property
    def closable(self) -> bool:
        """All of the answer was said, and what is missing of the stream is known here."""
        return self.finished and not (self.unfit and self._owes_usage)

    def closing(self) -> bytes:
        """The end of a `closable` stream whose worker is gone."""
        if self.complete:
            return b""
        usage = splice.counts(self.prompt_tokens, len(self.said)) if self._owes_usage else None
        return splice.closing(self._prefix or b"{", usage)

    def close(self) -> None:
        """Give the room of the ids back."""
        self._room.give(self._kept_tokens)
        self._kept_tokens = 0
        self.prompt, self.said = array("i"), array("i")

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
            self._spoil("unreadable")
            return self._with_held(self._cleaned(event))
        if bytes(chunk.error) != b"null":
            return self._with_held(self._cleaned(event)) if self._is_answer(chunk) else b""
        if self._prefix is None:
            self._prefix = splice.prefix_of(data)
            if self._prefix is None:
                self._spoil("unreadable")
        if not chunk.choices:
            self._usage_sent |= bytes(chunk.usage) != b"null"
            if not self.unfit and not self._seams and chunk.answer_tokens is not None:
                # Parsers of some versions swallow ids along with the text they keep.
                self.miscounted = chunk.answer_tokens != len(self.said)
            return self._with_held(self._written(event, data, chunk))
        choice = chunk.choices[0]
        if len(chunk.choices) > 1 or choice.index:
            self._spoil("several_choices")
        return self._take_choice(event, data, chunk, choice)

    def _take_choice(self, event: bytes, data: bytes, chunk: Chunk, choice: Choice) -> bytes:
        if choice.finish_reason in GIVEN_UP and not self.unfit:
            self.failure = WorkerError("early_close", "the worker gave the answer up")
            return b""
        prompt = choice.prompt_token_ids or chunk.prompt_token_ids
        ends = choice.finish_reason is not None
        says = choice.says
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

    def _remember(self, prompt: list[int] | None, choice: Choice, says: bool, ends: bool) -> None:
        ids = choice.token_ids or ()
        if prompt is not None and not self.prompt:
            self.prompt.extend(prompt)
            self.prompt_tokens = len(prompt)
        self._withheld.extend(ids)
        if choice.parsed:
            self._spoil("parsed")
        elif says and not (self._withheld and self.prompt):
            self._spoil("no_token_ids")
        elif says or ends:
            self.said.extend(self._withheld)
            del self._withheld[:]
        elif len(self._withheld) > WITHHELD_TOKENS:
            self._spoil("withheld")
        self._keep()

    def _keep(self) -> None:
        """Take the room that what is remembered needs."""
        kept = len(self.prompt) + len(self.said)
        if not self.unfit and not self._room.take(kept - self._kept_tokens, kept):
            self._spoil("room")
        elif not self.unfit:
            self._kept_tokens = kept

    def _is_answer(self, chunk: Chunk) -> bool:
        """Whether an error is for the client to read; else another worker may do better."""
        error = chunk.error_code
        if not self.unfit and not self.finished and (error is None or error >= 500):
            self.failure = WorkerError("status_5xx", "the worker sent an error in mid-stream")
            return False
        self.finished = True
        return True

    def _written(self, event: bytes, data: bytes, chunk: Chunk) -> bytes:
        """The event as the client reads it."""
        new = data
        if self._seams:
            new = splice.with_prefix(new, self._prefix or b"")
            if self._plan.chat:
                new = splice.as_chat(new)
            new = splice.with_usage(new, self.prompt_tokens, self.said_before)
        if not self._plan.shows_ids:
            new = splice.without_ids(new, self._form.hidden)
        elif self._prompt_shown:
            new = splice.without_ids(new, self._form.hidden, prompt_only=True)
        return event if new is data else event.replace(data, new, 1)

    def _cleaned(self, event: bytes) -> bytes:
        """An event that is no part of an answer: whatever it is, ids in it are not the client's."""
        shown = self._plan.shows_ids
        return event if shown else splice.without_ids(event, self._form.hidden)

    def _with_held(self, event: bytes) -> bytes:
        if not self._held:
            return event
        held, self._held, self._prompt_held = self._held, [], False
        return b"".join((*held, event))

    def _spoil(self, why: str) -> None:
        """It stays with its worker from here on."""
        if not self.unfit:
            self.unfit = why
            del self._withheld[:]  # nothing is to wait for its text any more
            self._room.give(self._kept_tokens)
            self._kept_tokens = 0
            self.prompt, self.said = array("i"), array("i")
