"""Tests of pinned prefixes: they are never evicted, are bounded, expire, and leave room for
requests.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from engine.pins import MAX_PINS, PinRefused
from engine.scheduler.scheduler import Reason, Refused, Scheduler
from tests.engine.chains import chain_of, prompt
from tests.engine.scheduling import SIZE, Driver, make, request
from tests.oracles.block_pool import check_pool


def pinned(driver: Driver, blocks: int, until_s: float = inf) -> list[int]:
    chain = chain_of(prompt(1, blocks))
    driver.scheduler.pins.pin(chain, until_s)
    return chain


def flood(driver: Driver, first: int = 100) -> None:
    """Run requests, one after another, that fill the cache several times over."""
    for number in range(first, first + 10):
        driver.scheduler.add(request(number, prompt(number, 8)), driver.now_s)
        driver.run()
        check_pool(driver.scheduler.pool)


def refused(scheduler: Scheduler, chain: list[int]) -> str:
    with pytest.raises(PinRefused) as refusal:
        scheduler.pins.pin(chain, inf)
    return refusal.value.reason


def test_a_prefix_pinned_before_it_is_computed_is_kept_afterwards():
    driver = Driver(make(blocks=32, pinned_share=0.25))
    chain = pinned(driver, 8)
    pins = driver.scheduler.pins
    assert (pins.wanted_blocks, pins.held_blocks) == (8, 0)
    driver.scheduler.add(request(0, prompt(1, 8)), 0.0)
    driver.run()
    flood(driver)
    assert pins.held_blocks == 8
    assert driver.scheduler.pool.hit(chain) == 8
    assert driver.scheduler.pool.evicted_total > 0


def test_an_unpinned_prefix_is_evicted_as_usual():
    driver = Driver(make(blocks=32, pinned_share=0.25))
    chain = pinned(driver, 8)
    driver.scheduler.add(request(0, prompt(1, 8)), 0.0)
    driver.run()
    assert driver.scheduler.pins.unpin(chain[-1])
    assert not driver.scheduler.pins.unpin(chain[-1])
    flood(driver)
    assert driver.scheduler.pool.hit(chain) == 0
    assert driver.scheduler.pool.used_blocks == 0


def test_a_pin_expires_by_the_time_passed_in():
    driver = Driver(make(blocks=32, pinned_share=0.25))
    chain = pinned(driver, 8, until_s=1_000.0)
    driver.scheduler.add(request(0, prompt(1, 8)), 0.0)
    driver.run()
    flood(driver)
    assert driver.scheduler.pool.hit(chain) == 8
    driver.now_s = 1_000.0
    flood(driver, first=200)
    assert driver.scheduler.pins.all == []
    assert driver.scheduler.pool.hit(chain) == 0


def test_clearing_the_cache_drops_the_blocks_but_keeps_the_pin():
    driver = Driver(make(blocks=32, pinned_share=0.25))
    chain = pinned(driver, 8)
    driver.scheduler.add(request(0, prompt(1, 8)), 0.0)
    driver.run()
    driver.scheduler.pool.clear()
    driver.scheduler.pins.advance(driver.now_s)
    assert driver.scheduler.pool.used_blocks == driver.scheduler.pins.held_blocks == 0
    driver.scheduler.add(request(1, prompt(1, 8)), driver.now_s)
    driver.run()
    flood(driver)
    assert driver.scheduler.pool.hit(chain) == 8


def test_refused_pins_have_a_reason_and_change_nothing():
    off = make(blocks=32)
    assert refused(off, chain_of(prompt(1, 1))) == "pins_off"
    scheduler = make(blocks=32, pinned_share=0.25)
    assert refused(scheduler, []) == "too_short"
    scheduler.pins.pin(chain_of(prompt(1, 6)), inf)
    assert refused(scheduler, chain_of(prompt(2, 3))) == "pin_share"
    scheduler.pins.pin(chain_of(prompt(1, 6) + prompt(2, 2)), inf)
    assert scheduler.pins.wanted_blocks == 8, "the shared six count once"
    with pytest.raises(PinRefused, match="chain hash 77") as missing:
        scheduler.pins.chain_to(77)
    assert missing.value.reason == "not_cached"
    many = make(blocks=2 * MAX_PINS, pinned_share=0.9)
    for number in range(MAX_PINS):
        many.pins.pin([number + 1], inf)
    assert refused(many, [MAX_PINS + 1]) == "too_many_pins"


def test_a_pin_by_block_hash_covers_the_blocks_full_prefix():
    driver = Driver(make(blocks=32, pinned_share=0.25))
    driver.scheduler.add(request(0, prompt(1, 8)), 0.0)
    driver.run()
    chain, pins = chain_of(prompt(1, 8)), driver.scheduler.pins
    assert pins.chain_to(chain[3]) == chain[:4]
    pins.pin(chain[:4], inf)
    assert pins.held_blocks == 4
    driver.scheduler.pool.clear()
    pins.advance(driver.now_s)
    assert pins.chain_to(chain[3]) == chain[:4], "known as a pin, though not in the cache"


def test_a_request_that_needs_the_pinnable_share_is_refused():
    scheduler = make(blocks=32, pinned_share=0.25)
    assert scheduler.max_sequence_tokens == 24 * SIZE
    with pytest.raises(Refused) as refusal:
        scheduler.add(request(0, range(24 * SIZE)), 0.0)
    assert refusal.value.reason == "kv_capacity"
    driver = Driver(scheduler)
    pinned(driver, 8)
    scheduler.add(request(1, prompt(1, 8)), 0.0)
    driver.run()
    longest = 24 * SIZE - 4
    scheduler.add(request(2, range(50, 50 + longest)), driver.now_s)
    driver.run(limit=100)
    assert driver.finished[2] == "length"


def test_blocks_reserved_for_outputs_cannot_be_pinned():
    policy: Any = "guaranteed_no_evict"
    driver = Driver(make(blocks=32, pinned_share=0.25, batch_scheduler_policy=policy))
    scheduler = driver.scheduler
    scheduler.add(request(0, prompt(1, 8), 4), 0.0)
    driver.run()
    for number in (1, 2, 3):
        scheduler.add(request(number, prompt(number + 1, 2), 8 * SIZE), driver.now_s)
    driver.step()
    assert scheduler.running == 2
    assert scheduler.not_scheduled_total[Reason.RESERVE_POLICY] > 0
    pinned(driver, 8)
    driver.run()
    assert scheduler.preemptions_total == 0
    assert scheduler.pins.held_blocks == 8
