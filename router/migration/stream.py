"""Connects the relay and the client's reply for a stream whose answer may come from several workers
in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from kvkernels import RelayEnd, RelayJournalTerms, chain_hashes, chain_seed
from policies.facts import Arrival
from router.body.scan import Tokens
from router.config.extras import Migration
from router.engines.adapter import StreamForm
from router.engines.table import adapter_of
from router.http.errors import WorkerError
from router.http.reply import Framing, Outcome, ReplyHead, UpstreamRequest, Usage
from router.migration.generate import journal_of
from router.migration.journal import AnyRoom, Room, room_of_streams
from router.migration.metrics import MigrationMetrics
from router.migration.plan import (
    MOVABLE,
    Plan,
    plan_of,
    rest_of,
    to_completions,
    tokens_left,
    with_return_token_ids,
)
from router.upstream.client_reply import ClientReply, LendingSink

MIGRATABLE_HEADER = b"x-warmroute-migratable"
_MIGRATABLE_LINE = MIGRATABLE_HEADER + b": 1\r\n"
_REFRAMED = frozenset({b"content-length", b"transfer-encoding", b"trailer"})


class MigrationHost(Protocol):
    """The parts of `router.request.service.Service` that a stream needs in order to continue at
    another worker.
    """

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def identity(self) -> Callable[[str], tuple[str, str | None]]: ...  # of a model: name, adapter
    def card(self, name: str) -> dict[str, Any] | None: ...  # of a model, with its limit


class Stream(LendingSink):
    """A stream that can move to another worker; a `router.request.moving.MovingStream`. Lifetime:
    request; `close` must be called.
    """

    dechunk = True  # events are looked at, so the client's chunks are framed here

    def __init__(
        self,
        plan: Plan,
        arrival: Arrival,
        room: AnyRoom,
        moves: int,
        metrics: MigrationMetrics,
        service: MigrationHost,
    ) -> None:
        """Make the stream of a request that has not been sent yet. `moves` is how often it may move
        to another worker.
        """
        self.begun = False  # the client has seen a part
        self.reply: ClientReply  # the client's; the first worker's once it has begun
        self._plan = plan
        self._arrival = arrival
        self._room = room
        self._moves = moves
        self._metrics = metrics
        self._service = service
        self._form: StreamForm | None = None  # of the present worker, where it is known to give ids
        self._journal = journal_of(plan, room)
        self._head: ReplyHead
        self._passing = False  # the reply is no stream of events: its bytes go on as they are
        self._refused: int | None = None  # status of an answer that does not go on with ours
        self._short = False  # the worker ended its reply before the answer's end
        self._lost: WorkerError | None = None  # why the worker before this one was lost
        self._last_event_s: float | None = None  # when it was last heard, until another one is
        self._left: int | None = None  # tokens
        self._events = 0  # of the workers before
        self._taken = False  # a worker was, so there is a reply
        self._over = False  # the client's reply was ended or broken off

    def placed(self, uncached_tokens: int) -> None:
        if self._lost is not None:
            self._metrics.recomputed_tokens += uncached_tokens

    def take(self, kind: str | None, reply: ClientReply) -> bool:
        form = adapter_of(kind).stream_form
        if self._journal.answer_ids and form is None:
            return False
        self._form = form
        self._refused, self._short, self._taken = None, False, True
        if not self.begun:
            self.reply = reply
            self._journal.close()
            self._journal = journal_of(self._plan, self._room)
        self._journal.begin(form or StreamForm())
        return True

    def request(self, request: UpstreamRequest) -> UpstreamRequest:
        said = len(self._journal.answer_ids)
        if said and self._left is not None:
            ids = [*self._journal.prompt, *self._journal.answer_ids]
            body = rest_of(self._plan, ids, said, self._left)
            return replace(request, target=to_completions(request.target), body=body)
        if self._form is None or (self._plan.chat and not self._form.chat):
            return request
        return replace(request, body=with_return_token_ids(request.body, self._plan))

    def rest(self) -> Arrival | None:
        if not self._journal.answer_ids:
            return None
        ids = np.array([*self._journal.prompt, *self._journal.answer_ids], dtype=np.int32)
        arrival = self._arrival
        seed = chain_seed(*self._service.identity(arrival.model), self._plan.salt)
        return replace(
            arrival,
            now_s=self._service.clock(),
            prompt_tokens=len(ids),
            chains={size: chain_hashes(ids, size, seed) for size in arrival.chains},
            approximate=False,
            max_output_tokens=self._left,
            longest_prompt_tokens=None,
            splits=False,  # its body is made here, for one worker
        )

    def ended(self, outcome: Outcome) -> Outcome:
        error = outcome.error
        if self._refused is not None:
            what = f"the worker answered the rest of a stream with status {self._refused}"
            error = WorkerError("busy", what)
        elif error is None and self._short:
            error = WorkerError("early_close", "the worker ended its stream before the answer")
        if error is None or (outcome.final and not self._short):
            return self._whole(outcome)
        outcome = replace(outcome, error=error, final=False)
        if not self._shown:
            return replace(outcome, bytes_to_client=0)
        if not isinstance(error, WorkerError) or self._passing:
            self._break_off()
            return outcome
        return self._lose(outcome, error)

    def _lose(self, outcome: Outcome, error: WorkerError) -> Outcome:
        """Return the outcome after a worker failed in the middle of the stream: resumable if
        another worker can continue it.
        """
        journal, self._lost = self._journal, error
        if journal.closable:
            self._write(journal.closing())
            self._end()
            self._metrics.ended["closed", error.kind] += 1
            return self._whole(replace(outcome, error=None))
        journal.seam()
        stays = journal.unfit or self._stays()
        if stays:
            self._metrics.unfit[stays] += 1
            self.give_up("unfit")
            return outcome
        self._moves -= 1
        self._events += outcome.events
        if self._last_event_s is None:
            self._last_event_s = outcome.last_byte_s or self._service.clock()
        return replace(outcome, resumable=True)

    def give_up(self, result: str) -> ClientReply:
        self._metrics.ended[result, self._lost.kind if self._lost is not None else ""] += 1
        self._break_off()
        return self.reply

    def _whole(self, outcome: Outcome) -> Outcome:
        """Return the last worker's outcome, with the counts of the whole stream.

        The time of the first byte is left out, because it belongs to an earlier dispatch.
        """
        if not self._events:
            return outcome
        usage = outcome.usage
        if usage is not None and usage.completion_tokens is not None:
            said = usage.completion_tokens + self._journal.said_before
            usage = Usage(self._journal.prompt_tokens, said)
        events = outcome.events + self._events
        return replace(outcome, first_byte_s=None, events=events, usage=usage)

    def close(self) -> None:
        """End the stream and free its ids. If a defect of the router ended it, also close the
        client's connection.
        """
        if self._taken and self._shown and not self._over:
            self._break_off()
        self._journal.close()

    @property
    def _shown(self) -> bool:
        """True if the client has received a part of the answer, even if the thread that sent it has
        not reported its end yet.
        """
        return self.begun or self._passing or self.reply.begun

    @property
    def miscounted(self) -> bool:
        """True if the worker counted other tokens than it sent ids for."""
        return self._journal.miscounted

    def _stays(self) -> str:
        """Return a word for why a stream with known ids cannot move; "" if it can."""
        if not self._moves:
            return "moves"
        said = len(self._journal.answer_ids)
        context_tokens = None
        if self._plan.max_tokens is None:
            context_tokens = (self._service.card(self._arrival.model) or {}).get("max_model_len")
        form, prompt_tokens = self._form or StreamForm(), self._journal.prompt_tokens
        self._left = tokens_left(self._plan, form, prompt_tokens, said, context_tokens)
        return "max_tokens" if said and (self._left is None or self._left < 1) else ""

    # Methods that the relay calls; its thread calls them for the first worker.

    def lend(self) -> tuple[ClientReply, RelayJournalTerms] | str:
        """Lend the client's reply to the relay's thread, as `LendingSink` says, or return a word
        for why not.

        Streams of clients that asked for token ids are not lent, because only Python code knows
        which ids they see.
        """
        if self.begun or self._plan.shows_ids or isinstance(self._room, Room):
            return "moved" if self.begun else "ids"
        hidden = (self._form or StreamForm()).hidden
        return self.reply, RelayJournalTerms(self._room, hidden, _MIGRATABLE_LINE)

    def taken_back(self, end: RelayEnd) -> None:
        """Take the client's reply back from the relay's thread, as `LendingSink` says."""
        journal, written = end.journal, end.written > 0
        self._over = written and not end.fault
        if journal is None:  # no stream of events, or no reply
            self._passing = written
            return
        self.begun = written
        if end.fault:
            self._journal.adopt(journal)
        else:
            self._journal.miscounted = journal.miscounted

    @property
    def movable(self) -> bool:
        """True if another worker can continue the answer after the part that the client has
        received.
        """
        return self.begun and not self._journal.unfit and self._moves > 0

    @property
    def congested(self) -> bool:
        """True if the client reads more slowly than the worker writes."""
        return self.reply.congested

    async def drain(self) -> None:
        """Wait until the client has read the bytes that were written."""
        await self.reply.drain()

    def head(self, head: ReplyHead) -> None:
        """Take the head of a worker's reply. The client receives it only with the first event."""
        self._head = head
        plain = all(name.lower() != b"content-encoding" for name, _ in head.headers)
        streams = head.answers and head.event_stream and plain
        if self.begun:
            self._refused = None if streams else head.status
        elif not streams:
            self._passing = True
            self.reply.head(head)

    def data(self, data: bytes) -> None:
        """Take bytes of a worker's reply. Raises WorkerError if the worker reports that it gave the
        answer up.
        """
        if self._refused is not None:
            return
        if self._passing:
            self.reply.data(self._framed(data))
            return
        self._write(self._journal.feed(data))
        if self._journal.failure is not None:
            raise self._journal.failure

    def finish(self) -> None:
        """Note that a worker's reply ended in good order. If the answer is complete, this ends the
        client's reply, too.
        """
        journal = self._journal
        if self._refused is not None:
            return
        if self._passing:
            self._end()
        elif journal.finished or journal.complete or journal.unfit:
            self._write(journal.flush())
            self._end()
        else:
            self._short = True

    def abort(self, late: bool = False) -> None:
        """Do nothing, although a worker's reply broke off: `ended` decides what follows."""

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if not self.begun:
            self.begun = True
            self.reply.head(self._client_head())
        elif self._last_event_s is not None:
            self._metrics.gap.observe(max(self._service.clock() - self._last_event_s, 0.0))
            self._metrics.ended["moved", self._lost.kind if self._lost is not None else ""] += 1
            self._last_event_s = None
        self.reply.data(self._framed(data))

    def _client_head(self) -> ReplyHead:
        """Return the first worker's head for the client, with a chunked body."""
        headers = tuple(h for h in self._head.headers if h[0].lower() not in _REFRAMED)
        if self._journal.prompt and not self._journal.unfit:
            headers += ((MIGRATABLE_HEADER, b"1"),)
        return replace(self._head, headers=headers, framing=Framing.CHUNKED, length=0)

    def _framed(self, data: bytes) -> bytes:
        if self.reply.dechunk or (self._passing and self._head.framing is not Framing.CHUNKED):
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _break_off(self) -> None:
        self._over = True
        self.reply.abort()

    def _end(self) -> None:
        self._over = True
        chunked = not self._passing or self._head.framing is Framing.CHUNKED
        if chunked and not self.reply.dechunk:
            self.reply.data(b"0\r\n\r\n")
        self.reply.finish()


