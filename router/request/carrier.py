"""Defines how a request is sent to workers, and how its answer is sent to the client."""

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
    """Sends one request to workers over HTTP, and the answer to the client. Lifetime: request.

    Subclasses do the same over other transports, such as gRPC.
    """

    __slots__ = ("http",)

    edits = True  # the router writes both bodies, so a model may have another name in them
    moves = True  # the router writes the answer, so another worker can continue a begun stream

    def __init__(self, http: Request) -> None:
        self.http = http

    def path(self, target: Target | None) -> Path:
        """Return the row of the path table for this request, which says how to read it and its
        answer.

        `target` is the model and call of a request in a protocol with paths of its own, such as
        KServe v2, or None.
        """
        return PATHS.get(self.http.path, OTHER) if target is None else target.path

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        """Return the description of the request that the decision core gets.

        A subclass may add constraints of its transport to `arrival`. Raises ClientError if the
        transport or the key does not allow the request.
        """
        return arrival

    def placed(self, worker_id: int) -> None:
        """Note that the decision core chose the worker `worker_id` for the request."""

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        """Return the object that sends the attempt's request to the worker `member`. It may call
        `on_answer` when the answer begins.
        """
        return member.upstream

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> Reply:
        """Return the object that writes the worker's answer to the client.

        If more than `buffer_bytes` are unsent, the router pauses reading from the worker. `headers`
        are those that the router adds to the answer.
        """
        return ClientReply(self.http, buffer_bytes, headers)

    def rest(self, arrival: Arrival) -> Arrival | None:
        """Return the description of the request for the next attempt, after a failed attempt.

        None means that the failed attempt did not change the request.
        """
        return None

    def ended(self) -> None:
        """Release what the carrier holds, because the request has ended."""
