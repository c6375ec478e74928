"""What a request costs from its bytes to its end by parts: everything but HTTP and the relay.

    python -m tests.bench.life [--json] [--runs N] [--core C] [--workers N] [--profile FILE]

Reading and hashing a body, the core's decision, what is kept of it (the attempt), the head that its
worker is sent, and what follows an answer (metrics, the core's facts).
Policy `hybrid`, workers without events as any engine that is known by its URL alone is. 64 requests
are under way at once, each part timed over all of them: CPU time, the least of all runs, which a
busy neighbour moves least. `--profile` writes cProfile's statistics.
"""

from __future__ import annotations

import cProfile
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from policies.facts import Arrival, WorkerChange, WorkerFacts
from policies.load import load
from router.body.paths import PATHS
from router.body.scan import ScanLimits
from router.collectors.core import router_metrics
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.fleet.manager import FleetManager
from router.http.framing import request_head
from router.http.messages import Request
from router.http.reply import Outcome, UpstreamRequest, Usage
from router.process.garbage import settle
from router.request.dispatcher import Dispatcher
from router.request.prompts import PromptReader, TokenCheck
from router.request.request import InferenceRequest
from router.request.service import Service
from tests.bench.measuring import Row, arguments, pinned, show
from tests.bench.route import done

AT_ONCE = 64
BODIES = 64
TEXT = "The quick brown fox jumps over the lazy dog, and\n says so. "
BLOCK = 64  # what text is cut into for a worker that tells no block size
LIMITS = ScanLimits()
HEADERS = (
    (b"Host", b"router:8000"),
    (b"User-Agent", b"bench/1"),
    (b"Accept", b"*/*"),
    (b"Authorization", b"Bearer key"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"2110"),
)


def bodies(text_bytes: int) -> list[bytes]:
    """Completions; a quarter of each prompt is shared."""
    text = TEXT * (text_bytes // len(TEXT) + 1)
    shared, own = text[: text_bytes // 4], text[text_bytes // 4 : text_bytes - 8]
    return [
        json.dumps({"model": "m", "prompt": f"{shared}{number:8}{own}", "max_tokens": 16}).encode()
        for number in range(BODIES)
    ]


class Pool:
    """A router's inside without its sockets. Lifetime: a measurement."""

    def __init__(self, workers: int, executor: ThreadPoolExecutor) -> None:
        core = RouterCore(
            load("hybrid"), CoreSettings(), report=lambda fault: None, clock=time.monotonic
        )
        for worker_id in range(workers):
            facts = WorkerFacts(f"w{worker_id}", ("m",), BLOCK, has_events=False)
            core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
        check = TokenCheck(time.monotonic, lambda: 1.0)
        self.reader = PromptReader(None, executor, time.time, 1, check)
        carrier = SimpleNamespace(upstream=None, rank=None, kind=None)
        fleet = cast(FleetManager, SimpleNamespace(members=dict.fromkeys(range(workers), carrier)))
        metrics = router_metrics(core, fleet, self.reader)
        self.service = Service(Dispatcher(core, time.monotonic), fleet, metrics, None, check)

    def read(self, body: bytes) -> InferenceRequest:
        """What `Inference` makes of a body."""
        scanned = self.reader.scan(body, PATHS["/v1/completions"], LIMITS)
        service, model = self.service, scanned.model or ""
        base, adapter = service.identity(model)
        prompt = done(self.reader.read(scanned, base, service.block_sizes(model), adapter))
        arrival = Arrival(
            now_s=service.clock(),
            request_id=service.next_request_id(),
            model=model,
            prompt_tokens=prompt.tokens,
            chains=prompt.chains,
            approximate=prompt.approximate,
            max_output_tokens=scanned.max_output_tokens,
            stream=scanned.stream,
            longest_prompt_tokens=prompt.longest_tokens,
        )
        request = InferenceRequest(service, cast(Request, None))
        request.understood(body, arrival, prompt, "no")
        return request


def parts(pool: Pool, asked: list[bytes]) -> Iterator[tuple[str, float]]:
    """(Part, its microseconds of a request), for `AT_ONCE` requests."""
    started_s = time.thread_time()

    def taken_us() -> float:
        nonlocal started_s
        before_s, started_s = started_s, time.thread_time()
        return (started_s - before_s) / AT_ONCE * 1e6

    requests = [pool.read(asked[number % len(asked)]) for number in range(AT_ONCE)]
    yield "reading, hashing", taken_us()
    for request in requests:
        request.ask()
    yield "decision", taken_us()
    for request in requests:
        try:
            request.next_attempt().send(None)
        except StopIteration:
            continue
        raise AssertionError("a request waited")
    yield "attempt", taken_us()
    for _ in requests:
        sent = UpstreamRequest("POST", "/v1/completions", HEADERS, asked[0])
        request_head(sent, b"worker:8000", "")
    yield "the worker's head", taken_us()
    now_s = time.monotonic()
    ends = [Outcome(now_s, 200, None, 272, now_s, now_s, 0, Usage(512, 16)) for _ in requests]
    for request, end in zip(requests, ends, strict=True):
        request.ended(end, None)
        request.__exit__(None, None, None)
    yield "metrics, end", taken_us()


def measured(pool: Pool, size: int, runs: int) -> dict[str, float]:
    """The least of each part."""
    asked = bodies(size)
    least: dict[str, float] = {}
    for _ in range(runs + 5):
        for name, us in parts(pool, asked):
            least[name] = min(us, least.get(name, us))
    return least


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", runs=200)
    parser.add_argument("--workers", type=int, action="append", help="how many (default: 4, 64)")
    parser.add_argument("--profile", metavar="FILE", help="cProfile statistics of 2 KB")
    options = parser.parse_args()
    pinned(options.core)
    rows = []
    with ThreadPoolExecutor(1) as executor:
        for workers in options.workers or (4, 64):
            pool: Any = Pool(workers, executor)
            settle()
            for size in (2_048, 65_536):
                found = measured(pool, size, options.runs)
                where = f"{size // 1024} KB, {workers} workers"
                rows += [Row(f"{where}: {name}", us, "us") for name, us in found.items()]
                rows.append(Row(f"{where}: all of it", sum(found.values()), "us"))
        if options.profile is not None:
            with cProfile.Profile() as profile:
                measured(pool, 2_048, 50)
            profile.dump_stats(options.profile)
    show(rows, options.json)


if __name__ == "__main__":
    main()