log = logging.getLogger(__name__)

_MODELS = 1_024
_BODY_BYTES, _BYTES_A_TOKEN = 1 << 20, 8  # of a body, which is more than its prompt


class Migrations:
    """Makes the streams that may move to another worker; see `router.request.moving.Movers`.
    Lifetime: process.
    """

    def __init__(self, service: MigrationHost, metrics: MigrationMetrics, terms: Migration) -> None:
        self.room: AnyRoom = room_of_streams()
        self._service = service
        self._metrics = metrics
        self.terms = terms
        self._distrusted: set[str] = set()  # models, until the end of the process
        metrics.kept_tokens = lambda: self.room.taken

    def renew(self, terms: Migration) -> None:
        """Use these settings from now on."""
        self.terms = terms

    @contextmanager
    def stream(
        self, body: bytes, path: str, arrival: Arrival, encoded: Sequence[Tokens] = ()
    ) -> Iterator[Stream | None]:
        if arrival.needs not in MOVABLE:
            yield None
            return
        terms = self.terms
        if arrival.model in self._distrusted:
            self._metrics.unfit["miscounted"] += 1
            yield None
            return
        # Reading the body here blocks the event loop, and no stream of such a long body is kept.
        if len(body) > max(_BYTES_A_TOKEN * terms.stream_tokens, _BODY_BYTES):
            self._metrics.unfit["room"] += 1
            yield None
            return
        plan = plan_of(body, path, arrival.max_output_tokens, encoded)
        if isinstance(plan, str):
            self._metrics.unfit[plan] += 1
            yield None
            return
        self.room.stream_tokens, self.room.tokens = terms.stream_tokens, terms.tokens
        stream = Stream(plan, arrival, self.room, terms.moves, self._metrics, self._service)
        try:
            yield stream
        finally:
            if stream.miscounted:
                self._disable_model(arrival.model)
            stream.close()

    def _disable_model(self, model: str) -> None:
        """Move no more streams of this model, because its workers do not send all token ids: the
        rest of an answer built from them would be wrong, and nobody would notice.
        """
        if model not in self._distrusted and len(self._distrusted) < _MODELS:
            self._distrusted.add(model)
            log.warning("streams of model %r stay with their workers: ids are missing", model)
