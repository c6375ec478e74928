"""Handles the messages of one request that a data plane such as Envoy sends itself, without I/O.

Each message gets the reply that Envoy expects for the mode in which bodies of its direction are
sent; the reply to the request waits until the request is placed at a worker or refused. Whatever
messages arrive, in any order, the exchange either stays valid for Envoy, or ends with an error
answer of the router that has the reason. It never ends without an answer, which a client would see
as an empty answer that looks complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from router.http.errors import error_body, error_type
from router.http.reply import EVENT_STREAM, Framing, Header, ReplyHead
from router.picker import messages
from router.picker.messages import PLAIN, SERVED, SUBSET, TEST_SERVED, Mode

PIECE_BYTES = 62_000  # of a changed body: each data plane takes as much in a message
_MODES = frozenset(Mode)
_AT_HEADERS = (Mode.NONE, Mode.STREAMED)  # of a request: placed by its headers alone
_PIECES = (Mode.STREAMED, Mode.FULL_DUPLEX_STREAMED)
_WHOLE = (Mode.BUFFERED, Mode.BUFFERED_PARTIAL)
_OF_DECISION = b"x-warmroute-"  # headers about the decision: wrong if it was not followed
_LENGTH_DIGITS = 19  # of a body's length: fewer are a number of 63 bits
_NUMBER = re.compile(r"[0-9]{1,4}(\.0)?")
# Envoy's word for an answer that came from a worker (`response.code_details`).
_OF_WORKER = "via_upstream"


@dataclass(frozen=True, slots=True)
class Destination:
    """The worker to which the data plane shall send a request, and the changes to the request.
    Lifetime: request.
    """

    endpoints: str  # HOST:PORT of the worker, and after commas those to try after it
    sets: tuple[Header, ...] = ()
    removes: tuple[str, ...] = ()
    body: bytes | None = None  # None: as it came


@dataclass(frozen=True, slots=True)
class DataPlaneReply:
    """The head of a request's answer, as the data plane reports it. Lifetime: request."""

    head: ReplyHead
    served: str | None = None  # HOST:PORT that answered; empty: none did; None: unknown
    details: str | None = None  # why there is such an answer, where the data plane says so
    attempts: int | None = None  # of the data plane; None: it does not say

    @property
    def by_worker(self) -> bool:
        """True if a worker gave the answer, or if that is unknown; False if the data plane made the
        answer itself.
        """
        if self.details is not None:
            return self.details == _OF_WORKER
        return self.served is None or bool(self.served)


