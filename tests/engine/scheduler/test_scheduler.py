"""Tests of the scheduler's rules, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_pool import Stored
from engine.scheduler.scheduler import Reason, Refused, Request, SchedulerSettings, State
from tests.engine.scheduling import SIZE, Driver, alone, array, make, next_token, request


def test_a_request_is_prefilled_in_chunks_then_decoded():
    driver = Driver(make(max_num_tokens=16, max_batch_size=4))
    driver.scheduler.add(request(1, range(40), 3), 0.0)
    driver.run()
    chunks = [(c.start, c.tokens) for step in driver.steps for c in step.chunks]
    assert chunks == [(0, 16), (16, 16), (32, 8)]
    assert [len(step.decodes) for step in driver.steps] == [0, 0, 0, 1, 1]
    assert [step.decode_ctx_tokens for step in driver.steps[3:]] == [41, 42]
    assert driver.steps[1].attention_pairs == 16 * (16 + 8)
    assert len(driver.outputs[1]) == 3
    assert driver.finished == {1: "length"}
    assert driver.scheduler.kv_used_blocks == 0


def test_decodes_come_first_then_running_prefills_then_admissions():
    driver = Driver(make(max_num_tokens=16, max_batch_size=4, min_chunk_tokens=12))
    driver.scheduler.add(request(1, range(8), 9), 0.0)
    driver.step()
    driver.scheduler.add(request(2, range(100, 120), 1), 0.0)
    driver.step()
    driver.scheduler.add(request(3, range(200, 220), 1), 0.0)
    driver.step()
    last = driver.steps[-1]
    assert [one.request_id for one in last.decodes] == [1]
    assert [(c.request.request_id, c.start, c.tokens) for c in last.chunks] == [(2, 15, 5)]
    assert driver.scheduler.requests[3].reason is Reason.TOKEN_BUDGET, (
        "10 tokens are left, a chunk has 12"
    )
    driver.run()


def test_stop_tokens_and_the_models_maximum_length_end_a_request():
    prompt = list(range(9))
    first, second = alone(prompt, 2)
    driver = Driver(make())
    driver.scheduler.add(request(1, prompt, 50, stop_tokens=frozenset({second})), 0.0)
    driver.run()
    stopped_at = 1 if first == second else 2
    assert driver.finished[1] == "stop"
    assert len(driver.outputs[1]) == stopped_at
    short = Driver(make(max_model_tokens=12))
    short.scheduler.add(request(1, prompt, 50), 0.0)
    short.run()
    assert (short.finished[1], len(short.outputs[1])) == ("length", 3)


def test_cached_blocks_are_counted_and_the_last_token_is_always_computed():
    driver = Driver(make())
    prompt = list(range(3 * SIZE))
    driver.scheduler.add(request(1, prompt, 1), 0.0)
    driver.run()
    again = request(2, prompt, 1)
    longer = request(3, [*prompt, 7, 8], 1)
    driver.scheduler.add(again, 1.0)
    driver.scheduler.add(longer, 1.0)
    driver.run()
    assert again.cached_tokens == 2 * SIZE, "a whole hit would leave nothing to sample from"
    assert longer.cached_tokens == 3 * SIZE
    assert driver.scheduler.prefix_query_tokens_total == 12 + 12 + 14
    assert driver.scheduler.prefix_hit_tokens_total == 8 + 12
    assert driver.outputs[1] == driver.outputs[2]


def test_output_blocks_are_hit_by_the_next_turn():
    driver = Driver(make())
    prompt = list(range(6))
    driver.scheduler.add(request(1, prompt, 7), 0.0)
    driver.run()
    turn = [*prompt, *driver.outputs[1], 90, 91]
    following = request(2, turn, 1)
    driver.scheduler.add(following, 1.0)
    driver.run()
    # 6 + 7 tokens, the last one never computed: 12 tokens, 3 full blocks.
    assert following.cached_tokens == 12


def test_requests_with_different_hash_seeds_share_no_blocks():
    driver = Driver(make())
    for request_id, seed in ((1, 0), (2, 11), (3, 11)):
        driver.scheduler.add(request(request_id, range(12), 1, seed=seed), 0.0)
        one = driver.scheduler.requests[request_id]
        driver.run()
        assert one.cached_tokens == (8 if request_id == 3 else 0)


def test_blocks_become_visible_when_their_chunk_is_complete():
    scheduler = make(max_num_tokens=16)
    scheduler.add(request(1, range(24), 2), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert scheduler.kv_used_blocks == 6, "the whole prompt is reserved"
    assert scheduler.pool.cached_blocks == 0
    scheduler.complete(step, {}, 0.1)
    (event,) = scheduler.pool.drain_events()
    assert isinstance(event, Stored)
    assert len(event.block_hashes) == 4
    assert event.tokens.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "reason"),
    [(0, 1, "empty_prompt"), (4, 0, "no_output"), (50, 1, "too_long"), (40, 1, "kv_capacity")],
)
def test_requests_that_can_never_run_are_refused(
    prompt_tokens: int, output_tokens: int, reason: str
):
    scheduler = make(blocks=10, max_model_tokens=50)
    with pytest.raises(Refused) as refused:
        scheduler.add(request(1, range(prompt_tokens), output_tokens), 0.0)
    assert refused.value.reason == reason
    assert scheduler.requests == {}
    assert scheduler.schedule(0.0) is None


def test_the_queue_is_bounded_and_ids_are_unique():
    scheduler = make(max_queue=2)
    scheduler.add(request(1, [1]), 0.0)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request(1, [1]), 0.0)
    scheduler.add(request(2, [1]), 0.0)
    with pytest.raises(Refused) as refused:
        scheduler.add(request(3, [1]), 0.0)
    assert refused.value.reason == "queue_full"


def test_a_prompt_that_just_fits_runs_to_the_last_block():
    driver = Driver(make(blocks=10))
    driver.scheduler.add(request(1, range(39), 99), 0.0)
    driver.run()
    assert driver.finished == {1: "length"}
    assert len(driver.outputs[1]) == 1


def test_waiting_requests_have_a_reason():
    scheduler = make(blocks=20, max_batch_size=3, max_num_tokens=60, watermark=0.1)
    for request_id, tokens in ((1, 40), (2, 40), (3, 2)):
        base = 1000 * request_id
        scheduler.add(request(request_id, range(base, base + tokens), 30), float(request_id))
    requests = dict(scheduler.requests)
    driver = Driver(scheduler, now_s=4.0)
    driver.step()
    assert [requests[i].reason for i in (1, 2, 3)] == [None, Reason.KV_BLOCKS, Reason.PRIORITY]
    assert scheduler.not_scheduled_total[Reason.KV_BLOCKS] == 1
    assert scheduler.not_scheduled_total[Reason.PRIORITY] == 1
    scheduler.cancel(2)
    driver.step()
    assert requests[3].state is State.RUNNING
    for request_id in (4, 5):
        scheduler.add(request(request_id, [request_id], 30), 5.0)
        requests[request_id] = scheduler.requests[request_id]
    driver.step()
    assert requests[4].state is State.RUNNING
    assert requests[5].reason is Reason.MAX_BATCH_SIZE
    driver.run()
    assert set(driver.finished) == {1, 3, 4, 5}


def test_priorities_order_the_queue_and_ageing_lifts_a_request():
    driver = Driver(make(max_batch_size=1, max_num_tokens=16, ageing_s=10.0))
    order: list[int] = []
    for request_id, priority, arrival_s in ((1, 1, 0.0), (2, 0, 5.0), (3, 0, 11.0), (4, -1, 11.5)):
        driver.scheduler.add(request(request_id, [request_id], 1, priority=priority), arrival_s)
    driver.now_s = 12.0
    while driver.scheduler.requests:
        order += [output.request.request_id for output in driver.step()]
    # Keys: 1 -> 10.0 (one level, older), 2 -> 5.0, 3 -> 11.0, 4 -> 1.5.
    assert order == [4, 2, 1, 3]


def test_a_stream_of_high_priority_requests_starves_no_request():
    scheduler = make(max_batch_size=2, max_num_tokens=16, ageing_s=1.0)
    driver = Driver(scheduler, step_s=lambda step: 0.05)
    scheduler.add(request(0, range(30), 3, priority=5), 0.0)
    serial = 1
    while 0 not in driver.finished:
        while scheduler.waiting < 4:
            scheduler.add(request(serial, [serial % 97, 1, 2], 2), driver.now_s)
            serial += 1
        driver.step()
        assert driver.now_s < 7.0, "five levels at 1 s each, then its own few steps"
    assert driver.now_s > 4.0, "the stream did go first"


def test_request_times_come_from_the_drivers_clock():
    driver = Driver(make(max_batch_size=1, max_num_tokens=16), step_s=lambda step: 1.0)
    one, two = request(1, range(20), 2), request(2, range(5), 2)
    driver.scheduler.add(one, 0.0)
    driver.scheduler.add(two, 0.5)
    driver.run()
    assert (one.arrival_s, one.started_s, one.first_token_s) == (0.0, 0.0, 2.0)
    assert (two.arrival_s, two.started_s, two.first_token_s) == (0.5, 3.0, 4.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 0), ("max_num_tokens", 10), ("max_model_tokens", 1), ("watermark", 1.0),
        ("ageing_s", 0.0), ("max_queue", 0), ("min_chunk_tokens", 0), ("prefix_wait_tokens", -1),
    ],
)  # fmt: skip
def test_the_error_names_the_bad_setting(name: str, value: float):
    with pytest.raises(ValueError, match=name):
        SchedulerSettings(**{name: value})  # type: ignore[arg-type]


def test_prompts_are_int32_vectors():
    for wrong in (np.zeros(4, dtype=np.int64), np.zeros((2, 2), dtype=np.int32)):
        with pytest.raises(TypeError, match="int32"):
            Request(1, wrong, 1)
    with pytest.raises(TypeError):
        Request(1, array(range(8))[::2], 1)
    one = request(1, [1, 2, 3])
    one.output += [4, 5]
    assert one.tokens(1, 4).tolist() == [2, 3, 4]
    assert one.tokens(3, 5).tolist() == [4, 5]
    assert next_token(one) == next_token(request(2, [1, 2, 3, 4, 5]))
