"""Keeps the token ids of streams of SGLang's own API, `/generate`, and reads and writes the forms
of their events.

Each event has the whole answer so far, text and ids (SGLang 0.5, `managers/tokenizer_manager.py`),
or only the new part if the engine runs with `--incremental-streaming-output`; some versions with
`--stream-output` send the whole text and only the new ids. The second event shows which form it is,
or the fifth if its ids are only the new ones. The worker that continues an answer must write in the
same form, so the engines of a pool must have the same options. The stream does not contain the
prompt's ids: they are those in the request, or those that this router made of its text if the
worker counts equally many.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from router.http.errors import WorkerError
from router.migration.journal import (
    GIVEN_UP,
    SAYS_NOTHING,
    WITHHELD_TOKENS,
    AnyRoom,
    Journal,
    read_chunk,
)
from router.migration.plan import Plan

_GROWTHS = 4  # texts that each go on from a shorter one: by then they are whole, and no pieces

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Finish(msgspec.Struct):
    """The reason in an event why the answer ended."""

    type: str = ""
    status_code: int | None = None  # of an answer that was given up

    @property
    def gives_up(self) -> bool:
        """True if the engine could not finish the answer and the request was not at fault."""
        return self.type in GIVEN_UP and (self.status_code is None or self.status_code >= 500)


class _Meta(msgspec.Struct):
    """The fields of an event's `meta_info` that the router reads."""

    id: msgspec.Raw = msgspec.Raw(b"null")
    finish_reason: _Finish | None = None
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    cached_tokens: _Count | None = None


class _Event(msgspec.Struct):
    """The fields of one event of the stream that the router reads."""

    meta_info: _Meta
    text: str | None = None
    output_ids: list[_Count] | None = None
    index: int = 0


_EVENT = msgspec.json.Decoder(_Event)


class _WorkerOutput:
    """The part of the answer that one worker has written so far. Lifetime: the worker's part of the
    stream.
    """

    def __init__(self, first: _WorkerOutput | None = None) -> None:
        """Start without output. `first` is the output of the stream's first worker; this worker
        must write events in the same form.
        """
        self.ids = array("i")
        self.text = ""
        # Whether each event has all of it; None: not known yet.
        self.whole_ids: bool | None = None if first is None else first.whole_ids
        self.whole_text: bool | None = None if first is None else first.whole_text
        self._latest = ""  # event's text
        self._growths = 0

    def new_output(self, event: _Event) -> tuple[list[int], str] | None:
        """Return the token ids and the text that an event of a stream adds to the answer.

        Return None if the event does not continue the earlier events in the same format.
        """
        ids, count = event.output_ids or [], event.meta_info.completion_tokens
        have = len(self.ids)
        whole = count == len(ids)
        if not whole and count != have + len(ids):
            return None
        if have:
            if self.whole_ids is None:
                self.whole_ids = whole
                self.whole_text = whole or None
            if whole != self.whole_ids or (whole and array("i", ids[:have]) != self.ids):
                return None
        new = ids[have:] if whole else ids
        grown = self._grown(event.text or "")
        if grown is None:
            return None
        self.ids.extend(new)
        return new, grown

    def _grown(self, text: str) -> str | None:
        if self.whole_text is None:
            return self._guessed(text)
        if not self.whole_text:
            self.text += text
            return text
        before = self.text
        if not text.startswith(before):
            return None
        self.text = text
        return text[len(before) :]

    def _guessed(self, text: str) -> str:
        """Return the text that an event adds, as long as it is not known whether events contain the
        whole text or only new text.
        """
        latest, self._latest = self._latest, text
        if not text.startswith(latest):
            self.whole_text = False
        elif len(text) > len(latest):
            self._growths += 1
            if self._growths >= _GROWTHS:
                self.whole_text, self.text = True, text
                return text[len(latest) :]
        if self.whole_ids is None:  # the first event
            self.text = text
        else:
            self.text += text
        return text