class PickerExchange:
    """The state of one request of a data plane. `feed` takes a message and returns the messages to
    send in reply. Lifetime: request.

    Once `needs_decision` is True, `place` or `refuse` must be called. After that the answer
    arrives: its head is `reply`, `taken` returns pieces of its body, and `over` is True at its end.
    """

    def __init__(self, body_bytes: int) -> None:
        """Wait for the first message of a request. `body_bytes` is the largest allowed body of a
        request.
        """
        self.headers: list[Header] = []  # of the request, names that begin with a colon included
        self.subset: list[str] | None = None  # endpoints that it may go to; None: any
        self.client = ""  # HOST:PORT, where the data plane says so
        self.response_sets: tuple[Header, ...] = ()  # added to the worker's headers
        self.tells_served = False  # the answer's head names the worker, for conformance tests
        self.needs_decision = False
        self.blind = False  # it is to be placed without its body
        self.idle = False  # the data plane only reports, and waits for no answer
        self.placed = False
        self.refused = ""  # with which code
        self.reply: DataPlaneReply | None = None
        self.over = False
        self._body_bytes = body_bytes
        self._pieces: list[bytes] = []  # of the request's body
        self._has_body = False
        self._named = ""  # the endpoint that was to have it
        self._came_bytes = 0
        self._begun = False
        self._request_over = False  # all of it came
        self._owes_trailers = False
        self._owes_bodies = 0  # pieces that came before it was placed
        self._request_mode = self._response_mode = Mode.FULL_DUPLEX_STREAMED
        self._taken: list[bytes] = []  # of the answer's body
        self._answer_bytes = 0  # of its body that came
        self._length: int | None = None  # of its body, by its head

    @property
    def body(self) -> bytes:
        """The request's body, as far as the data plane shows it to the router."""
        if self.blind:
            return b""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    @property
    def shows_pieces(self) -> bool:
        """True if the data plane shows the answer's body to the router piece by piece."""
        return self._response_mode in _PIECES

    @property
    def shows_body(self) -> bool:
        """True if the data plane shows the answer's body to the router."""
        return self._response_mode is not Mode.NONE

    def taken(self) -> list[bytes]:
        """Return the pieces of the answer's body that arrived since the last call."""
        taken, self._taken = self._taken, []
        return taken

    # --- what comes ---------------------------------------------------------------------------

    def feed(self, data: bytes) -> list[bytes]:
        """Return the replies to one message of the data plane."""
        if self.refused or self.idle:
            return []
        message = messages.read(data)
        if message is None:
            return self._fault("bad_message", "a message to the endpoint picker cannot be read")
        arm = messages.arm_of(message)
        if arm is None:  # a field of a later version
            return []
        if not self._begun:
            if arm != "request_headers":
                why = f"{arm} came without request_headers, which are needed"
                return self._fault("misplaced_message", f"{why}: request_header_mode: SEND")
            return self._begin(message)
        handle = {
            "request_body": self._request_body,
            "request_trailers": self._request_trailers,
            "response_headers": self._response_headers,
            "response_body": self._response_body,
            "response_trailers": self._response_trailers,
        }.get(arm)
        return self._misplaced(arm) if handle is None else handle(message)

    def _begin(self, message: Any) -> list[bytes]:
        self._begun = True
        if message.observability_mode:
            self.idle = True
            return []
        if message.HasField("protocol_config"):
            config = message.protocol_config
            modes = config.request_body_mode, config.response_body_mode
            if not _MODES.issuperset(modes):
                known = ", ".join(f"{mode.value} {mode.name}" for mode in Mode)
                why = f"bodies come in modes {modes[0]} and {modes[1]}; known are {known}"
                return self._fault("unknown_body_mode", why)
            self._request_mode, self._response_mode = Mode(modes[0]), Mode(modes[1])
        came = message.request_headers
        self.headers = messages.headers_of(came.headers)
        self.subset = messages.metadata(message, messages.SUBSET_SPACE, SUBSET)
        self.client = messages.attributes_of(message).get("source.address", "")
        if came.end_of_stream:
            self._request_over = self.needs_decision = True
            return []
        if self._request_mode in _AT_HEADERS:
            self.needs_decision = self.blind = True
            return []
        return [PLAIN["request_headers"]] if self._request_mode in _WHOLE else []

    def _request_body(self, message: Any) -> list[bytes]:
        came, mode = message.request_body, self._request_mode
        if mode is Mode.NONE:
            return self._misplaced("request_body")
        if self._request_over:
            # Envoy has been seen to send the last piece twice (envoyproxy/envoy#46237).
            return [] if mode is Mode.FULL_DUPLEX_STREAMED else self._misplaced("request_body")
        self._request_over = came.end_of_stream
        if mode is Mode.STREAMED:
            if self.placed:
                return [PLAIN["request_body"]]
            self._owes_bodies += 1
            return []
        if self.reply is not None:  # the data plane has answered by itself
            return []
        if mode in _WHOLE:
            if self.needs_decision or self.placed:
                return self._misplaced("request_body")
            self.blind = mode is Mode.BUFFERED_PARTIAL and not came.end_of_stream
        return self._keep(came.body, mode)

    def _keep(self, body: bytes, mode: Mode) -> list[bytes]:
        self._came_bytes += len(body)
        if self._came_bytes > self._body_bytes:
            why = f"the body is too large: at most {self._body_bytes} bytes (limits.body_bytes)"
            return self._fault("body_too_large", why, 413)
        self._has_body = True
        if body:
            self._pieces.append(body)
        self.needs_decision = self._request_over or mode in _WHOLE
        return []

    def _request_trailers(self, message: Any) -> list[bytes]:
        if self.placed or self.reply is not None or self.blind:
            self._request_over = True
            if self.placed or self.reply is not None:
                return [PLAIN["request_trailers"]]
        elif self._owes_trailers or self._request_over:
            return self._misplaced("request_trailers")
        self._owes_trailers = self._request_over = self.needs_decision = True
        return []

    def _response_headers(self, message: Any) -> list[bytes]:
        if self.reply is not None:
            return self._misplaced("response_headers")
        came = message.response_headers
        headers = messages.headers_of(came.headers)
        status = next((value for name, value in headers if name == b":status"), b"")
        if not (len(status) == 3 and status.isdigit()):
            return self._fault("bad_message", "an answer without a status")
        lengths = (value for name, value in headers if name == b"content-length")
        length = next(lengths, b"")
        self._length = int(length) if length.isdigit() and len(length) < _LENGTH_DIGITS else None
        kinds = (value for name, value in headers if name == b"content-type")
        streams = any(kind.strip().lower().startswith(EVENT_STREAM) for kind in kinds)
        head = ReplyHead(
            int(status),
            b"",
            tuple(header for header in headers if not header[0].startswith(b":")),
            Framing.CLOSE,
            event_stream=streams,
        )
        served = messages.metadata(message, messages.CHOSEN_SPACE, SERVED)
        told = messages.attributes_of(message)
        attempts = told.get("upstream.request_attempt_count", "")
        self.reply = DataPlaneReply(
            head,
            served[0] if served else told.get("upstream.address"),
            told.get("response.code_details"),
            int(float(attempts)) if _NUMBER.fullmatch(attempts) else None,
        )
        self.over = came.end_of_stream
        self.needs_decision = False  # a request that was not placed no longer waits for a place
        sets = self.response_sets
        if not self.reply.by_worker or self.reply.served not in (None, self._named):
            sets = tuple(one for one in sets if not one[0].startswith(_OF_DECISION))
        if self.tells_served and self.reply.served:
            sets = (*sets, (TEST_SERVED, self.reply.served.encode()))
        if not sets:
            return [PLAIN["response_headers"]]
        change = messages.mutation(sets)
        return [messages.headers_answer("response_headers", change)]

    def _response_body(self, message: Any) -> list[bytes]:
        if self.reply is None or self._response_mode is Mode.NONE:
            return self._misplaced("response_body")
        came, duplex = message.response_body, self._response_mode is Mode.FULL_DUPLEX_STREAMED
        if self.over:
            return [] if duplex else self._misplaced("response_body")
        self.over = came.end_of_stream
        if came.body:
            self._taken.append(came.body)
            self._answer_bytes += len(came.body)
        if duplex:
            return [messages.piece("response_body", came.body, came.end_of_stream)]
        return [PLAIN["response_body"]]

    def _response_trailers(self, message: Any) -> list[bytes]:
        if self.reply is None or self.over:
            return self._misplaced("response_trailers")
        self.over = True
        return [PLAIN["response_trailers"]]

    def closed(self) -> None:
        """Note that no more messages will arrive.

        If the answer's body is not shown, or was shown as a whole, this is the end of the answer:
        the data plane may end the exchange before it sends the empty last piece.
        """
        if self.reply is None:
            return
        self.over |= not self.shows_body or self._answer_bytes == self._length

    # --- what is decided ----------------------------------------------------------------------

    def place(self, at: Destination) -> list[bytes]:
        """Return the messages that make the data plane send the request to this destination."""
        assert self.needs_decision, "it is asked for, once"
        self.needs_decision, self.placed = False, True
        self._named = at.endpoints.partition(",")[0]
        sets = ((messages.DESTINATION.encode(), at.endpoints.encode()), *at.sets)
        mode, trailers = self._request_mode, self._owes_trailers
        if mode in _WHOLE and self._has_body:
            body = None if self.blind else at.body
            if body is not None:
                sets = (*sets, (b"content-length", b"%d" % len(body)))
            change = messages.mutation(sets, at.removes)
            said = [messages.whole_body(change, at.endpoints, body)]
        else:
            change = messages.mutation(sets, at.removes)
            said = [messages.headers_answer("request_headers", change, at.endpoints)]
            if mode is Mode.FULL_DUPLEX_STREAMED and self._has_body:
                said += self._pieces_of(at.body, not trailers)
        said += [PLAIN["request_body"]] * self._owes_bodies
        if trailers:
            said.append(PLAIN["request_trailers"])
        self._pieces, self._owes_bodies = [], 0
        return said

    def _pieces_of(self, changed: bytes | None, ends: bool) -> Iterable[bytes]:
        """Return the request's body in pieces, as received or replaced by `changed`; the last piece
        ends the body.
        """
        pieces = self._pieces
        if changed is not None:
            starts = range(0, len(changed), PIECE_BYTES)
            pieces = [changed[at : at + PIECE_BYTES] for at in starts]
        pieces = pieces or [b""]
        last = len(pieces) - 1
        return [
            messages.piece("request_body", one, ends and number == last)
            for number, one in enumerate(pieces)
        ]

    def refuse(self, status: int, headers: Iterable[Header], body: bytes, code: str) -> list[bytes]:
        """Return the messages that make the data plane answer with this error; none if it is too
        late, or if the data plane waits for no reply.
        """
        if self.refused or self.idle or self.over:
            return []
        self.refused, self.needs_decision = code, False
        return [messages.immediate(status, headers, body, f"warmroute_{code}")]

    def _misplaced(self, arm: str) -> list[bytes]:
        return self._fault("misplaced_message", f"{arm} came when it could not")

    def _fault(self, code: str, why: str, status: int = 500) -> list[bytes]:
        body = error_body(why, error_type(status), code=code)
        headers = ((b"content-type", b"application/json"),)
        return self.refuse(status, headers, body, code) or self._given_up(code)

    def _given_up(self, code: str) -> list[bytes]:
        self.refused = code
        return []
