"""Tests of a router under hostile clients: it answers or closes, and good clients notice
nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import ExitStack, asynccontextmanager

import pytest
import pytest_asyncio

from tests.frozen import freeze
from tests.live.hostile.attackers import attack
from tests.live.hostile.corpus import refused, served
from tests.live.stack import running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPARE_FILES = 8  # probes and scrapes under way
GOOD_EVERY_S = 0.05
NO_HTTP = b"GET / HTTP/9.9\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SO_TIMESTAMPNS = 35  # socket(7); Python has no name for it
CALM_S = 3.0  # seconds for which good clients are alone, for comparison
SLICES, SLICE = 20, 50_000  # a million requests; each slice can be run by itself
ROUNDS = 4  # of attacks on the router and elsewhere, for comparison
FLAGS = (
    # Longer than a good client waits for a core on a busy machine.
    *("--server-head-s", "3", "--server-body-s", "3", "--timeouts-keep-alive-s", "1"),
    *("--ejection-failures", "1000"),
)
LOUD = ("Traceback", "failed to answer", "Error handling request", "Unhandled exception")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    async with running(tmp_path_factory.mktemp("logs"), workers=2, router=FLAGS) as stack:
        yield stack
        assert stack.router.process.returncode is None
        await stack.assert_idle()
        log = await asyncio.to_thread(stack.router.log.read_text)
        assert not [line for line in log.splitlines() if any(word in line for word in LOUD)]


def open_files(stack) -> int:
    return len(os.listdir(f"/proc/{stack.router.process.pid}/fd"))


@asynccontextmanager
async def good_clients(stack, what: str, clients: int = 2, calm_s: float = CALM_S):
    """Run good clients during the block, check each answer and print their waits during and before
    it.

    Yields the list of their waits in seconds, to be read afterwards.
    """
    waits_s: list[float] = []
    # Each request has its own connection, since idle ones are closed after a second here.
    once = {"Connection": "close"}
    _, right = await stack.complete([5, 6, 7], once, max_tokens=8)

    async def ask() -> None:
        while True:
            began_s = time.monotonic()
            status, answer = await stack.complete([5, 6, 7], once, max_tokens=8)
            waits_s.append(time.monotonic() - began_s)
            assert status == 200, answer
            assert answer["choices"][0]["text"] == right["choices"][0]["text"]
            await asyncio.sleep(GOOD_EVERY_S)

    asking = [asyncio.create_task(ask()) for _ in range(clients)]
    try:
        await asyncio.sleep(calm_s)
        alone_s = tuple(waits_s)
        waits_s.clear()
        yield waits_s
    finally:
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
    assert waits_s
    alone = f"; alone: {summary_of(alone_s)}" if alone_s else ""
    print(f"good clients beside {what}: {summary_of(waits_s)}{alone}")


def summary_of(waits_s) -> str:
    ranked = sorted(waits_s)
    p50, p99 = (1000 * ranked[int(len(ranked) * share)] for share in (0.5, 0.99))
    return f"{len(ranked)} right, p50 {p50:.1f} ms, p99 {p99:.1f} ms"


async def own_files(stack) -> int:
    """Return the router's count of open files, without its connections to workers, which it keeps
    open.
    """
    to_workers = sum(row["open_connections"] for row in await stack.rows())
    return open_files(stack) - to_workers


@asynccontextmanager
async def nothing_left(stack):
    """Check that the block leaves no open files and no request memory behind, except connections to
    workers.
    """
    await stack.assert_idle()
    async with stack.http.get(f"{stack.admin}/health") as reply:
        await reply.read()
    before = await own_files(stack)
    yield

    async def back() -> bool:
        held = await stack.metric("warmroute_server_arriving_bytes")
        return await own_files(stack) <= before + SPARE_FILES and held == 0

    await until(back, "files and memory to be given back")
    await stack.assert_idle()


def port_of(stack) -> int:
    return int(stack.url.rpartition(":")[2])


async def attacked(
    stack, kind: str, count: int, seed: int, port: int | None = None
) -> Counter[str]:
    """Run the attackers' program and return its counts; fail with its error output if it fails.

    `port` replaces the router's port.
    """
    asked = [str(port or port_of(stack)), str(count), str(seed)]
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.live.hostile.attackers", kind, *asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, trouble = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, trouble.decode()[-3000:]
    counted = Counter(json.loads(said))
    print(f"{kind}: {dict(counted)}")
    return counted


@pytest.mark.parametrize(
    ("requests", "seed"),
    [
        (8_000, 20_000),
        *(
            pytest.param(SLICE, seed, marks=[pytest.mark.full, pytest.mark.timeout(1_800)])
            for seed in range(SLICES)
        ),
    ],
)
async def test_mutated_requests_break_nothing(stack, requests: int, seed: int) -> None:
    async with nothing_left(stack), good_clients(stack, "mutated requests"):
        counted = await attacked(stack, "mutated", requests, seed)
    connections = counted["connections"]
    assert counted["200"] > connections / 50, counted
    assert counted["400"] > connections / 50, counted
    assert not counted["500"], counted


async def test_the_corpus_of_ambiguous_requests_reaches_no_worker(stack) -> None:
    async def decisions() -> float:
        return await stack.metric("warmroute_decisions_total")

    async def answered(requests: list[bytes]) -> None:
        port = port_of(stack)
        await asyncio.gather(*(attack(port, [data], True, counted) for data in requests))

    before = await decisions()
    counted: Counter[str] = Counter()
    async with nothing_left(stack):
        await answered([data for _, _, data in refused()])
        assert await decisions() == before
        right = [data for _, data in served()]
        await answered(right)
        assert await decisions() == before + len(right)
    assert counted["200"] == len(right)


def connected(port: int, request: bytes, address: str = "127.0.0.1") -> socket.socket:
    """Open a blocking connection from `address` and send the request."""
    client = socket.create_connection(("127.0.0.1", port), 10.0, (address, 0))
    client.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    client.sendall(request)
    return client


def answer_of(client: socket.socket) -> tuple[bytes, float]:
    """Return the answer and the time of its arrival by the kernel's clock, since this process may
    have waited for a core.
    """
    answer, told, *_ = client.recvmsg(1 << 16, 64)
    if not told:  # the kernel may not know yet that sockets want timestamps
        return answer, time.time()
    ((_, kind, at),) = told
    assert kind == SO_TIMESTAMPNS
    seconds, nanoseconds = struct.unpack("qq", at)
    return answer, seconds + nanoseconds / 1e9


def served_before(stack, addresses: list[str]) -> int:
    """Return how many hostile connections the router answers before a good client that came later;
    all of them came while the router was stopped.
    """
    port, pid = port_of(stack), stack.router.process.pid
    freeze(pid)
    with ExitStack() as clients:
        hostile = [clients.enter_context(connected(port, NO_HTTP, at)) for at in addresses]
        good = clients.enter_context(connected(port, HEALTH))
        os.kill(pid, signal.SIGCONT)
        answer, good_at_s = answer_of(good)
        assert answer.startswith(b"HTTP/1.1 200 ")
        answers = [answer_of(client) for client in hostile]
    assert all(answer.startswith(b"HTTP/1.1 400 ") for answer, _ in answers)
    return sum(at_s < good_at_s for _, at_s in answers)


async def test_addresses_that_sent_invalid_http_are_served_after_other_addresses(tmp_path) -> None:
    async with running(tmp_path, workers=1) as stack:
        addresses = [f"127.0.2.{number}" for number in range(1, 97)]
        for address in addresses:  # makes the addresses known to the router
            with connected(port_of(stack), NO_HTTP, address) as client:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        served = served_before(stack, addresses)
        assert served < len(addresses) / 2, f"{served} of {len(addresses)} were served before"
        assert await stack.metric("warmroute_server_deferred_total") >= len(addresses)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(600)
async def test_attackers_slow_good_clients_little_more_than_a_null_server_does(
    tmp_path,
) -> None:
    """Attackers at the router make good clients wait little longer than attackers at another server
    on the same machine, which only refuses.
    """
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.live.hostile.null_server"), stdout=asyncio.subprocess.PIPE
    )
    waits_s: dict[str, list[float]] = {"router": [], "null server": []}
    try:
        assert program.stdout is not None
        null_port = int(await program.stdout.readline())
        async with running(tmp_path, workers=2, router=FLAGS) as stack:
            for seed in range(ROUNDS):
                for who, port in (("router", port_of(stack)), ("null server", null_port)):
                    async with good_clients(stack, who, 4, calm_s=0.0) as waited_s:
                        await attacked(stack, "mutated", SLICE // 2, seed, port)
                    waits_s[who] += waited_s
    finally:
        program.kill()
        await program.wait()
    told_of = {who: summary_of(waited_s) for who, waited_s in waits_s.items()}
    p99_s = {who: sorted(s)[int(len(s) * 0.99)] for who, s in waits_s.items()}
    assert p99_s["router"] <= 2 * p99_s["null server"], told_of


@pytest.mark.parametrize(
    "connections",
    [200, pytest.param(5_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])],
)
async def test_many_slow_clients_disturb_no_other_client(tmp_path, connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The router accepts half as many as its limit of open files, and good clients come on top.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 3 * connections)), hard))
    async with (
        running(tmp_path, workers=1, router=("--server-head-s", "5")) as stack,
        nothing_left(stack),
        good_clients(stack, f"{connections} slow ones"),
    ):
        counted = await attacked(stack, "slow", connections, 1)
    assert counted["ended"] == connections
    assert counted["503"] == 0, "the server was full"
