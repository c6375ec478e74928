"""The interface to an extra that moves a begun stream to another worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from policies.facts import Arrival
from router.body.scan import Tokens
from router.http.reply import Outcome, ReplySink, UpstreamRequest
from router.upstream.client_reply import ClientReply


class MovingStream(ReplySink, Protocol):
    """One client's stream, for one worker after the other. Lifetime: request."""

    begun: bool  # the client has seen a part
    reply: ClientReply  # the client's; the first worker's once it has begun

    def placed(self, uncached_tokens: int) -> None:
        """A worker was chosen, which has to compute so many tokens."""

    def take(self, kind: str | None, reply: ClientReply) -> bool:
        """A worker of this kind is next; False where such a one cannot go on with the stream.

        `reply` is the client's, unless one has begun.
        """

    def request(self, request: UpstreamRequest) -> UpstreamRequest:
        """The request for the worker just taken: `request` itself, or one for the answer's rest."""

    def ended(self, outcome: Outcome) -> Outcome:
        """The outcome of a dispatch for the client: `resumable` if another worker may go on; if
        none can, this ends the client's connection.
        """

    def rest(self) -> Arrival | None:
        """The request as it stands now; None while nothing has been said of its answer."""

    def give_up(self, result: str) -> ClientReply:
        """Break off a begun stream that no worker goes on with, so that the client sees it."""


class Movers(Protocol):
    """Keeps the streams that may move. Lifetime: process."""

    def stream(
        self, body: bytes, path: str, arrival: Arrival, encoded: Sequence[Tokens] = ()
    ) -> AbstractContextManager[MovingStream | None]:
        """The stream of a request; None where it stays with the worker that begins it.

        `encoded`: the ids that were made here of its prompts.
        """
