"""Tests of requests that wait for the first worker of a known model: which may wait, how long, and
in which order they go.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Silence
from router.waiting.pace import Pace
from router.waiting.settings import WaitingSettings
from tests.router.first_worker.wait_world import FACTS, WaitWorld
from tests.router.property_support import patient

TERMS = WaitingSettings(models=("m", "n"), wait_s=60.0, requests=8, bytes=10_000, per_s=4)


async def test_the_first_worker_gets_few_requests_at_first_by_priority() -> None:
    world = WaitWorld(replace_terms(requests=100))
    urgent = {await world.start_waiting(world.arrival(priority=n % 3)): n % 3 for n in range(60)}
    await world.pass_s(5.0)
    assert not world.went

    world.worker("ready")
    by_second = []
    while len(world.went) < 60:
        before = len(world.went)
        await world.pass_s(1.0)
        by_second.append(len(world.went) - before)
    assert by_second[:4] == [4, 8, 12, 16]
    assert [urgent[number] for number in world.went] == sorted(urgent.values())
    same = [number for number in world.went if urgent[number] == 0]
    assert same == sorted(same)


async def test_the_log_says_once_a_minute_why_requests_wait(caplog) -> None:
    world = WaitWorld(TERMS)
    world.worker("ready")
    world.worker("down")
    await world.pass_s(1.0)
    assert not caplog.messages
    for _ in range(2):
        await world.start_waiting(world.arrival())
    await world.pass_s(59.0)
    assert caplog.messages == [
        "no worker takes requests of model 'm': its workers are down; requests that wait for one: "
        "2, each for 60 s at most (waiting.wait_s)"
    ]
    await world.start_waiting(world.arrival())
    await world.pass_s(2.0)
    assert len(caplog.messages) == 2
    world.worker("ready")  # its first requests wait for their turn only
    await world.pass_s(90.0)
    assert len(caplog.messages) == 2


async def test_two_workers_get_twice_as_many_requests() -> None:
    world = WaitWorld(replace_terms(requests=100))
    for _ in range(60):
        await world.start_waiting(world.arrival())
    world.worker("ready", 0)
    world.worker("ready", 1)
    await world.pass_s(1.0)
    assert len(world.went) == 8


async def test_after_a_pause_no_burst_of_requests_is_sent() -> None:
    world = WaitWorld(replace_terms(requests=100))
    for _ in range(80):
        await world.start_waiting(world.arrival())
    world.worker("ready")
    world.queue.tick()
    world.now_s += 4.999  # nothing ran meanwhile
    world.queue.tick()
    assert world.queue.waiting("m") >= 80 - 4 * 5


async def test_each_tenant_gets_its_share() -> None:
    world = WaitWorld(replace_terms(requests=100))
    many = [await world.start_waiting(world.arrival(tenant="a")) for _ in range(30)]
    few = [await world.start_waiting(world.arrival(tenant="b")) for _ in range(4)]
    world.worker("ready")
    await world.pass_s(2.0)
    assert set(few) <= set(world.went)
    assert world.went[:4] == [many[0], few[0], many[1], few[1]]


async def test_new_requests_wait_behind_waiting_ones() -> None:
    world = WaitWorld(TERMS)
    assert world.queue.arrives(world.arrival())
    await world.start_waiting(world.arrival())
    await world.start_waiting(world.arrival())
    world.worker("ready")
    assert world.queue.arrives(world.arrival())  # others wait still
    assert world.queue.arrives(world.arrival("n"))
    await world.pass_s(1.0)
    assert not world.queue.arrives(world.arrival())
    assert world.queue.arrives(world.arrival("n"))


async def test_an_unknown_model_is_refused_at_once_with_a_list_of_known_models() -> None:
    world = WaitWorld(TERMS)
    assert world.queue.arrives(world.arrival("x"))
    number = await world.start_waiting(world.arrival("x"))
    status, code, message = world.refused[number]
    assert (status, code) == (404, "model_not_found")
    assert "known: m, n" in message


async def test_a_model_stays_known_for_a_time_after_its_last_worker_left() -> None:
    world = WaitWorld(WaitingSettings(seen_s=600.0))
    assert not world.queue.arrives(world.arrival())  # nothing is promised: the core answers
    world.worker("ready")
    assert not world.queue.arrives(world.arrival())
    assert "m" in world.known
    world.worker("gone")
    assert world.queue.arrives(world.arrival())
    assert world.known.names() == {"m"}
    world.now_s += 599.0
    assert "m" in world.known
    world.now_s += 2.0
    assert "m" not in world.known
    assert not world.queue.arrives(world.arrival())


async def test_requests_do_not_wait_for_an_unloaded_model() -> None:
    world = WaitWorld(WaitingSettings(seen_s=600.0))
    world.worker("ready", 0, replace(FACTS, models=("m", "tone"), adapters=frozenset({"tone"})))
    world.worker("ready", 1, replace(FACTS, models=("m", "tone")))
    assert "tone" in world.known
    world.worker("ready", 0)
    assert "tone" in world.known
    world.worker("ready", 1)
    assert "tone" not in world.known
    world.worker("gone", 0)
    world.worker("gone", 1)
    assert world.known.names() == {"m"}


async def test_requests_wait_for_an_adapter_only_while_its_base_model_has_no_worker() -> None:
    world = WaitWorld(WaitingSettings(seen_s=600.0))
    world.worker("ready", 0, replace(FACTS, models=("m", "tone"), adapters=frozenset({"tone"})))
    world.worker("ready", 1)
    assert "tone" in world.known
    world.worker("gone", 0)
    assert "tone" not in world.known
    world.worker("gone", 1)
    assert world.known.names() == {"m", "tone"}


async def test_a_request_is_refused_when_its_waiting_time_is_over() -> None:
    world = WaitWorld(TERMS)
    plain = await world.start_waiting(world.arrival())
    short = await world.start_waiting(world.arrival(hold_s=5.0))
    late = await world.start_waiting(world.arrival(deadline_s=world.now_s + 7.0))
    await world.pass_s(4.9)
    assert not world.refused
    await world.pass_s(0.2)
    assert world.refused.keys() == {short}
    await world.pass_s(2.0)
    assert world.refused[late][:2] == (504, "deadline_exceeded")
    await world.pass_s(52.8)
    assert plain not in world.refused
    await world.pass_s(0.2)
    assert world.refused[plain][:2] == (503, "no_worker_available")
    assert "within 60 s" in world.refused[plain].message
    assert (len(world.queue), world.queue.bytes) == (0, 0)


async def test_a_disconnected_clients_request_frees_its_place() -> None:
    world = WaitWorld(TERMS)
    number = await world.start_waiting(world.arrival())
    other = await world.start_waiting(world.arrival())
    world.tasks[number].cancel()
    await asyncio.gather(world.tasks[number], return_exceptions=True)
    assert (len(world.queue), world.queue.bytes) == (1, 100)
    world.worker("ready")
    await world.pass_s(1.0)
    assert world.went == [other]
    assert world.queue.ends["left"] == 1


async def test_a_full_queue_refuses_requests_unless_they_are_more_urgent() -> None:
    world = WaitWorld(TERMS)
    least = [await world.start_waiting(world.arrival(priority=5)) for _ in range(8)]
    same = await world.start_waiting(world.arrival(priority=5))
    assert world.refused[same][:2] == (503, "worker_wait_full")
    urgent = await world.start_waiting(world.arrival(priority=0))
    assert world.refused[least[-1]].code == "displaced"
    assert urgent not in world.refused
    assert len(world.queue) == 8


async def test_the_bytes_of_waiting_requests_are_limited() -> None:
    world = WaitWorld(TERMS)
    await world.start_waiting(world.arrival(), body_bytes=6_000)
    more = await world.start_waiting(world.arrival(), body_bytes=6_000)
    huge = await world.start_waiting(world.arrival(priority=-1), body_bytes=20_000)
    assert {world.refused[more].code, world.refused[huge].code} == {"worker_wait_full"}
    assert world.queue.bytes == 6_000  # what would not fit anyway drove nobody out


async def test_on_shutdown_all_waiting_requests_are_refused() -> None:
    world = WaitWorld(TERMS)
    waiting = [await world.start_waiting(world.arrival()) for _ in range(3)]
    assert world.queue.turn_away("it stops") == 3
    await asyncio.gather(*world.tasks.values())
    later = await world.start_waiting(world.arrival())
    assert {world.refused[n].code for n in (*waiting, later)} == {"shutting_down"}


async def test_requests_bound_to_one_worker_do_not_wait_for_another() -> None:
    world = WaitWorld(TERMS)
    assert not world.queue.arrives(world.arrival(only=3))


async def test_no_request_waits_if_the_waiting_time_is_0() -> None:
    world = WaitWorld(WaitingSettings(models=("m",), wait_s=0.0))
    assert not world.queue.arrives(world.arrival())
    assert not world.queue.is_promised()


async def test_a_prefill_or_decode_worker_alone_does_not_end_the_wait() -> None:
    world = WaitWorld(TERMS)
    await world.start_waiting(world.arrival())
    facts = replace(FACTS, group="g", serves_alone=False)
    world.worker("ready", 0, replace(facts, role="decode"))
    await world.pass_s(1.0)
    assert (world.queue.ready_workers("m"), world.went) == (0, [])
    world.worker("ready", 1, replace(facts, role="prefill"))
    await world.pass_s(1.0)
    assert world.went == [0]


async def test_a_worker_of_an_acceptable_other_model_ends_the_wait() -> None:
    world = WaitWorld(TERMS)
    any_of = await world.start_waiting(world.arrival("n"), others=frozenset({"m", "n"}))
    only = await world.start_waiting(world.arrival("n"))
    world.worker("ready")  # of m
    await world.pass_s(1.0)
    assert world.went == [any_of]
    assert list(world.waiting()) == [only]


async def test_requests_wait_while_all_workers_are_silent() -> None:
    world = WaitWorld(TERMS)
    world.worker("ready")
    world.core.on_silence(Silence(world.now_s, 0, 1))
    assert world.queue.arrives(world.arrival())
    await world.start_waiting(world.arrival())
    await world.pass_s(1.0)
    assert not world.went
    world.core.on_silence(Silence(world.now_s, 0, 0))
    await world.pass_s(1.0)
    assert len(world.went) == 1


async def test_requests_are_sent_in_order_of_arrival_even_if_they_wait_again() -> None:
    world = WaitWorld(TERMS)
    old, young = world.arrival(), world.arrival()
    await world.start_waiting(young)
    await world.start_waiting(old)
    world.worker("ready")
    await world.pass_s(1.0)
    assert world.went == [old.request_id, young.request_id]


async def test_adapters_share_the_slow_start_of_their_base_models_workers() -> None:
    models = ("m", *(f"tone-{n}" for n in range(20)))
    world = WaitWorld(WaitingSettings(models=models, requests=1_000, per_s=4))
    for n in range(10):
        for model in models:
            await world.start_waiting(world.arrival(model, priority=n % 2))
    world.worker("ready", 0, replace(FACTS, models=models, adapters=frozenset(models[1:])))
    await world.pass_s(1.0)
    assert len(world.went) == 4
    await world.pass_s(4.0)
    assert 4 * (1 + 2 + 3 + 4) <= len(world.went) <= 4 * (1 + 2 + 3 + 4 + 5)
    urgent = {n for n, task in world.tasks.items() if (n // len(models)) % 2 == 0}
    assert set(world.went) <= urgent


async def test_a_full_queue_displaces_requests_of_the_largest_tenant_and_model() -> None:
    world = WaitWorld(TERMS)
    for _ in range(8):
        await world.start_waiting(world.arrival(tenant="greedy"))
    small = await world.start_waiting(world.arrival("n", tenant="small"))
    assert small not in world.refused
    assert [refusal.code for refusal in world.refused.values()] == ["displaced"]
    for _ in range(8):
        await world.start_waiting(world.arrival("n", tenant="small"))
    tenants = Counter("small" if number >= small else "greedy" for number in world.waiting())
    assert tenants == {"greedy": 4, "small": 4}


async def test_no_request_is_displaced_for_a_request_that_does_not_fit() -> None:
    world = WaitWorld(TERMS)
    await world.start_waiting(world.arrival(priority=0), body_bytes=8_000)
    few = [await world.start_waiting(world.arrival(priority=5), body_bytes=500) for _ in range(4)]
    large = await world.start_waiting(world.arrival(priority=3), body_bytes=9_000)
    assert world.refused.keys() == {large}
    fits = await world.start_waiting(world.arrival(priority=3), body_bytes=900)
    assert world.refused.keys() == {large, few[-1], few[-2]}
    assert fits in world.waiting()


async def test_a_cancelled_request_is_not_displaced() -> None:
    world = WaitWorld(TERMS)
    numbers = [await world.start_waiting(world.arrival(priority=5)) for _ in range(8)]
    world.tasks[numbers[-1]].cancel()  # in the same turn as the next one comes
    urgent = await world.start_waiting(world.arrival(priority=0))
    assert urgent not in world.refused
    assert len(world.queue) <= 8


@patient
@given(
    per_s=st.integers(1, 50),
    workers=st.integers(1, 5),
    steps=st.lists(st.floats(0.0, 1.7), min_size=1, max_size=60),
)
def test_the_rate_of_requests_never_exceeds_slow_start(
    per_s: int, workers: int, steps: list[float]
) -> None:
    pace, now_s, went = Pace(7.0), 7.0, Counter[int]()
    for step_s in steps:
        now_s += step_s
        for _ in range(pace.room(per_s, workers, now_s)):
            pace.count_request()
            went[math.floor(now_s - 7.0)] += 1
    assert all(count <= per_s * workers * (second + 1) for second, count in went.items())


@patient
@given(data=st.data())
def test_every_request_ends_once_and_no_limit_is_exceeded(data: st.DataObject) -> None:
    asyncio.run(_play_random_history(data))


async def _play_random_history(data: st.DataObject) -> None:
    world = WaitWorld(TERMS)
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.integers(0, 4)):
            case 0 | 1:
                priority = data.draw(st.integers(-1, 2))
                tenant = data.draw(st.sampled_from([None, "a", "b"]))
                one = world.arrival(priority=priority, tenant=tenant)
                await world.start_waiting(one, data.draw(st.integers(0, 12_000)))
            case 2:
                if waiting := list(world.waiting()):
                    world.tasks[data.draw(st.sampled_from(waiting))].cancel()
            case 3:
                world.worker(data.draw(st.sampled_from(["ready", "down"])))
            case _:
                await world.pass_s(data.draw(st.sampled_from([0.05, 1.0, 30.0])), 0.5)
        assert len(world.queue) <= TERMS.requests
        assert 0 <= world.queue.bytes <= TERMS.bytes
    world.queue.turn_away("the end")
    await asyncio.gather(*world.tasks.values(), return_exceptions=True)
    assert (len(world.queue), world.queue.bytes) == (0, 0)
    assert sum(world.queue.ends.values()) >= len(world.went)


def replace_terms(**fields: int) -> WaitingSettings:
    return WaitingSettings(**{**{f: getattr(TERMS, f) for f in TERMS.__struct_fields__}, **fields})
