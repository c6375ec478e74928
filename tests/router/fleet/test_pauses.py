"""Tests of the detection of pauses of the router itself, which make its probes invalid."""

from __future__ import annotations

import asyncio

import pytest

from router.fleet.pauses import Pauses


class Clock:
    """A clock that the test sets. Lifetime: test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def sleep_with_pause(pauses: Pauses, clock: Clock, wait_s: float, took_s: float) -> None:
    """Let a sleep of `wait_s` seconds take `took_s` seconds by the clock."""
    task = asyncio.create_task(pauses.sleep(wait_s))
    await asyncio.sleep(0)
    clock.now_s += took_s
    await task


@pytest.mark.parametrize(
    ("pause_s", "limit_s", "spoiled"),
    [(8.0, 2.0, True), (0.5, 2.0, True), (0.3, 2.0, False), (0.2, 0.5, True), (0.04, 0.1, False)],
)
async def test_a_probe_during_a_long_pause_of_the_router_is_invalid(
    pause_s: float, limit_s: float, spoiled: bool
) -> None:
    clock = Clock()
    pauses = Pauses(clock)
    began_s = clock()
    await sleep_with_pause(pauses, clock, 0.001, 0.001)
    assert not pauses.overlaps_probe(began_s, limit_s)
    await sleep_with_pause(pauses, clock, 0.001, 0.001 + pause_s)
    assert pauses.overlaps_probe(began_s, limit_s) == spoiled
    clock.now_s += 0.001
    assert not pauses.overlaps_probe(clock(), limit_s)  # one that begins after it
    assert pauses.total_s == pytest.approx(pause_s if pause_s >= 0.05 else 0.0)


async def test_a_pause_counts_before_the_prolonged_sleep_has_ended() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    began_s = clock()
    task = asyncio.create_task(pauses.sleep(0.001))
    await asyncio.sleep(0)
    clock.now_s += 8.0
    assert pauses.overlaps_probe(began_s, 2.0)
    await task
    assert not pauses.overlaps_probe(clock(), 2.0)
