"""Defines the interface to the extra that moves a stream which has begun to another worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from policies.facts import Arrival
from router.body.scan import Tokens
from router.http.reply import Outcome, ReplySink, UpstreamRequest
from router.upstream.client_reply import ClientReply


class MovingStream(ReplySink, Protocol):
    """One client's stream, which several workers may continue one after another.
    Lifetime: request.
    """

    begun: bool  # the client has seen a part
    reply: ClientReply  # the client's; the first worker's once it has begun

    def placed(self, uncached_tokens: int) -> None:
        """Note that a worker was chosen for the stream, which must compute `uncached_tokens` tokens
        of its prompt.
        """

    def take(self, kind: str | None, reply: ClientReply) -> bool:
        """Prepare for a worker of this kind of engine. Return False if it cannot continue the
        stream.

        `reply` is the client's reply, which is used unless a reply has begun.
        """

    def request(self, request: UpstreamRequest) -> UpstreamRequest:
        """Return the request for the chosen worker: `request` itself, or one for the rest of the
        answer.
        """

    def ended(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a dispatch for the client. It is `resumable` if another worker may
        continue; if none can, the client's connection is closed.
        """

    def rest(self) -> Arrival | None:
        """Return a description of the rest of the request for the core; None while no part of the
        answer was sent.
        """

    def give_up(self, result: str) -> ClientReply:
        """Break off a stream that has begun and that no worker can continue, so that the client
        notices it.
        """


class Movers(Protocol):
    """Makes the streams that may move to another worker. Lifetime: process."""

    def stream(
        self, body: bytes, path: str, arrival: Arrival, encoded: Sequence[Tokens] = ()
    ) -> AbstractContextManager[MovingStream | None]:
        """Return a context manager with the stream of a request, or with None if it must stay with
        the worker that begins it.

        `encoded` has the token ids that the router made of the request's prompts.
        """
