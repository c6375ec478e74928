"""A request that came by gRPC: its worker's gRPC carries it, and its answer is kept for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from policies.facts import Arrival
from router.core.contract.actions import Dispatch
from router.fleet.member import Member
from router.http.messages import Request
from router.http.reply import Header, ReplyHead, Sends
from router.kserve.grpc_upstream import grpc_error
from router.kserve.http import BROKEN, LATE
from router.kserve.messages import STATUS_OF, GrpcTarget
from router.record.explain import Asked
from router.record.request_record import Attempt
from router.request.prompts import Prompt
from router.request.request import InferenceRequest
from router.request.service import Service

Named = tuple[str, str | None, str]  # a request: model, tenant, its client's id


class GrpcReply:
    """A worker's answer to a unary call; a `ReplySink`. Lifetime: dispatch."""

    movable = False
    dechunk = True
    congested = False
    keep_alive = True

    def __init__(self, http: Request, headers: tuple[Header, ...]) -> None:
        self.status = 200
        self.body_length = 0
        self.headers = headers
        self.error: tuple[int, str] | None = None  # of a refusal: the exact code, and what it says
        self._http = http
        self._parts: list[bytes] = []

    @property
    def begun(self) -> bool:
        """The client has nothing before all is there."""
        return False

    @property
    def body(self) -> bytes:
        """The message, or the refusal's JSON."""
        return b"".join(self._parts)

    def head(self, head: ReplyHead) -> None:
        """As of `ReplySink`, and so are the others."""
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


class GrpcInference(InferenceRequest):
    """A request that came by gRPC, and goes to its worker so. Lifetime: request."""

    __slots__ = ("_make_reply", "_running", "_target")

    def __init__(
        self,
        service: Service,
        http: Request,
        target: GrpcTarget,
        make_reply: Callable[[Request, tuple[Header, ...]], GrpcReply],
        running: dict[Named, int],
    ) -> None:
        """`running`: the workers of requests that their clients gave an id, for such that end
        them (`stop` of TensorRT-LLM's models).
        """
        super().__init__(service, http)
        self._target = target
        self._make_reply = make_reply
        self._running = running

    def __enter__(self) -> GrpcInference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.request_id >= 0 and not self.prompt.stops:
            self._running.pop(self._named, None)
        super().__exit__(kind, error, trace)

    @property
    def _named(self) -> Named:
        return self._target.model, self.terms.tenant, self._target.id

    def understood(self, body: bytes, arrival: Arrival, prompt: Prompt, explain: Asked) -> None:
        """As of `InferenceRequest`; one that ends another goes where that runs."""
        if prompt.stops and (worker_id := self._running.get(self._named)) is not None:
            arrival = replace(arrival, only=worker_id)
        super().understood(body, arrival, prompt, explain)

    def dispatched(self, action: Dispatch) -> Attempt:
        """As of `InferenceRequest`."""
        if self._target.id and not self.prompt.stops:
            self._running[self._named] = action.worker_id
        return super().dispatched(action)

    def upstream(self, member: Member) -> Sends:
        """Its worker's gRPC: one without lacks the path."""
        assert member.grpc is not None, "it was chosen"
        return member.grpc

    def reply(self, buffer_bytes: int, extra_headers: tuple[Header, ...] = ()) -> GrpcReply:
        """Where a worker's answer goes."""
        return self._make_reply(self.http, extra_headers)
