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
    """One client's stream, which one worker after another may continue. Lifetime: request."""

    begun: bool  # the client has seen a part
    reply: ClientReply  # the client's; the first worker's once it has begun

    def placed(self, uncached_tokens: int) -> None:
        """Note that a worker was chosen, which has to compute so many tokens."""

    def take(self, kind: str | None, reply: ClientReply) -> bool:
        """Prepare for a worker of this kind. Return False if it cannot continue the stream.

        `reply` is the client's reply, unless one has begun.
        """

    def request(self, request: UpstreamRequest) -> UpstreamRequest:
        """Return the request for that worker: `request` itself, or one for the rest of the
        answer.
        """

    def ended(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a dispatch for the client: `resumable` if another worker may
        continue; if none can, end the client's connection.
        """

    def rest(self) -> Arrival | None:
        """Return the request in its present state; None while no part of its answer was sent."""

    def give_up(self, result: str) -> ClientReply:
        """Break off a begun stream that no worker can continue, so that the client sees it."""


class Movers(Protocol):
    """Keeps the streams that may move. Lifetime: process."""

    def stream(
        self, body: bytes, path: str, arrival: Arrival, encoded: Sequence[Tokens] = ()
    ) -> AbstractContextManager[MovingStream | None]:
        """Return the stream of a request; None if it must stay with the worker that begins it.

        `encoded` has the token ids that the router made of its prompts.
        """
