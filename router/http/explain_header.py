"""Why a request went where it went, in its answer's header, and who asked for that."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from policies.facts import Arrival
from router.core.actions import Dispatch, Reject
from router.core.chooser import Choice, Withheld
from router.http.client_request import ClientRequest
from router.http.relay.reply import Header
from router.record.explanation import columns_in_header, explanation, withheld

EXPLAIN_HEADER = "x-warmroute-explain"
WORKER_HEADER = b"x-warmroute-worker"
Asked = Literal["no", "sampled", "short", "full"]
TO_CLIENTS = ("short", "full")
HELD_CODES = ("hold_timeout", "hold_queue_full")  # of requests that no worker would take

_ASKED: Mapping[str | None, Asked] = MappingProxyType({"1": "short", "full": "full"})
_HEADER_BYTES = 6_000  # of an explanation: many clients stop at 8,190 for a line


def asked(request: ClientRequest, request_id: int, allowed: bool, every: int) -> Asked:
    """Who wants to read why: the client, the operator (of every n-th request), or nobody."""
    wanted = request.headers.get(EXPLAIN_HEADER) if allowed else None
    if wanted in _ASKED:
        return _ASKED[wanted]
    return "sampled" if every and request_id % every == 0 else "no"


def reply_headers(action: Dispatch, request_id: int, explain: Asked) -> tuple[Header, ...]:
    """What the router adds to a worker's answer."""
    worker: Header = (WORKER_HEADER, b"%d" % action.worker_id)
    if explain not in TO_CLIENTS:
        return (worker,)
    shown = explanation(request_id, action.worker_id, action.decision)
    if explain == "full" and action.decision.details is not None:
        shown |= columns_in_header(action.decision.details)
    return worker, (EXPLAIN_HEADER.encode(), _line(shown))


def refusal_line(arrival: Arrival, now_s: float, choice: Choice | Withheld | Reject) -> str | None:
    """Why nobody takes a request, as of `now_s`: for the header of its refusal."""
    if not isinstance(choice, Withheld):
        return None
    shown = withheld(arrival.request_id, choice) | {"held_s": round(now_s - arrival.now_s, 6)}
    return _line(shown).decode()


def _line(shown: dict[str, Any]) -> bytes:
    """One line of JSON, cut down where it would be more than a client's parser takes."""
    for part in ("columns", "best"):
        line = msgspec.json.encode(shown)
        if len(line) <= _HEADER_BYTES:
            return line
        shown = {name: value for name, value in shown.items() if name != part}
    return msgspec.json.encode(shown)