class GenerateJournal(Journal):
    """Keeps the token ids of a stream of SGLang's `/generate`, as `Journal` does for OpenAI's API.
    Lifetime: request.
    """

    def __init__(self, plan: Plan, room: AnyRoom) -> None:
        super().__init__(plan, room)
        self._output = _WorkerOutput()  # by the present worker
        self._first: _WorkerOutput | None = None  # by the first one, once it is lost
        self._before = array("i")  # said by workers that are lost
        self._before_text = ""
        self._id = msgspec.Raw(b"null")

    def seam(self) -> None:
        output, begun = self._output, bool(self.answer_ids)
        super().seam()
        if begun and self._first is None:
            self._first = output
            if output.whole_text is None:
                self._mark_unmovable("mode")
        self._before, self._before_text = self.answer_ids[:], self._before_text + output.text
        self._output = _WorkerOutput(self._first)

    def _take(self, event: bytes) -> bytes:
        if event[:1] in SAYS_NOTHING:
            return event
        data = event[5:].strip() if event[:5] == b"data:" else b""
        if data == b"[DONE]":
            self.complete = True
            return self._with_held(event)
        chunk = read_chunk(data)
        if chunk is not None and bytes(chunk.error) != b"null":
            return self._with_held(event) if self._is_answer(chunk) else b""
        try:
            read = _EVENT.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._mark_unmovable("unreadable")
            return self._with_held(event)
        return self._take_event(event, data, read)

    def _take_event(self, event: bytes, data: bytes, read: _Event) -> bytes:
        finish = read.meta_info.finish_reason
        if finish is not None and finish.gives_up and not self.unfit:
            self.failure = WorkerError("early_close", "the worker gave the answer up")
            return b""
        if read.index:
            self._mark_unmovable("several_choices")
        ends, new, grown = finish is not None, list[int](), ""
        if not self.unfit or self._first is not None:
            new, grown = self._follow(read, ends)
            if self.failure is not None:
                return b""
        self.finished |= ends
        if self._first is not None:
            event = self._rewritten(self._first, data, read, new, grown)
        else:
            self._id = read.meta_info.id
        if grown or ends or read.text is None or not self._withheld:
            return self._with_held(event)
        self._held.append(event)
        return b""

    def _follow(self, read: _Event, ends: bool) -> tuple[list[int], str]:
        """Keep the ids and the text of an event, and return those that it adds to the answer."""
        if not self.prompt and not self.unfit and self._plan.prompt is not None:
            self.prompt_tokens = len(self._plan.prompt)
            try:
                self.prompt.extend(self._plan.prompt)
            except OverflowError:  # ids beyond int32 represent images
                self._mark_unmovable("media")
            if read.meta_info.prompt_tokens != self.prompt_tokens:
                self._mark_unmovable("prompt_count")
        found = self._output.new_output(read)
        if found is None:
            if self._first is None:
                self._mark_unmovable("unclear")
            else:  # one of another version, or with other options: the next one may be as the first
                self.failure = WorkerError("busy", "the worker writes streams in another way")
            return [], ""
        new, grown = found
        if self.unfit:
            return found
        self._withheld.extend(new)
        if grown or ends or read.text is None:
            self.answer_ids.extend(self._withheld)
            del self._withheld[:]
        elif len(self._withheld) > WITHHELD_TOKENS:
            self._mark_unmovable("withheld")
        self._keep()
        return found

    def _rewritten(
        self, first: _WorkerOutput, data: bytes, read: _Event, new: list[int], grown: str
    ) -> bytes:
        """Return an event of a later worker as the stream's first worker would have written it."""
        output, before = self._output, self._before
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        meta: dict[str, Any] = msgspec.json.decode(fields["meta_info"], type=dict[str, msgspec.Raw])
        if read.text is not None:
            fields["text"] = self._before_text + output.text if first.whole_text else grown
        fields["output_ids"] = [*before, *output.ids] if first.whole_ids else new
        meta["id"], meta["prompt_tokens"] = self._id, self.prompt_tokens
        meta["completion_tokens"] = len(before) + len(output.ids)
        if read.meta_info.cached_tokens is not None:
            meta["cached_tokens"] = min(read.meta_info.cached_tokens, self.prompt_tokens)
        return b"data: " + msgspec.json.encode(fields | {"meta_info": meta}) + b"\n\n"


def journal_of(plan: Plan, room: AnyRoom) -> Journal:
    """Return a new journal for a stream with this plan: that of `/generate` if the plan has the
    prompt's ids, otherwise OpenAI's.
    """
    return Journal(plan, room) if plan.prompt is None else GenerateJournal(plan, room)
