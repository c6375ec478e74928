"""Defines the transport of a request to workers, and of the answer to the client."""

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

    Subclasses do the same over other transports, such as gRPC.
    Lifetime: request.
    """

    __slots__ = ("http",)

    edits = True  # the router writes both bodies, so a model may have another name in them
    moves = True  # the router writes the answer, so another worker can continue a begun stream

    def __init__(self, http: Request) -> None:
        self.http = http

    def path(self, target: Target | None) -> Path:
        """Return the path table's entry for this request, which says how to read it and its answer.

        target: the model and call of a request in a protocol with paths of its own, such as KServe
        v2.
        """
        return PATHS.get(self.http.path, OTHER) if target is None else target.path

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        """Return the description of the request that the decision core gets.

        A subclass may add constraints of its transport to `arrival`. Raises ClientError if the
        transport or the key does not allow the request.
        """
        return arrival

    def placed(self, worker_id: int) -> None:
        """Record that the decision core chose the worker `worker_id` for the request."""

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        """Return the object that sends the attempt's request to the worker `member`.

        on_answer: a function that the object may call when the answer begins.
        """
        return member.upstream

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> Reply:
        """Return the object that writes the worker's answer to the client.

        buffer_bytes: if more bytes than this are unsent, the router pauses reading from the worker.
        headers: headers that the router adds to the answer.
        """
        return ClientReply(self.http, buffer_bytes, headers)

    def rest(self, arrival: Arrival) -> Arrival | None:
        """Return the description of the request for the next attempt, after a failed attempt.

        None means that the failed attempt did not change the request.
        """
        return None

    def ended(self) -> None:
        """Release what the carrier holds, after the end of the request."""
