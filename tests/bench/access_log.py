"""What the access log costs the event loop: `python -m tests.bench.access_log`.

CPU time of the thread for one request's notes, with the wrapper round its case, against none.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

from policies.facts import Arrival
from router.request.desk import Errand
from router.request.visits import Visits
from router.upstream.reply import Outcome, Usage

REQUESTS, ROUNDS = 2_000, 15


class _Case:
    request_id = 1

    def arrive(self) -> None: ...
    def first_token(self, now_s: float) -> None: ...
    def progress(self, now_s: float, output_tokens: int) -> None: ...
    def gone(self) -> None: ...
    def why_refused(self, reject: Any) -> None: ...
    def __enter__(self) -> _Case:
        return self

    def __exit__(self, *how: object) -> None: ...
    async def next_errand(self) -> Errand:
        return Errand(0, ((b"x-warmroute-worker", b"0"),), None, 100)

    def ended(self, outcome: Outcome, own_tokens: int | None, rest: Any = None) -> bool:
        return False


def _step(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value


def _request(case: Any) -> None:
    with case:
        case.arrive()
        _step(case.next_errand())
        case.ended(OUTCOME, None)


OUTCOME = Outcome(0.0, 200, None, 900, 0.1, 0.2, 10, Usage(500, 10, 400))
ARRIVAL = Arrival(0.0, 1, "m", 500, {})
HEADERS = {"traceparent": "00-" + "a" * 32 + "-00f067aa0ba902b7-01"}


def main() -> None:
    """Print the median of both, in microseconds a request."""
    log: Any = SimpleNamespace(put=lambda visit: True)
    visits = Visits(log, time.monotonic)
    known: dict[str, Any] = {"remote": "127.0.0.1", "writer": SimpleNamespace(output_size=0)}
    request: Any = SimpleNamespace(headers=HEADERS, path="/v1/completions", **known)
    case: Any = _Case()

    def with_log() -> None:
        with visits.visit(request) as visit:
            _request(visit.asks(case, ARRIVAL, 2_000))

    took: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(ROUNDS):
        for name, one in ("without", lambda: _request(case)), ("with", with_log):
            began = time.thread_time()
            for _ in range(REQUESTS):
                one()
            took[name].append((time.thread_time() - began) / REQUESTS * 1e6)
    without, whole = (statistics.median(took[name]) for name in ("without", "with"))
    print(f"without {without:.2f} us, with {whole:.2f} us: the log costs {whole - without:.2f} us")


if __name__ == "__main__":
    main()
