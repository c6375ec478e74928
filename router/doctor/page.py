"""The admin port's `/doctor` page: why the busiest workers of this router do not batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping

from router.doctor.examine import MAX_SERVERS, Options, examine
from router.doctor.report import DoctorError
from router.fleet.member import Member
from router.http.errors import ClientError
from router.http.messages import Request, Response, json_response
from router.request.dispatcher import Dispatcher

_EXAMINED = ("triton", "vllm", "sglang", "warmroute")  # kinds of workers that the doctor knows
_EXAMINE_S, _LONGEST_S = 10.0, 30.0


class DoctorPages:
    """Handles requests for `/doctor`, with one examination at a time. Lifetime: process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        members: Mapping[int, Member],
        counts: Callable[[], Awaitable[bytes]],
    ) -> None:
        """Make the handlers for the workers in `members`. `counts` returns the router's own
        metrics, which show what workers cannot know.
        """
        self._dispatcher = dispatcher
        self._members = members
        self._counts = counts
        self._busy = asyncio.Lock()

    async def examine(self, request: Request) -> Response:
        """Return why the busiest workers do not batch, after watching them for the seconds in the
        query `?seconds=10`. The examination only reads. Raises ClientError if the request is not
        allowed, `seconds` is out of range, or no examination is possible now.
        """
        if request.headers.get("Sec-Fetch-Site") not in (None, "none", "same-origin"):
            raise ClientError(403, "the workers are examined for this port's own page alone")
        try:
            seconds = float(request.query.get("seconds", _EXAMINE_S))
        except ValueError:
            seconds = math.nan
        if not 0.2 <= seconds <= _LONGEST_S:
            raise ClientError(400, f"`seconds` must be 0.2..{_LONGEST_S:g}", "seconds")
        if self._busy.locked():
            raise ClientError(409, "an examination is under way; ask again when it is over")
        specs = self._specs()
        if not specs:
            raise ClientError(409, f"no worker is ready that is one of {', '.join(_EXAMINED)}")
        async with self._busy:
            try:
                report = await examine(specs, Options(seconds=seconds, counts=self._counts))
            except DoctorError as error:
                raise ClientError(409, str(error)) from error
        return json_response(report.shown())

    def _specs(self) -> list[str]:
        """Return the URLs of the workers with the most requests; each server appears once."""
        workers = self._dispatcher.core.workers
        columns, found = self._dispatcher.core.columns, dict[str, float]()
        for member in self._members.values():
            worker, spec = workers.get(member.worker_id), member.spec
            if (
                worker is None
                or worker.shown_state not in ("ready", "busy")
                or member.kind not in _EXAMINED
            ):
                continue
            name = spec.url if spec.metrics is None else f"{spec.url},metrics={spec.metrics}"
            found[name] = found.get(name, 0.0) + float(columns.requests[worker.slot])
        return sorted(found, key=lambda name: -found[name])[:MAX_SERVERS]
