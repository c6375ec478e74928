"""The carrier of a request: the transport to workers, and back to the client."""

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
    """Carries one request over HTTP. Extras subclass it for other transports. Lifetime: request."""

    __slots__ = ("http",)

    moves = True  # the router writes the answer, so another worker can continue a begun stream

    def __init__(self, http: Request) -> None:
        self.http = http

    def path(self, target: Target | None) -> Path:
        """Return the row of the table of paths.

        `target`: the inference that a dialect's path names.
        """
        return PATHS.get(self.http.path, OTHER) if target is None else target.path

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        """Return the arrival for the core, with the constraints that this transport adds. Raises
        ClientError for a request that the transport does not allow.
        """
        return arrival

    def placed(self, worker_id: int) -> None:
        """Note the worker that the core has chosen."""

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        """Return the connections to the worker of an attempt.

        `on_answer` may be called when the answer begins.
        """
        return member.upstream

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> Reply:
        """Return the client's side of a worker's answer, with `headers` of the router's own.

        `buffer_bytes`: bytes that the client may leave unread before the worker is paused.
        """
        return ClientReply(self.http, buffer_bytes, headers)

    def rest(self, arrival: Arrival) -> Arrival | None:
        """Return the arrival for the next attempt, or None if the failed one has not changed it."""
        return None

    def ended(self) -> None:
        """Clean up after the end of the request."""
