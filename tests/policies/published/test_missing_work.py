"""Tests of published rules that price uncached tokens, against costs computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Dispatched, Finish
from policies.load import load
from policies.pick import pick
from policies.published.lmetric import LMetric
from policies.published.lpwl import Lpwl
from policies.published.mooncake import Mooncake
from policies.published.ramjet import Ramjet
from policies.published.recent import NO_CLASS, HotClasses, class_of, hit_blocks
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of
from tests.policies.published.asked import costs_of, sent, spill_depth, state_of

INF, NAN = np.inf, np.nan


# --- lmetric ---------------------------------------------------------------------------------


def test_lmetric_multiplies_tokens_and_requests():
    columns = {
        "hit_tokens": [600, 0, 999],
        "queued_prefill_tokens": [200.0, 50.0, 0.0],
        "running": [1, 0, 2],
        "waiting": [1, 0, 0],
    }
    assert costs_of(LMetric(), **columns) == [600.0 * 3, 1_050.0, 3.0]
    assert costs_of(LMetric(queued=False), **columns) == [400.0 * 3, 1_000.0, 3.0]
    assert costs_of(LMetric(), hit_tokens=[5_000]) == [1.0]


def test_lmetric_leaves_the_cached_worker_at_its_spill_depth():
    # 700 tokens behind 6,000: 6,700 / 700 - 1 = 8.6 requests.
    assert spill_depth(LMetric(), request_of(prompt_tokens=6_700), 6_000) == 9


CHAIN = range(1, 11)


@pytest.mark.parametrize(
    ("wins", "others", "left"),
    [
        (1, 0, False),  # a holder has not won often enough
        (2, 0, True),
        (2, 5, True),  # 3 / 5 of one class against 1 / 3 of the workers
        (2, 10, False),  # 3 / 10: not as hot as that
    ],
)
def test_lmetric_leaves_the_cached_worker_of_a_hot_class_once(wins, others, left):
    first = [sent(CHAIN)]
    foreign = [sent([1000 + n] * 10) for n in range(others)]
    facts = first + foreign + [sent(CHAIN, hit_tokens=64)] * wins
    request = request_of(prompt_tokens=160)
    columns = {"hit_tokens": [64, 0, 48, 0]}
    expected = [INF if left else 96.0, 160.0, 112.0, 160.0]
    assert costs_of(LMetric(), request, facts, **columns) == expected
    if left:  # the copy that it made counts as no win
        after = [*facts, sent(CHAIN, worker_id=1)]
        assert costs_of(LMetric(), request, after, **columns)[0] == 96.0
    assert costs_of(LMetric(hot_spots=False), request, facts, **columns)[0] == 96.0


def test_lmetric_leaves_two_cached_workers_after_four_wins_and_never_all():
    request = request_of(prompt_tokens=160)
    three = [sent(CHAIN, hit_tokens=64)] * 3
    four = [sent(CHAIN, hit_tokens=64)] * 4
    two_of_three = {"hit_tokens": [64, 64, 0]}
    assert np.isfinite(costs_of(LMetric(), request, three, **two_of_three)).all()
    assert costs_of(LMetric(), request, four, **two_of_three) == [INF, INF, 160.0]
    assert np.isfinite(costs_of(LMetric(), request, four, hit_tokens=[64, 64])).all()


def test_lmetric_counts_a_prompt_as_long_as_its_class_as_fully_cached():
    facts = [sent(range(1, 5), hit_tokens=63)] * 2  # all but the last token of 64
    request = request_of(prompt_tokens=64)
    assert costs_of(LMetric(), request, facts, hit_tokens=[63, 0]) == [INF, 64.0]


def test_lmetric_does_not_classify_prompts_shorter_than_a_block():
    facts = [Dispatched(0.0, 0, 0, 0, 9, np.array([], dtype=np.uint64))] * 9
    assert costs_of(LMetric(), request_of(prompt_tokens=9), facts, hit_tokens=[0, 0]) == [9.0, 9.0]


@pytest.mark.parametrize("bad", [{"class_blocks": 0}, {"window": 0}])
def test_lmetric_rejects_invalid_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LMetric(**bad)


@settings(max_examples=examples(200))
@given(st.integers(1, 64), st.integers(1, 200), st.integers(0, 63), st.data())
def test_hit_blocks_are_derived_without_the_block_size(size, blocks, rest, data):
    held = data.draw(st.integers(0, blocks))
    prompt = blocks * size + rest % size
    hit_tokens = min(held * size, prompt - 1)
    fact = Dispatched(0.0, 0, 0, hit_tokens, prompt - hit_tokens, np.zeros(blocks, np.uint64))
    full_but_one = held * size == prompt and size == 1
    assert hit_blocks(fact) == held - full_but_one


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=60))
def test_hot_classes_are_counted_within_the_window(events):
    classes, classified = HotClasses(8, 4), []
    for first, held in events:
        chain = [] if first == 5 else [first * 100 + n for n in range(6)]
        fact = sent(chain, hit_tokens=16 * held if chain else 0)
        classes.dispatched(fact)
        classified.append((class_of(fact.chain, 4), bool(chain) and held >= 4))
    window = [key for key, _ in classified[-8:]]
    assert list(classes.recent) == window
    assert classes.counts == {key: window.count(key) for key in set(window)}
    assert set(classes.wins) <= set(window) - {NO_CLASS}
    for key, wins in classes.wins.items():
        last = [held for other, held in classified if other == key]
        assert last[-wins:] == [True] * wins


# --- lpwl ------------------------------------------------------------------------------------


def test_lpwl_adds_queued_and_missing_tokens():
    costs = costs_of(
        Lpwl(), hit_tokens=[600, 0, 0], queued_prefill_tokens=[200.0, 50.0, 50.0], running=[3, 1, 0]
    )
    assert costs == [600.75, 1_050.25, 1_050.0]


def test_lpwl_breaks_ties_by_requests_and_never_spills_by_decode():
    assert pick(np.array(costs_of(Lpwl(), running=[2, 1, 5])), 0.9) == 1
    assert spill_depth(Lpwl(), request_of(), 160, limit=1_000) is None


# --- ramjet ----------------------------------------------------------------------------------


def test_ramjet_caps_the_value_of_a_prefix():
    columns = {
        "hit_tokens": [40_960, 38_912, 0],
        "queued_prefill_tokens": [4_096.0, 0.0, 0.0],
        "running": [2, 1, 1],
    }
    assert costs_of(Ramjet(), **columns) == [4 * 2.5, 4 + 4, 32 + 4]
    assert costs_of(Ramjet(relative=False), **columns) == [4 * 2.5 - 32, 4 - 32, 4]


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize(("prefix", "depth"), [(6_144, 3), (16_384, 8), (64_000, 8)])
def test_ramjet_leaves_the_cached_worker_at_its_spill_depth(relative, prefix, depth):
    request = request_of(prompt_tokens=prefix + 700)
    assert spill_depth(Ramjet(relative=relative), request, prefix) == depth + 1


@pytest.mark.parametrize(
    "bad",
    [{"point_tokens": 0.0}, {"request_tokens": NAN}, {"max_points": -1.0}, {"load_weight": INF}],
)
def test_ramjet_rejects_invalid_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Ramjet(**bad)


# --- mooncake --------------------------------------------------------------------------------


def test_mooncake_estimates_the_time_to_first_token():
    columns = {
        "hit_tokens": [600, 0, 1_000],
        "queued_prefill_tokens": [200.0, 500.0, 0.0],
        "prefill_tokens_per_s": [1_000.0, 2_000.0, 1_000.0],
        "running": [9, 0, 0],
        "pair_tokens": 0.001,
    }
    assert costs_of(Mooncake(), **columns) == pytest.approx(
        [
            0.2 + 400 * (1 + 0.001 * (600 + 200)) / 1_000,
            0.25 + 1_000 * (1 + 0.001 * 500) / 2_000,
            (1 + 0.001 * 999.5) / 1_000,
        ]
    )


def test_mooncake_leaves_the_cached_worker_by_its_queue_only():
    request = request_of(prompt_tokens=6_700)
    assert spill_depth(Mooncake(), request, 6_000, limit=500) is None
    held = {"hit_tokens": [6_000, 0]}
    for queued, row in ((5_990.0, 0), (6_010.0, 1)):
        costs = costs_of(Mooncake(), request, **held, queued_prefill_tokens=[queued, 0.0])
        assert pick(np.array(costs), 0.0) == row


# --- costs taken apart -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lpwl", "mooncake", "ramjet", "dynamo", "jsew", "preble"])
def test_terms_add_up_to_the_costs(name):
    policy = load(name)
    facts = [sent(range(20)), sent(range(9), 2, hit_tokens=64, request_id=1)]
    state = policy.initial_state()
    for fact in [*facts, Finish(1.0, 1, output_tokens=30)]:
        state = policy.observe(fact, state)
    fleet = fleet_of(
        hit_tokens=[320, 0, 144], queued_prefill_tokens=[90.0, 0.0, 7.0], running=[4, 0, 1]
    )
    terms = policy.terms(request_of(), fleet, state)
    assert all(term.any() for term in terms.values())
    np.testing.assert_allclose(
        sum(terms.values()), policy.costs(request_of(), fleet, state), rtol=1e-12
    )


def test_the_terms_of_lmetric_are_factors():
    fleet = fleet_of(hit_tokens=[320, 0], queued_prefill_tokens=[90.0, 0.0], running=[4, 0])
    terms = LMetric().terms(request_of(), fleet, state_of(LMetric()))
    assert {name: term.tolist() for name, term in terms.items()} == {
        "tokens": [770.0, 1_000.0],
        "batch_requests": [5.0, 1.0],
    }
