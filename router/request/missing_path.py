"""Holds back a worker's answer "no such path", because another worker may have the path."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from router.body.paths import OwnAnswers
from router.engines.triton import is_triton_queue_full
from router.http.bodies import Body, follow
from router.http.errors import WorkerError
from router.http.reply import (
    HeldReply,
    Outcome,
    PassingSink,
    PingedSink,
    RelayLimits,
    ReplyHead,
    ReplySink,
)
from router.request.refusals import denies_model, model_missing, queue_full

_STATUSES = frozenset({404, 405, 501})
_READ_BYTES = 16_384  # a longer answer cannot be a "not found"
_FRAMING = RelayLimits()
# Servers' texts for a path that they have not got: Starlette, which vLLM, SGLang, TensorRT-LLM and
# Triton's frontend run on, for 404 and 405; our own engine by the beginning of its message.
_DETAILS = frozenset({"Not Found", "Method Not Allowed"})
_ENGINE_TEXT = "no such path: "
_LLAMA_CPP_TEXT = "File Not Found"


class _ErrorText(msgspec.Struct):
    message: str = ""


class _NotFound(msgspec.Struct):
    detail: msgspec.Raw = msgspec.Raw(b"null")
    error: _ErrorText | str | None = None


_NOT_FOUND = msgspec.json.Decoder(_NotFound)


class MissingPathFilter(PassingSink):
    """Holds back a worker's answer that says "no such path", "queue full" or "no such model".
    Lifetime: one dispatch of the request.

    The filter is a `ReplySink` in front of the client's own sink, and passes all other answers on.
    """

    def __init__(
        self,
        reply: ReplySink,
        answers: OwnAnswers | None = None,
        escaped: bool = False,
        model: str = "",
    ) -> None:
        """Put the filter in front of `reply`, the client's own sink.

        `answers` is `Path.answers` of the request's path; if it is given, status 400 may mean a
        full queue. `escaped` True means that the request's path has percent-escapes: some servers
        do not decode them, so that their answer "not found" does not prove that the path is
        missing. `model` is the model that the request names.
        """
        self._client = reply
        self._model = model
        self._escaped = escaped
        self._answers = answers
        self._events: Body | None = None  # framing of an event stream, as far as it has arrived
        self._events_end = b"\n\n"
        self._kept = _STATUSES if answers is None else _STATUSES | {400}
        self._head: ReplyHead | None = None  # kept back
        self._body: Body
        self._data: list[bytes] = []
        self._payload: list[bytes] = []
        self._read_bytes = 0
        self._absent = False
        self._broken = False  # it ended before it was understood
        self._full: HeldReply | None = None  # the worker's words for a full queue
        self._denial: HeldReply | None = None  # the worker's words for a missing model

    @property
    def _reply(self) -> ReplySink:
        return self._client

    def ping(self) -> None:
        """Write a comment to the client, if the reply can contain comments and no answer is held
        back.
        """
        if self._head is None and isinstance(self._reply, PingedSink):
            self._reply.ping()

    def head(self, head: ReplyHead) -> None:
        if head.status in self._kept:
            self._head = head
            self._body = follow(head, _FRAMING)
            return
        if self._answers is not None and head.event_stream and not self.dechunk:
            self._events = follow(head, _FRAMING)
        self._reply.head(head)

    def data(self, data: bytes) -> None:
        if self._head is None:
            if self._events is not None:
                self._events_end = (self._events_end + self._events.feed(data))[-2:]
            self._reply.data(data)
            return
        self._data.append(data)
        self._payload.append(data if self.dechunk else self._body.feed(data))
        self._read_bytes += len(data)
        if self._read_bytes > _READ_BYTES:
            head, self._head = self._head, None
            self._reply.head(head)
            self._reply.data(b"".join(self._data))

    def finish(self) -> None:
        if self._head is None:
            self._reply.finish()
            return
        body = b"".join(self._payload)
        held = HeldReply(self._head, body)
        if self._head.status in _STATUSES and not self._escaped:
            self._absent = is_missing_path(self._head.status, body)
        if is_triton_queue_full(self._head.status, body):
            self._full = held
        elif denies_model(self._head.status, body, self._model):  # by gRPC
            self._denial = held
        elif not self._absent:
            held.deliver(self._reply)

    def abort(self, late: bool = False) -> None:
        """End the answer as broken. A stream of events gets a last event that says so, if its
        protocol has such an event and the events before it are complete.
        """
        if self._head is not None:
            self._broken = True
        elif self._answers is None or not self._whole_events:
            self._reply.abort(late)
        else:
            self._reply.data(self._answers.last_event(late))
            self._reply.finish()

    @property
    def _whole_events(self) -> bool:
        """Return whether the client has received only complete events in complete chunks so far."""
        events = self._events
        return events is not None and events.between_chunks and self._events_end == b"\n\n"

    def outcome_for_client(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the dispatch, in which an answer that was held back is an error."""
        if self._absent:
            error = WorkerError("absent", "the worker has not got this path")
            return replace(outcome, error=error, bytes_to_client=0)
        if self._denial is not None:
            return replace(outcome, error=model_missing(), bytes_to_client=0, held=self._denial)
        if self._full is not None:
            return replace(outcome, error=queue_full(), bytes_to_client=0, held=self._full)
        return replace(outcome, bytes_to_client=0) if self._broken else outcome


def is_missing_path(status: int, body: bytes) -> bool:
    """Return True if an error answer with status 404, 405 or 501 says that the path does not exist.

    Return False if it says that the model or another named object does not exist.
    """
    if not body or (status != 404 and not body.startswith(b'{"error":"')):
        return True
    try:
        denial = _NOT_FOUND.decode(body)
        detail = msgspec.json.decode(denial.detail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # an HTML page of a server that does not know the API
    if isinstance(denial.error, str):  # Triton's
        return denial.error == "Not Found"
    if isinstance(denial.error, _ErrorText):
        return denial.error.message.startswith((_ENGINE_TEXT, _LLAMA_CPP_TEXT))
    return isinstance(detail, str) and detail in _DETAILS
