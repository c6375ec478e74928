"""Tests of the metrics as Prometheus reads them; their number does not grow with every change of
workers.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.facts import Arrival, Finish, KvEvents, WorkerChange, WorkerFacts
from router.assembly import Router
from router.core.contract.actions import Dispatch
from router.engines.worker_spec import parse_worker_spec
from router.http.errors import ClientError, WorkerError
from router.http.reply import Outcome, Usage
from router.settings.schema import Config
from tests.router.core.core_world import BLOCK, chain_of, stored


@asynccontextmanager
async def router_with_workers(workers: int = 1) -> AsyncIterator[Router]:
    """Yield a router whose core has `workers` workers, although no servers listen at their
    addresses.
    """
    async with aiohttp.ClientSession() as http:
        router = Router(Config(), http)
        try:
            for number in range(workers):
                join_worker(router, 9 + number)
            yield router
        finally:
            await router.aclose()


def join_worker(router: Router, port: int = 9) -> int:
    member = router.fleet.add(parse_worker_spec(f"http://127.0.0.1:{port}"))
    facts = WorkerFacts(name="w", models=("m",), block_size=BLOCK, has_events=False)
    router.dispatcher.handle_fact(WorkerChange(0.0, member.worker_id, "ready", facts))
    return member.worker_id


def samples(router: Router) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the values by sample name and labels, read by Prometheus's own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(router.metrics.exposition().decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), (sample.name, labels)
            found[sample.name][labels] = sample.value
    return found


def serve_request(router: Router, outcome: Outcome, stream: bool = True) -> None:
    """Let one request arrive at the core and end with this outcome."""
    request_id = router.dispatcher.next_request_id()
    now_s = time.monotonic()
    chains = {BLOCK: chain_of([1, 2, 3])}
    arrival = Arrival(now_s, request_id, "m", 12, chains, stream=stream)
    (action,) = router.dispatcher.core.on_arrival(arrival)
    assert isinstance(action, Dispatch)
    router.metrics.requests.count_attempt(arrival, action.worker_id, outcome, now_s + 0.5)
    router.dispatcher.core.on_finish(Finish(now_s, request_id))


def successful_outcome(**fields: Any) -> Outcome:
    now_s = time.monotonic()
    known = {
        "started_s": now_s,
        "status": 200,
        "first_byte_s": now_s + 0.2,
        "last_byte_s": now_s + 0.4,
        "events": 11,
        "usage": Usage(12, 10, 8),
    }
    return Outcome(**(known | fields))


async def test_every_metric_can_be_parsed_from_the_exposition() -> None:
    async with router_with_workers() as router:
        serve_request(router, successful_outcome())
        serve_request(
            router, successful_outcome(error=WorkerError("connect", "x"), status=None, usage=None)
        )
        serve_request(router, successful_outcome(error=ClientError(499, "left")))
        serve_request(router, successful_outcome(usage=None), stream=False)
        serve_request(router, successful_outcome(status=400, usage=None))  # quick, and no answer
        read = samples(router)
        assert read["warmroute_decisions_total"] == {
            (("policy", "warmset"), ("reason", "only_worker")): 5.0
        }
        replies = read["warmroute_replies_total"]
        assert replies[("error", ""), ("status", "200"), ("worker", "0")] == 2
        assert replies[("error", "connect"), ("status", ""), ("worker", "0")] == 1
        assert replies[("error", "client"), ("status", "200"), ("worker", "0")] == 1
        serve_request(router, successful_outcome(fallback_reason="http_1_0"))
        assert samples(router)["warmroute_relayed_requests_total"] == {
            (("path", "native"), ("why", "")): 4.0,  # where nobody answered nothing was relayed
            (("path", "python"), ("why", "http_1_0")): 1.0,
        }
        assert read["warmroute_reported_hit_tokens_total"][()] == 16
        assert read["warmroute_reported_prompt_tokens_total"][()] == 24
        assert read["warmroute_time_to_first_token_seconds_count"][()] == 1
        assert read["warmroute_inter_token_seconds_sum"][()] == pytest.approx(0.02, rel=0.01)
        assert read["warmroute_request_seconds_count"][()] == 2
        assert read["warmroute_inflight_requests"][()] == 0
        assert read["warmroute_worker_state"] == {(("state", "ready"), ("worker", "0")): 1.0}


async def test_held_seconds_are_labelled_by_standing() -> None:
    async with router_with_workers() as router:
        held = router.dispatcher.core.counters.held
        for wait_s in (3.0, 40.0, 2_000.0):
            held["new"].add(wait_s)
        held["cold"].add(0.2)
        read = samples(router)
    count = read["warmroute_held_seconds_count"]
    assert count == {(("standing", s),): n for s, n in (("new", 3), ("cold", 1), ("warm", 0))}
    assert read["warmroute_held_seconds_sum"][(("standing", "new"),)] == 2_043.0
    bucket = read["warmroute_held_seconds_bucket"]
    assert [bucket[("le", le), ("standing", "new")] for le in ("2.5", "5", "50", "+Inf")] == [
        *(0, 1, 2, 3)
    ]


async def test_the_series_of_a_removed_worker_are_removed() -> None:
    async with router_with_workers() as router:
        lines = []
        for number in range(20):
            serve_request(router, successful_outcome())
            lines.append(len(router.metrics.exposition().splitlines()))
            join_worker(router, 100 + number)
            oldest = min(router.fleet.members)
            await router.fleet.remove(router.fleet.members[oldest], "forced")
        assert max(lines) == lines[0]
        workers = {
            dict(labels)["worker"] for labels in samples(router)["warmroute_worker_requests"]
        }
        assert workers == {"20"}


async def test_kv_events_are_counted_by_kind() -> None:
    async with router_with_workers() as router:
        router.dispatcher.handle_fact(KvEvents(0.0, 0, 0, (stored([1, 2]),)))
        events = samples(router)["warmroute_kv_events_total"]
        assert events[("kind", "stored_blocks"), ("worker", "0")] == 2
        assert events[("kind", "skipped_events"), ("worker", "0")] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_accepts_the_metrics() -> None:
    async with router_with_workers(2) as router:
        serve_request(router, successful_outcome())
        checking = await asyncio.create_subprocess_exec(
            "promtool",
            *("check", "metrics"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await checking.communicate(router.metrics.exposition())
        assert (checking.returncode, said.decode()) == (0, "")
