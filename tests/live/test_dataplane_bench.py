"""The bench of the data plane measures what it says: its engines, its load, its table."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.dataplane import cpu
from tests.bench.dataplane.ledger import charged, total, until_zero
from tests.bench.dataplane.measured import FAILED, FOREIGN, Bench, Figure, Results, Row, run, table
from tests.bench.dataplane.programs import Cores, Engines, engines, run_load
from tests.bench.dataplane.replicas import at_rate, page, pair, unheard
from tests.bench.dataplane.routers import Subject, ours, subjects
from tests.live.redis_server import needs_redis, redis_server
from tests.live.stack import misbehaving

pytestmark = pytest.mark.alone
CORES = Cores.of_this_machine()
FEW = {"conns": 4}
HEARD_BYTES = r'warmroute_replicas_bytes_total{direction="heard"} (\S+)'


@pytest.fixture(scope="module")
def behind() -> Iterator[Engines]:
    with engines(CORES.others, delay_us=500, ports=2) as behind:
        yield behind


def sent(behind: Engines) -> int:
    return sum(engine["requests"] for engine in behind.counts())


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_every_request_is_answered(behind: Engines, ids: bool, chat: bool) -> None:
    before = sent(behind)
    load = run_load(
        behind.ports[1], CORES.others, None, behind.pid, count=50, ids=ids, chat=chat, **FEW
    )
    assert (load.requests, load.failed, load.events) == (50, 0, 0)
    assert sent(behind) == before + 50
    assert load.found["latency_us"]["count"] == 50


@pytest.mark.parametrize("rate", [0, 500])
def test_several_ports_get_the_same_each(behind: Engines, rate: int) -> None:
    before = [engine["requests"] for engine in behind.counts()]
    load = run_load(
        behind.ports, CORES.others, None, behind.pid, count=40, rate=rate, distinct=4, **FEW
    )
    assert (load.requests, load.failed) == (40, 0)
    more = [engine["requests"] - b for engine, b in zip(behind.counts(), before, strict=True)]
    assert sum(more) == 40
    assert rate == 0 or more == [20, 20]


def test_every_event_is_counted_and_stamped(behind: Engines) -> None:
    load = run_load(
        behind.ports[0], CORES.others, None, behind.pid, count=12, stream=True, events=5, **FEW
    )
    assert (load.requests, load.failed, load.events) == (12, 0, 60)
    delay = load.found["event_us"]
    assert delay["count"] == 60
    assert 0 < delay["p50"] <= delay["p99"] <= delay["max"] < 60e6
    assert [engine["running"] for engine in behind.counts()] == [0, 0]


def test_our_router_takes_the_engines_for_engines(behind: Engines) -> None:
    before = sent(behind)
    with ours()(behind, CORES) as router:
        assert router.pid is not None
        plain = run_load(router.port, CORES.others, router.pid, behind.pid, count=40, **FEW)
        streams = run_load(
            router.port, CORES.others, router.pid, behind.pid, count=8, stream=True, **FEW
        )
        assert cpu.rss_kb(router.pid) > 10_000
        assert charged(router.admin) == 0
    assert (plain.requests, plain.failed) == (40, 0)
    assert (streams.requests, streams.failed, streams.events) == (8, 0, 8 * 16)
    assert plain.cpu_s > 0
    assert sent(behind) == before + 40 + 8 + 1  # one asked whether it was ready


@needs_redis
def test_routers_of_a_pair_know_of_each_other(behind: Engines, tmp_path: Path) -> None:
    bench = Bench(CORES, 1, 0.5, [])
    with (
        redis_server(tmp_path / "redis") as server,
        pair(bench, behind, Subject("ours", ours()), server.url) as routers,
    ):
        load = at_rate(bench, behind, routers, 512, ids=False, rate=100)
        heard = [re.findall(HEARD_BYTES, page(one)) for one in routers]
        assert until_zero(lambda: sum(map(unheard, routers))) == 0
    assert load.requests > 0
    assert load.failed == 0
    assert all(float(count) > 50 * load.requests for (count,) in heard)


@pytest.mark.parametrize("name", ["HAProxy", "nginx"])
def test_proxies_that_are_installed_pass_events_on(behind: Engines, name: str) -> None:
    subject = next(s for s in subjects(None) if s.name == name)
    assert bool(subject.missing) == (shutil.which(name.lower()) is None)
    if not subject.missing:
        with subject.start(behind, CORES) as router:
            load = run_load(router.port, CORES.others, router.pid, behind.pid, count=8, stream=True)
        assert (load.requests, load.failed, load.events) == (8, 0, 8 * 16)


BAD_ANSWERS = {
    "another status": b'HTTP/1.1 500 Oh\r\nContent-Length: 11\r\n\r\n{"usage":0}',
    "no usage": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "cut off": b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"usage":0}',
    "no HTTP": b"\x00\x01\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("what", BAD_ANSWERS)
async def test_an_answer_that_is_not_whole_is_a_failure(behind: Engines, what: str) -> None:
    async with misbehaving(BAD_ANSWERS[what]) as (url, _):
        port = int(url.rsplit(":", 1)[1])
        load = await asyncio.to_thread(
            run_load, port, CORES.others, None, behind.pid, count=3, conns=1
        )
    assert (load.requests, load.failed) == (0, 3)


async def test_a_stream_that_lacks_events_is_a_failure(behind: Engines) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with misbehaving(head + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n") as (url, _):
        port = int(url.rsplit(":", 1)[1])
        load = await asyncio.to_thread(
            run_load,
            port,
            CORES.others,
            None,
            behind.pid,
            count=2,
            conns=1,
            stream=True,
            events=1,
        )
    assert (load.requests, load.failed) == (0, 2)


def test_the_table_has_medians_bars_and_who_is_missing() -> None:
    values = iter([3.0, 1.0, 2.0])

    def measure(bench: Bench, subject: Subject) -> dict[str, float]:
        if subject.name == "lame":
            raise RuntimeError("it limps\nmore")
        return {FOREIGN: 0.5, FAILED: 0.25, "us": next(values)}

    here = [
        Subject("here", ours()),
        Subject("lame", ours()),
        Subject("away", ours(), missing="not installed"),
    ]
    row = Row("row", [Figure("us", "CPU us", 2.5, 1)], measure)
    results = run(row, Bench(CORES, 3, 1.0, here))
    shown = table([results], here)
    assert "| measure | bar | here |" in shown
    assert "| CPU us | 2.5 | 2.0 |" in shown
    for line in (
        "- `row`: others kept 0.50 cores busy (0.50 to 0.50).",
        "- `row`: here failed 25.0% of requests.",
        "- `row`: lame: it limps.",
        "- away: not installed.",
    ):
        assert line in shown.splitlines()
    assert Results(row).median("here", "us") is None


def test_samples_of_a_metric_are_added_up() -> None:
    page = 'a_b{w="1"} 1.5\na_b{w="2"} 2\na_bc 7\nxa_b 9\n'
    assert (total(page, "a_b"), total(page, "a"), total("n 3\n", "n")) == (3.5, 0, 3)


@pytest.mark.parametrize(
    ("loud", "kept", "measured"),
    [([0.2], 0.2, 1), ([0.9, 0.1], 0.1, 2), ([0.9, 0.7, 0.8, 0.95, 0.9], 0.7, 5)],
)
def test_the_quietest_of_some_tries_counts(loud: list[float], kept: float, measured: int) -> None:
    left = list(loud)
    row = Row("row", [], lambda bench, subject: {FOREIGN: left.pop(0)})
    bench = Bench(CORES, 1, 1.0, [Subject("one", ours())], quiet=0.3)
    assert run(row, bench).values == {"one": {FOREIGN: [kept]}}
    assert len(loud) - len(left) == measured
