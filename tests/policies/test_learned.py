"""The learned choice: its features by hand, and the rules that it can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.load import PolicyError, load
from policies.pick import pick
from policies.published.choice_features import FEATURES, features
from policies.published.hashing import weights
from policies.published.learned import Learned, trained
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of

NAN = math.nan


def theta(**coefficients):
    assert coefficients.keys() <= set(FEATURES)
    return ",".join(str(coefficients.get(name, 0.0)) for name in FEATURES)


LMETRIC = theta(log_ptok=-1.0, log_batch=-1.0)


def test_features_by_hand():
    request = request_of(prompt_tokens=4_096, home_id=1)
    fleet = fleet_of(
        hit_tokens=[2_048, 0, 5_000],
        queued_prefill_tokens=[1_024.0, 0.0, 2_048.0],
        running=[3, 0, 8],
        waiting=[1, 0, 8],
        context_tokens=[10_000.0, 0.0, 0.0],
        kv_capacity_tokens=[20_000.0, NAN, 40_000.0],
    )
    table = dict(zip(FEATURES, features(request, fleet).tolist(), strict=True))
    kv = [(10_000 + 1_024 + 2_048) / 20_000, 4_096 / (65_536 * 16), 2_048 / 40_000]
    prefill, requests = [0.125, 0.0, 0.25], [0.125, 0.0, 0.5]
    expected = {
        # (queued + missing + kv in use and to come) / prompt, all of them in blocks
        "default_cost": [(1_024 + 2_048 + 13_072) / 4_096, 8_192 / 4_096, 4_096 / 4_096],
        "overlap_frac": [0.5, 0.0, 1.0],
        "new_prefill": [0.25, 0.5, 1 / 8_192],  # the last token is computed anyway
        "active_prefill": prefill,
        "kv_load": kv,
        "active_requests": requests,
        "session_affinity": [0.0, 1.0, 0.0],
        "prompt_x_active_prefill": [0.0625, 0.0, 0.125],
        "log_ptok": [math.log(3.0), math.log(4.0), math.log(2_049 / 1_024)],
        "log_new_prefill": [math.log(2.0), math.log(4.0), -math.log(1_024)],
        "log_batch": [math.log(5.0), 0.0, math.log(17.0)],
        "kv_load_ratio": [x / (0.01 + sum(kv) / 3) for x in kv],
        "active_prefill_ratio": [x / (0.0625 + 0.125) for x in prefill],
        "active_requests_ratio": [x / (0.03125 + 0.625 / 3) for x in requests],
        "kv_load_below": [2 / 3, 0.0, 1 / 3],
        "active_prefill_below": [1 / 3, 0.0, 2 / 3],
        "active_requests_below": [1 / 3, 0.0, 2 / 3],
        "kv_load_excess": [max(x - sum(kv) / 3, 0.0) for x in kv],
        "active_prefill_excess": [0.0, 0.0, 0.125],
        "active_requests_excess": [0.0, 0.0, 0.5 - 0.625 / 3],
        "new_prefill_x_requests": [0.03125, 0.0, 0.5 / 8_192],
        "prefill_attn": [0.25 * 0.375, 0.5 * 0.25, (1 / 8_192) * (0.5 - 0.5 / 8_192)],
    }
    for name, values in expected.items():
        assert table[name] == pytest.approx(values), name
    assert sum(table["hash_home"]) == 2.0


def test_hash_home_is_of_the_first_256_tokens():
    ids = np.arange(8)
    chain = np.arange(100, 200, dtype=np.uint64)
    home = features(request_of(chain=chain, prompt_tokens=1_600), fleet_of(worker_id=ids))[11]
    assert set(np.flatnonzero(home)) == set(np.argsort(weights(115, ids, 0))[-2:])
    other = chain.copy()
    other[16:] += np.uint64(1_000)  # what comes later does not matter
    again = features(request_of(chain=other, prompt_tokens=1_600), fleet_of(worker_id=ids))[11]
    assert home.tolist() == again.tolist()
    short = features(request_of(prompt_tokens=15), fleet_of(worker_id=ids))[11]
    assert short.tolist() == [0.0] * 8
    assert features(request_of(), fleet_of(worker_id=[4, 5]))[11].tolist() == [1.0, 1.0]


columns = st.integers(1, 8).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "hit_tokens": st.lists(st.integers(0, 999), min_size=n, max_size=n),
            "queued_prefill_tokens": st.lists(st.integers(0, 10_000), min_size=n, max_size=n),
            "running": st.lists(st.integers(0, 60), min_size=n, max_size=n),
        }
    )
)


@settings(max_examples=examples(100))
@given(columns)
def test_it_can_be_lmetric_with_queued_prefill(columns):
    fleet = fleet_of(**columns)
    product = (fleet.queued_prefill_tokens + 1_000 - fleet.hit_tokens) * (fleet.requests + 1.0)
    chosen = pick(Learned(LMETRIC).costs(request_of(), fleet, None), 0.0)
    assert product[chosen] <= product.min() * (1 + 1e-6)


@settings(max_examples=examples(100))
@given(columns)
def test_it_can_be_dynamos_default(columns):
    fleet = fleet_of(**columns)
    blocks = (fleet.queued_prefill_tokens * 2 + 2 * (1_000 - fleet.hit_tokens)) / 16
    chosen = pick(Learned(theta(default_cost=-1.0)).costs(request_of(), fleet, None), 0.0)
    assert blocks[chosen] <= blocks.min() + 1e-6


@pytest.mark.parametrize(("hit", "depth"), [(6_000, 8), (3_350, 1)])
def test_spill_depth_with_lmetrics_coefficients(hit, depth):
    """6,700 tokens of which 700 are missing: the product is reached at 6,700 / 700 = 9.6."""
    request = request_of(prompt_tokens=6_700)

    def row(requests):
        fleet = fleet_of(hit_tokens=[hit, 0], running=[requests, 0])
        return pick(Learned(LMETRIC).costs(request, fleet, None), 0.99)

    assert row(depth - 1) == 0
    assert row(depth + 1) == 1


def test_the_trained_coefficients_are_what_it_takes():
    assert load("learned").policy == Learned()
    told = ",".join(map(repr, trained()))
    fleet = fleet_of(hit_tokens=[600, 0, 100], running=[9, 0, 2])
    expected = Learned(told).costs(request_of(), fleet, None).tolist()
    assert Learned().costs(request_of(), fleet, None).tolist() == expected


def test_terms_add_up_to_the_costs():
    policy = Learned(theta(log_ptok=-1.0, log_batch=-0.5, overlap_frac=0.25, hash_home=0.1))
    view = (request_of(), fleet_of(hit_tokens=[600, 0, 100], running=[9, 0, 2]), None)
    terms = policy.terms(*view)
    assert set(terms) == {"log_ptok", "log_batch", "overlap_frac", "hash_home"}
    assert terms["log_batch"].tolist() == pytest.approx([0.5 * math.log(n + 1) for n in (9, 0, 2)])
    assert sum(terms.values()).tolist() == pytest.approx(policy.costs(*view).tolist())


@pytest.mark.parametrize(
    "bad", ["1,2,3", theta() + ",0", theta(log_ptok=math.inf), theta(log_ptok=NAN), "a,b", ","]
)
def test_senseless_coefficients_are_refused(bad):
    with pytest.raises(PolicyError, match="theta"):
        load(f"learned?theta={bad}")


@settings(max_examples=examples(20), deadline=None)
@given(
    told=st.lists(st.sampled_from([0.0, 0.0, 0.0, -1.0, 0.7]), min_size=23, max_size=23),
    hits=st.lists(st.integers(0, 640), min_size=1, max_size=5),
)
def test_features_of_no_weight_are_left_out_and_change_nothing(told, hits):
    request = request_of(chain=np.arange(1, 41, dtype=np.uint64), prompt_tokens=640)
    fleet = fleet_of(worker_id=range(len(hits)), hit_tokens=hits, running=hits)
    costs = Learned(",".join(map(str, told))).costs(request, fleet, None)
    whole = np.add.reduce(features(request, fleet) * -np.array(told)[:, np.newaxis], axis=0)
    np.testing.assert_array_equal(costs, whole)
