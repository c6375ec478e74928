"""Tests of wall clocks that jump by an hour, both ways, under load: no answer is wrong, and no
request is lost.

Waits, expiries and rates use a monotonic clock; the date is only for logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.live.crowd import Crowd, crowding
from tests.live.redis_server import needs_redis, redis_server
from tests.live.router_pair import Pair, pair
from tests.live.shifted_clock import ShiftedClock
from tests.live.stack import Stack, running, until

pytestmark = needs_redis

HOUR_S = 3_600
KEY = "sk-clock-0123456789abcdef0123456789abcdef"
TOKENS = 40
LEAST_S = 0.5  # in each state of the clocks; the whole is several leases and quota windows
LOUD = ("is down", "keeps failing", "Traceback", "failed to answer")
CLOCKS = ("one", "two", "workers")


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    return ShiftedClock(tmp_path)


@contextlib.contextmanager
def starting(folder: Path, clock: ShiftedClock, name: str) -> Iterator[None]:
    """Give a program started during the block its own shifted clock, keys and an access log."""
    with clock.jumping(folder / f"clock-{name}"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMROUTE_API_KEYS_FILE", str(folder / "keys.txt"))
        patch.setenv("WARMROUTE_ACCESS_LOG", str(folder / f"access-{name}"))
        patch.setenv("WARMROUTE_KV_STATE", str(folder / f"kv-{name}"))
        patch.setenv("WARMROUTE_INTERVALS_KV_STATE_S", "1")
        yield


def jumps(rounds: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield (programs whose clocks jump, shift in seconds): all at once, or one program first."""
    for names in (CLOCKS[:1], CLOCKS) if rounds == 1 else (*zip(CLOCKS), CLOCKS) * rounds:
        for shift_s in (HOUR_S, -HOUR_S, 0):
            yield names, shift_s


async def figures(both: Pair) -> list[dict[str, float]]:
    names = ("replicas_peers", "replicas_lapses_total", "replicas_connects_total")
    names += ("ejections_total", "worker_failures_total", "retries_total", "rejections_total")
    return [
        {name: await stack.metric(f"warmroute_{name}") for name in names} for stack in both.stacks
    ]


async def shows(stack: Stack, shift_s: int) -> bool:
    """Return whether the date in a router's answers is off by `shift_s`."""
    async with stack.http.get(f"{stack.admin}/ui/state") as reply:
        unix_s: float = (await reply.json())["frame"]["unix_s"]
    return abs(unix_s - time.time() - shift_s) < 60


@pytest.mark.parametrize(
    ("rounds", "streams", "rate"),
    [
        (1, 6, 20.0),
        pytest.param(12, 20, 60.0, marks=[pytest.mark.full, pytest.mark.timeout(1_200)]),
    ],
)
async def test_clock_jumps_of_an_hour_under_load_do_no_harm(
    tmp_path: Path, clock: ShiftedClock, rounds: int, streams: int, rate: float
) -> None:
    # Ten times the rate of all streams and clients: only a router that reads the date would refuse.
    (tmp_path / "keys.txt").write_text(f"{KEY} acme requests_per_s={100 * (rate + streams):g}\n")
    around = [partial(starting, tmp_path, clock, name) for name in ("one", "two")]
    with redis_server(tmp_path / "redis") as server, clock.jumping(tmp_path / "clock-workers"):
        async with pair(tmp_path, server.url, 20.0, around) as both:
            before = await figures(both)
            fields = f"Authorization: Bearer {KEY}\r\n"
            one, two = (Crowd(s.url, streams, rate, TOKENS, fields=fields) for s in both.stacks)
            async with crowding(one), crowding(two):
                for names, shift_s in jumps(rounds):
                    await jumped(tmp_path, clock, names, shift_s)
                    if "one" in names:
                        await until(partial(shows, both.stacks[0], shift_s), "the clock to jump")
                    await both_served(one, two)
            print(one.summary(), two.summary(), sep="\n")
            assert one.lost == two.lost == []
            assert await figures(both) == before
            for stack in both.stacks:
                await stack.assert_idle()
                said = stack.router.log.read_text()
                assert not [word for word in LOUD if word in said]
    for name in ("one", "two"):
        lines = (tmp_path / f"access-{name}").read_text().splitlines()
        took_ms = [json.loads(line)["total_ms"] for line in lines]
        assert len(took_ms) > 100
        assert all(0 <= ms < 90_000 for ms in took_ms), "a time was taken from the date"


async def test_the_access_log_uses_the_date_that_was_corrected_after_the_start(
    tmp_path: Path, clock: ShiftedClock
) -> None:
    """The access log uses a date that was corrected after the router's start, since a machine may
    learn the time late.
    """
    with clock.jumping(tmp_path / "clock"):
        clock.jump(tmp_path / "clock", -HOUR_S)
        log = tmp_path / "access"
        async with running(tmp_path, workers=1, router=["--access-log", str(log)]) as stack:
            for shift_s in (-HOUR_S, 0, HOUR_S):
                clock.jump(tmp_path / "clock", shift_s)
                lines = len(log.read_text().splitlines())
                assert (await stack.complete([1]))[0] == 200

                async def written(lines: int = lines) -> bool:
                    return len(log.read_text().splitlines()) > lines

                await until(written, "the request's line")
                at_s = json.loads(log.read_text().splitlines()[-1])["at"]
                assert abs(at_s - time.time() - shift_s) < 60


async def jumped(folder: Path, clock: ShiftedClock, names: tuple[str, ...], shift_s: int) -> None:
    """Shift the clocks of these programs by `shift_s` and leave them so for some time."""
    for name in names:
        clock.jump(folder / f"clock-{name}", shift_s)
    await asyncio.sleep(LEAST_S)


async def both_served(*crowds: Crowd) -> None:
    """Wait until each crowd of clients was served again, and check that no answer was lost."""
    served = [crowd.served.total() for crowd in crowds]

    async def more() -> bool:
        return all(crowd.served.total() > n + 5 for crowd, n in zip(crowds, served, strict=True))

    await until(more, "more answers")
    assert not any(crowd.lost for crowd in crowds), [crowd.summary() for crowd in crowds]
