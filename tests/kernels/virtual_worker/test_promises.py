"""Tests of the promises of a worker on virtual time in chosen cases, for the plain and the native
form alike.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkernels
from engine.step_time import StepTime
from tests.effort import examples
from tests.kernels.virtual_worker.virtual_pair import STEP_TIME, Pair, Twin, chain_of
from tests.oracles.virtual_worker import MAX_STEP_NS, own_hash

MODEL = StepTime(*STEP_TIME)
OPTIONS: dict[str, Any] = {"blocks": 64, "block_size": 4, "step_time": STEP_TIME}
NONE = np.zeros(0, dtype=np.uint64)


def run(worker: Twin) -> list[tuple[int, list[int], list[int], list[int]]]:
    """Run the worker until it is idle; return (time, first, cached, finished) of each step that
    reports something.
    """
    told = []
    while (now_ns := worker.next_ns()) >= 0:
        first, cached, finished, _changes = worker.advance(now_ns)
        if first or finished:
            told.append((now_ns, first, cached, finished))
    return told


def changes_of(worker: Twin) -> list[tuple[int, int | None, list[int]]]:
    changes = []
    while (now_ns := worker.next_ns()) >= 0:
        changes += [(kind, parent, list(h)) for kind, parent, h in worker.advance(now_ns)[3]]
    return changes


def prefill_ns(tokens: int, cached_tokens: int = 0) -> int:
    return round(MODEL.prefill_s(tokens, cached_tokens) * 1e9)


def decode_ns(*context_tokens: int) -> int:
    """Return the nanoseconds of steps with one decode each, which read the given numbers
    of tokens.
    """
    return sum(round(MODEL.decode_step_s(1, tokens) * 1e9) for tokens in context_tokens)


def test_one_request_takes_the_time_of_the_model(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    assert worker.next_ns() == -1
    assert worker.add(7, chain_of([1, 2]), 10, 3, 0, 1000) == ""
    first_ns = 1000 + prefill_ns(10)
    assert worker.next_ns() == first_ns
    end_ns = first_ns + decode_ns(11, 12)
    assert run(worker) == [(first_ns, [7], [0], []), (end_ns, [], [], [7])]
    assert worker.next_ns() == -1
    stats = worker.stats(end_ns + 5)
    assert (stats.busy_ns, stats.steps, stats.query_tokens) == (end_ns - 1000, 3, 10)
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)


def test_a_request_that_arrives_during_a_step_waits_for_its_end(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    worker.add(1, chain_of([1]), 6, 1, 0, 0)
    worker.add(2, chain_of([2]), 7, 1, 0, 0)  # the same nanosecond, and yet too late
    assert worker.queued_tokens(0) == 13
    first_ns = prefill_ns(6)
    second_ns = first_ns + prefill_ns(7)
    assert run(worker) == [(first_ns, [1], [0], [1]), (second_ns, [2], [0], [2])]


def test_a_cached_prefix_is_not_computed_again(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    chain = chain_of([1, 2, 3])
    worker.add(1, chain, 14, 1, 0, 0)
    (end_ns, *_rest) = run(worker)[0]
    assert worker.hit_blocks(chain) == 3
    assert worker.hit_blocks(chain_of([1, 2, 9])) == 2
    worker.add(2, chain_of([1, 2, 9]), 13, 1, 0, end_ns)
    assert run(worker) == [(end_ns + prefill_ns(5, cached_tokens=8), [2], [8], [2])]
    assert worker.stats(end_ns + 10**9).hit_tokens == 8


def test_changes_list_the_blocks_of_prompt_and_answer(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    chain = [int(one) for one in chain_of([1, 2, 3])]
    worker.add(5, np.array(chain, dtype=np.uint64), 9, 8, 0, 0)  # two, and one answered
    own = own_hash(5, 3)
    expected = [(0, None, chain[:2]), (0, chain[1], [chain[2]]), (0, chain[2], [own])]
    assert changes_of(worker) == expected
    now_ns = 10**12
    snapshot = worker.snapshot(now_ns)
    assert [(parent, list(run)) for parent, run in snapshot] == [(None, [*chain, own])]


def test_a_snapshot_lists_parents_first_and_forks_by_hash(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    for request_id, path in enumerate(([1, 2, 3], [1, 2, 4], [1, 5], [6])):
        worker.add(request_id, chain_of(path), 4 * len(path), 1, 0, 10**10 * request_id)
        run(worker)
    snapshot = worker.snapshot(10**11)
    following = {int(h): int(after) for _, run in snapshot for h, after in pairwise(run)}
    one, two, five = int(chain_of([1])[0]), int(chain_of([1, 2])[1]), int(chain_of([1, 5])[1])
    assert following[one] == min(two, five)
    assert following[two] == min(int(chain_of([1, 2, leaf])[2]) for leaf in (3, 4))
    seen: set[int] = set()
    for parent, hashes in snapshot:
        assert parent is None or parent in seen
        seen.update(hashes.tolist())
    assert len(seen) == 6
    roots = [int(hashes[0]) for parent, hashes in snapshot if parent is None]
    assert roots == sorted(roots)


def test_an_eviction_is_reported_at_the_end_of_its_step(make: type[Twin]) -> None:
    worker = make(**(OPTIONS | {"blocks": 4}))
    worker.add(1, chain_of([1, 2, 3]), 12, 1, 0, 0)
    run(worker)
    worker.add(2, chain_of([4, 5]), 9, 1, 0, 10**9)
    assert worker.advance(10**9)[3] == []
    old, new = chain_of([1, 2, 3]).tolist(), chain_of([4, 5]).tolist()
    assert changes_of(worker) == [(1, None, [old[2], old[1]]), (0, None, new)]
    assert worker.stats(10**10).evicted == 2


def test_a_step_in_flight_keeps_its_length_if_the_speed_changes(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    worker.add(1, NONE, 3, 3, 0, 0)
    worker.set_speed(0.5, 10)
    first_ns = prefill_ns(3)
    slow_ns = sum(round(MODEL.decode_step_s(1, at) / 0.5 * 1e9) for at in (4, 5))
    assert run(worker) == [(first_ns, [1], [0], []), (first_ns + slow_ns, [], [], [1])]


def test_a_cancelled_request_is_dropped_and_its_step_continues(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    worker.add(1, chain_of([1]), 6, 9, 0, 0)
    assert worker.cancel(1, 5)
    assert not worker.cancel(1, 5)
    worker.add(1, chain_of([2]), 7, 1, 0, 6)  # its id is free again
    end_ns = prefill_ns(6) + prefill_ns(7)
    assert run(worker) == [(end_ns, [1], [0], [1])]
    assert worker.stats(end_ns).busy_ns == end_ns


def test_blocks_of_requests_running_during_a_clear_stay_private(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    worker.add(1, chain_of([1, 2]), 9, 2, 0, 0)
    worker.clear(5)
    assert worker.next_ns() == 5
    assert changes_of(worker) == [(2, None, [])]
    assert worker.hit_blocks(chain_of([1, 2])) == 0
    assert worker.snapshot(10**12) == []


def test_an_abort_ends_all_requests_but_keeps_the_totals(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    for request_id in (3, 1, 2):
        worker.add(request_id, chain_of([request_id]), 6, 100, 0, 0)
    now_ns = worker.next_ns() + 1
    before = worker.stats(now_ns)
    assert worker.abort(now_ns) == [3, 1, 2]
    assert worker.advance(now_ns)[0] == [3], "what it had said before is heard"
    after = worker.stats(now_ns + 10**6)
    assert after[:2] == before[:2]
    assert (after.running, after.waiting, after.used_blocks) == (0, 0, 0)
    assert worker.queued_tokens(now_ns + 10**6) == 0
    assert (worker.next_ns(), worker.hit_blocks(chain_of([3]))) == (-1, 0)
    assert worker.add(3, chain_of([3]), 6, 1, 0, now_ns + 10**6) == ""
    assert run(worker)[0][1:] == ([3], [0], [3])


def test_progress_counts_the_tokens_so_far(make: type[Twin]) -> None:
    worker = make(**OPTIONS)
    worker.add(9, NONE, 3, 50, 0, 0)
    middle_ns = prefill_ns(3) + decode_ns(4, 5, 6) + 1
    ids, tokens = worker.progress(middle_ns)
    assert (ids.tolist(), tokens.tolist()) == ([9], [4])
    assert (ids.dtype, tokens.dtype) == (np.int64, np.int32)
    assert worker.next_ns() == middle_ns, "the first token has not been fetched"


CONSTANT = st.floats(0.0, 1e300)
SECONDS = st.floats(0.0, 1e-2)


@settings(max_examples=examples(300), deadline=None)
@given(
    constants=st.tuples(
        *[SECONDS | CONSTANT] * 5,
        st.floats(0.0, 1.0),
        *[SECONDS | CONSTANT] * 2,
        st.floats(0.25, 64.0),
    ),
    speed=st.floats(1e-3, 1e3),
    prompt_tokens=st.integers(1, 200),
    others=st.integers(0, 3),
)
def test_native_and_python_step_lengths_are_equal_to_the_last_bit(
    constants: tuple[float, ...], speed: float, prompt_tokens: int, others: int
) -> None:
    options = OPTIONS | {"step_time": constants, "speed": speed, "max_num_tokens": 256}
    pair = Pair(cast(type[Twin], kvkernels.VirtualWorker), **options)
    for request_id in range(others + 1):
        pair.at("add", request_id, NONE, prompt_tokens % 50 + 1, 5, 0)
    for _ in range(others + 8):
        pair.run_until(max(pair.now_ns, pair.native.next_ns()))


def test_a_step_has_a_longest_and_a_shortest_length(make: type[Twin]) -> None:
    worker = make(**(OPTIONS | {"step_time": (1e300,) * 5 + (1.0,) + (1e300,) * 2 + (1.0,)}))
    worker.add(1, NONE, 3, 1, 0, 0)
    assert worker.next_ns() == MAX_STEP_NS
    worker = make(**(OPTIONS | {"step_time": (0.0,) * 8 + (1.0,)}))
    worker.add(1, NONE, 3, 3, 0, 0)
    assert run(worker) == [(1, [1], [0], []), (3, [], [], [1])]


def test_a_preempted_request_starts_again_in_a_later_step(make: type[Twin]) -> None:
    """A request that was preempted starts again only in a later step. After a clear the second
    request has published the first one's prefix anew, so all that the first holds is its own, and
    it would fit again at the moment when it is preempted.
    """
    worker = make(**(OPTIONS | {"blocks": 10, "watermark": 0.0, "prefix_wait_tokens": 0}))
    chain = chain_of([1, 2])
    worker.add(1, chain, 9, 20, 1, 0)
    now_ns = worker.next_ns()
    worker.advance(now_ns)
    worker.clear(now_ns)
    worker.add(2, chain, 9, 12, 0, now_ns)
    while worker.stats(now_ns).preemptions == 0:
        now_ns += 100_000
    stats = worker.stats(now_ns)
    assert (stats.running, stats.waiting, stats.used_blocks) == (1, 1, 5)
    ended = run(worker)
    assert [finished for *_, finished in ended if finished] == [[2], [1]]
    stats = worker.stats(ended[-1][0])
    assert (stats.steps, stats.preemptions, stats.recomputed_tokens) == (21, 1, 13)


def test_a_worker_that_raised_an_error_refuses_further_calls() -> None:
    """A virtual worker that has raised an error after bad input refuses all further calls. Chains
    that do not name prefixes may break the native worker in the middle of a step.
    """
    worker = cast(type[Twin], kvkernels.VirtualWorker)(**OPTIONS)
    worker.add(1, np.array([5, 6], dtype=np.uint64), 9, 1, 0, 0)
    run(worker)
    now_ns = 10**9
    with pytest.raises(RuntimeError, match="chains must name prefixes"):
        worker.add(2, np.array([7, 6, 6, 6], dtype=np.uint64), 17, 1, 0, now_ns)
    for call in (worker.advance, worker.stats, worker.abort):
        with pytest.raises(RuntimeError, match="broke in an earlier call; make a new one"):
            call(now_ns)
    assert worker.next_ns() == -1
    with pytest.raises(AssertionError, match="broke in an earlier call"):
        worker.check()
