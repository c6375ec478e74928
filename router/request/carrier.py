"""How one request goes to workers, and how their answers go to its client."""

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
    """Carries one request over HTTP. Other ways are subclasses of extras. Lifetime: request."""

    __slots__ = ("http",)

    moves = True  # the router writes the answer, so another worker can continue a begun stream

    def __init__(self, http: Request) -> None:
        self.http = http

    def path(self, target: Target | None) -> Path:
        """The row of the table of paths; `target`: the inference that a dialect's path names."""
        return PATHS.get(self.http.path, OTHER) if target is None else target.path

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        """The request as the core shall see it: `arrival` with what this way adds. Raises
        ClientError.
        """
        return arrival

    def placed(self, worker_id: int) -> None:
        """The core has chosen a worker."""

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        """The connections by which an attempt goes to its worker.

        `on_answer` may be called when the answer begins, before its end says so.
        """
        return member.upstream

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> Reply:
        """The client's side of a worker's answer, with `headers` of the router's own.

        `buffer_bytes`: unread by the client before the worker is paused.
        """
        return ClientReply(self.http, buffer_bytes, headers)

    def rest(self, arrival: Arrival) -> Arrival | None:
        """The request for the next attempt, if a failed one has changed it; else None."""
        return None

    def ended(self) -> None:
        """The request is over."""
