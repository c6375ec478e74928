"""Tests of Preble against costs computed by hand, and of its window of time against a
plain count.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Arrival, Failure, Finish, FirstToken
from policies.pick import pick
from policies.published import preble_window
from policies.published.preble import Preble
from policies.published.preble_window import PrebleWindow
from policies.published.window_sums import MAX_KEYS, SLICES, WindowSums
from tests.effort import examples
from tests.policies.fleet import request_of
from tests.policies.published.asked import costs_of, sent, spill_depth, state_of

INF, NAN = np.inf, np.nan


# --- the rule --------------------------------------------------------------------------------


def test_preble_explores_by_the_work_within_the_window():
    facts = [
        sent(range(50), worker_id=0, hit_tokens=300, request_id=0),  # 500 new tokens after 300
        sent(range(25), worker_id=0, request_id=1),  # 400
        sent(range(10), worker_id=1, request_id=2),  # 160
        Finish(1.0, 2, output_tokens=30),
        Finish(1.0, 1, output_tokens=50),
    ]
    columns = {
        "hit_tokens": [0, 400, 0],
        "running": [1, 0, 2],
        "prefill_tokens_per_s": [1_000.0, 1_000.0, 2_000.0],
        "step_s": [0.01, 0.01, 0.02],
    }
    assert costs_of(Preble(), facts=facts, **columns) == pytest.approx(
        [0.9 + 40 * 0.01 + 1.0, 0.16 + 0.6, 2 * 40 * 0.02 + 0.5]
    )
    pairs = (500 * (300 + 250) + 400 * 200, 160 * 80, 0)
    own = (1_000 * 500, 600 * (400 + 300), 1_000 * 500)
    expected = [
        (900 + 0.001 * pairs[0]) / 1_000 + 0.4 + (1_000 + 0.001 * own[0]) / 1_000,
        (160 + 0.001 * pairs[1]) / 1_000 + (600 + 0.001 * own[1]) / 1_000,
        1.6 + (1_000 + 0.001 * own[2]) / 2_000,
    ]
    assert costs_of(Preble(), facts=facts, pair_tokens=0.001, **columns) == pytest.approx(expected)


def test_preble_exploits_if_more_is_cached_than_missing():
    assert costs_of(Preble(), hit_tokens=[500, 499, 0]) == pytest.approx([0.05, 0.0501, 0.1])
    assert costs_of(Preble(), hit_tokens=[501, 499, 600]) == pytest.approx([0.0499, INF, 0.04])


def test_preble_leaves_the_cached_worker_at_its_spill_depth():
    assert spill_depth(Preble(), request_of(prompt_tokens=6_700), 6_000, limit=300) is None
    # Less than half: 300 ms of prefill against 20 tokens of 10 ms a request.
    answered = state_of(Preble(), [Finish(0.0, 1, output_tokens=20)])
    request = request_of(prompt_tokens=6_700)
    assert spill_depth(Preble(), request, 3_000, state=lambda _: answered) == 2


PREFIX = list(range(1, 401))


def served(ttft_s, older=20, newer=20, worker_id=0):
    """Return the facts of requests with one prefix in both halves of Preble's window, with the wait
    of each.
    """
    facts, number = [], 0
    for start_s, count, wait_s in ((10.0, older, ttft_s[0]), (120.0, newer, ttft_s[1])):
        for n in range(count):
            number += 1
            chain = [*PREFIX, *range(1_000 * number, 1_000 * number + 10)]
            at_s = start_s + 0.1 * n
            facts.append(sent(chain, worker_id, hit_tokens=6_400, request_id=number, now_s=at_s))
            facts.append(FirstToken(at_s + wait_s, number))
    return sorted(facts, key=lambda fact: fact.now_s)


@pytest.mark.parametrize(
    ("changes", "waits_s", "grows"),
    [
        ({}, (0.5, 1.0), True),
        ({}, (0.5, 0.9), False),  # the wait is no longer than before
        ({"warmup_requests": 21}, (0.5, 1.0), False),  # 40 requests at two workers
        ({"imbalance": 7.0}, (0.5, 1.0), False),  # 0.64 s of work against 0.1 s
    ],
)
def test_preble_creates_a_replica_at_the_least_loaded_worker(changes, waits_s, grows):
    policy = Preble(**{"warmup_requests": 20} | changes)
    other = [sent(range(5_000, 5_063), 1, now_s=119.0, request_id=99)]  # 1,008 tokens: 0.1 s
    facts = sorted(served(waits_s)[:-2] + other + served(waits_s)[-2:], key=lambda f: f.now_s)
    chain = np.array([*PREFIX, *range(9_000, 9_010)], dtype=np.uint64)
    request = request_of(prompt_tokens=6_560, chain=chain)
    costs = costs_of(policy, request, facts, hit_tokens=[6_400, 0])
    assert costs[0] == pytest.approx(0.64 + 0.016)
    assert costs[1] == (pytest.approx(0.1008 + 0.656) if grows else INF)


def test_preble_creates_no_replica_if_another_worker_is_the_loaded_one():
    elsewhere = sent(range(5_000, 5_700), 1, now_s=130.0, request_id=99)  # 11,200 tokens
    facts = [*served((0.5, 1.0)), elsewhere]
    chain = np.array(PREFIX, dtype=np.uint64)
    request = request_of(prompt_tokens=6_500, chain=chain)
    policy = Preble(warmup_requests=0)
    columns = {"hit_tokens": [6_400, 0, 0]}
    assert costs_of(policy, request, facts, **columns)[1:] == [INF, INF]
    assert costs_of(policy, request, facts[:-1], **columns)[1:] == [pytest.approx(0.65)] * 2


@pytest.mark.parametrize(
    "bad",
    [{"window_s": 0.0}, {"imbalance": 0.9}, {"ttft_ratio": NAN}, {"warmup_requests": -1}],
)
def test_preble_rejects_invalid_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Preble(**bad)


# --- its window ------------------------------------------------------------------------------


def test_a_node_is_large_if_it_is_twice_as_long_as_its_parent():
    window = PrebleWindow(180.0)
    chain = list(range(100))
    for number, blocks in enumerate((3, 5, 40, 60, 90)):
        window.observe(sent(chain, hit_tokens=16 * blocks, request_id=number))
    assert window.large_nodes(np.array(chain, np.uint64)) == [chain[2], chain[39]]
    assert window.large_nodes(np.array(chain[:39], np.uint64)) == [chain[2]]
    assert window.large_nodes(np.array([7] * 100, np.uint64)) == []
    assert window.large_nodes(np.array([], np.uint64)) == []


def test_the_state_of_the_preble_window_is_bounded(monkeypatch):
    monkeypatch.setattr(preble_window, "MAX_UNDER_WAY", 10)
    window = PrebleWindow(180.0)
    for number in range(1_000):
        chain = [number * 1_000 + n for n in range(number % 90 + 2)]
        window.observe(sent(chain, hit_tokens=16, request_id=number, now_s=0.1 * number))
        window.observe(Finish(0.1 * number, 5_000 + number, output_tokens=number))
    assert len(window._nodes) == len(window._depths) == preble_window.MAX_NODES
    assert len(window._under_way) == 10
    assert window.median_output_tokens == statistics.median(range(1_000 - 256, 1_000))


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from(["send", "first", "end", "fail"]), st.integers(0, 3))))
def test_only_first_tokens_of_running_requests_are_timed(events):
    window, since, times = PrebleWindow(1e6), {}, []
    window.observe(sent(PREFIX, hit_tokens=6_400, request_id=50))  # the node
    for now, (what, number) in enumerate(events):
        if what == "send":
            window.observe(sent(PREFIX, hit_tokens=6_400, request_id=number, now_s=float(now)))
            since[number] = now
        elif what == "first":
            window.observe(FirstToken(float(now), number))
            if number in since:
                times.append(now - since.pop(number))
        else:
            window.observe(
                Finish(float(now), number) if what == "end" else Failure(float(now), number, "busy")
            )
            since.pop(number, None)
    total = window.ttft.totals.get(PREFIX[-1], [0.0, 0.0])
    assert total == [float(sum(times)), float(len(times))]


def test_an_arrival_removes_expired_work_from_the_window():
    window = state_of(Preble(window_s=60.0), [sent(range(10), now_s=5.0)])
    assert window.work.totals[0][0] == 160
    chains = {16: np.array([], np.uint64)}
    window.observe(Arrival(59.0, 1, "m", 10, chains))
    assert window.work.totals[0][0] == 160
    window.observe(Arrival(60.0, 2, "m", 10, chains))
    assert window.work.totals == {}


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(st.floats(0.0, 40.0), st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)),
        max_size=40,
    )
)
def test_window_sums_equal_a_plain_count(events):
    sums, added, now_s = WindowSums(60.0), [], 0.0
    for gap_s, key, first, second in events:
        now_s += gap_s
        sums.add(now_s, key, float(first), float(second))
        added.append((math.floor(now_s / 10.0), key, first, second))
    newest = math.floor(now_s / 10.0)
    for key in range(4):
        mine = [(newest - n, a, b) for n, k, a, b in added if k == key and newest - n < SLICES]
        expected = [sum(a for _, a, _ in mine), sum(b for _, _, b in mine)] if mine else None
        assert sums.totals.get(key) == expected
        for got, ages in zip(sums.halves(key), (range(3, 6), range(3)), strict=True):
            half = [(a, b) for age, a, b in mine if age in ages]
            count = sum(b for _, b in half)
            assert got == pytest.approx(
                sum(a for a, _ in half) / count if count else NAN, nan_ok=True
            )


def test_a_full_slice_ignores_new_keys_and_counts_known_ones():
    sums = WindowSums(60.0)
    for key in range(MAX_KEYS + 5):
        sums.add(1.0, key, 1.0, 1.0)
    sums.add(2.0, 0, 1.0, 1.0)
    assert len(sums.totals) == MAX_KEYS
    assert sums.totals[0] == [2.0, 2.0]


def test_the_cheapest_allowed_worker_is_chosen():
    assert pick(np.array(costs_of(Preble(), hit_tokens=[600, 700, 0])), 0.0) == 1
