"""Defines the carrier of a request: the transport to workers and back to the client."""

from __future__ import annotations

from collections.abc import Callable

from policies.facts import Arrival
from router.body.paths import OTHER, PATHS, Path
from router.fleet.member import Member
from router.http.messages import Request
from router.http.reply import Header, Sends
from router.keys.key_file import KeyTerms
from router.record.request_record import Attempt
from router.request.dialect import Target
from router.request.prompts import Prompt
from router.upstream.client_reply import ClientReply, Reply


class Carrier:
    """Carries one request to workers, and the answer to the client, over HTTP.

    Other transports, such as gRPC, derive carriers of their own. Lifetime: request.
    """

    __slots__ = ("http",)

    moves = True  # the router writes the answer, so another worker can continue a begun stream

    def __init__(self, http: Request) -> None:
        self.http = http

    def path(self, target: Target | None) -> Path:
        """Return the request's entry in the path table, which says how to read the request and
        answer.

        `target`: the model and call of a request in a protocol with its own paths, such as KServe
        v2.
        """
        return PATHS.get(self.http.path, OTHER) if target is None else target.path

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        """Return the arrival, which describes the request to the decision core.

        A transport may add its own constraints to the given arrival. Raises ClientError for a
        request that the transport does not allow.
        """
        return arrival

    def placed(self, worker_id: int) -> None:
        """Record the worker that the decision core chose."""

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        """Return the object that sends requests to the worker of the attempt.

        `on_answer`: a function that the transport may call when the answer begins.
        """
        return member.upstream

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> Reply:
        """Return the sink that writes the worker's answer to the client.

        `headers`: headers that the router adds. `buffer_bytes`: the number of unsent bytes at which
        the router pauses reading from the worker.
        """
        return ClientReply(self.http, buffer_bytes, headers)

    def rest(self, arrival: Arrival) -> Arrival | None:
        """Return the arrival for the next attempt, or None if the failed attempt did not
        change it.
        """
        return None

    def ended(self) -> None:
        """Clean up after the end of the request."""
