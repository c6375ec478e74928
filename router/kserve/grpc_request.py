"""Handles a request that arrived by gRPC: sends it to its worker's gRPC port, and collects the
answer for the client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policies.facts import Arrival
from router.fleet.member import Member
from router.http.messages import Request
from router.http.reply import Header, ReplyHead, Sends
from router.keys.key_file import KeyTerms
from router.kserve.grpc_upstream import grpc_error
from router.kserve.http import BROKEN, LATE
from router.kserve.messages import STATUS_OF, GrpcTarget
from router.record.request_record import Attempt
from router.request.carrier import Carrier
from router.request.prompts import Prompt

Named = tuple[str, str | None, str]  # a request: model, tenant, its client's id


class GrpcReply:
    """Collects a worker's answer to a unary gRPC call; it is a `ReplySink`. Lifetime: one dispatch
    of the request.
    """

    movable = False
    dechunk = True
    congested = False
    keep_alive = True

    def __init__(self, http: Request, headers: tuple[Header, ...]) -> None:
        self.status = 200
        self.body_length = 0
        self.headers = headers
        self.error: tuple[int, str] | None = None  # a refusal's exact code and message
        self._http = http
        self._parts: list[bytes] = []

    @property
    def begun(self) -> bool:
        """Always False, because the client receives nothing before the answer is complete."""
        return False

    @property
    def body(self) -> bytes:
        """The answer's gRPC message, or the JSON body of a refusal."""
        return b"".join(self._parts)

    def head(self, head: ReplyHead) -> None:
        self.status, self.error = head.status, grpc_error(head.headers)

    def data(self, data: bytes) -> None:
        self._parts.append(data)
        self.body_length += len(data)
        self._http.written_bytes = self.body_length

    async def drain(self) -> None:
        return

    def finish(self) -> None:
        return

    def abort(self, late: bool = False) -> None:
        self.status = 504 if late else 503
        self.error = STATUS_OF[self.status], LATE if late else BROKEN


class GrpcCarrier(Carrier):
    """Sends a request that arrived by gRPC to a worker's gRPC port. Lifetime: request."""

    __slots__ = ("_make_reply", "_named", "_running", "_stops", "_target")

    def __init__(
        self,
        http: Request,
        target: GrpcTarget,
        make_reply: Callable[[Request, tuple[Header, ...]], GrpcReply],
        running: dict[Named, int],
    ) -> None:
        """Make the carrier of the gRPC call `target`.

        `make_reply` makes the object that collects the worker's answer. `running` has the worker's
        id for each running request that its client has named, and all carriers share it. A call
        that stops a running request (`stop` of TensorRT-LLM's models) goes to that worker.
        """
        super().__init__(http)
        self._target = target
        self._make_reply = make_reply
        self._running = running
        self._named: Named | None = None  # once it was read
        self._stops = False  # it ends another request

    def arrival(self, arrival: Arrival, prompt: Prompt, key: KeyTerms) -> Arrival:
        self._named, self._stops = (self._target.model, key.tenant, self._target.id), prompt.stops
        if self._stops and (worker_id := self._running.get(self._named)) is not None:
            return replace(arrival, only=worker_id)  # where the other request runs
        return arrival

    def placed(self, worker_id: int) -> None:
        if self._target.id and not self._stops and self._named is not None:
            self._running[self._named] = worker_id

    def upstream(
        self, member: Member, attempt: Attempt, on_answer: Callable[[], None] | None = None
    ) -> Sends:
        assert member.grpc is not None, "a worker without gRPC lacks the path"
        return member.grpc

    def reply(self, buffer_bytes: int, headers: tuple[Header, ...] = ()) -> GrpcReply:
        return self._make_reply(self.http, headers)

    def ended(self) -> None:
        if self._named is not None and not self._stops:
            self._running.pop(self._named, None)
