"""Tests of published rules with hash rings and memories of sessions, which do not ask which cache
holds a prefix.
"""

from __future__ import annotations

import numpy as np
import pytest

from policies.facts import Finish
from policies.pick import pick
from policies.published.chwbl import Chwbl
from policies.published.hashing import distances
from policies.published.prefix_hash import PrefixHash
from policies.published.session_sticky import SessionSticky
from policies.published.trt_llm_conversation import TrtLlmConversation
from tests.policies.fleet import fleet_of, request_of
from tests.policies.published.holder import costs_of, leaves_holder_at, sent

RINGS = pytest.mark.parametrize("policy", [PrefixHash(), Chwbl()])


def request_with_key(number):
    return request_of(chain=np.arange(62, dtype=np.uint64) + np.uint64(1_000 * (number + 1)))


def owner(policy, number, ids=range(8)):
    ids = list(ids)
    row = pick(policy.costs(request_with_key(number), fleet_of(worker_id=ids), None), 0.0)
    return ids[row]


@RINGS
def test_a_prefix_has_one_owner_and_keys_are_spread_evenly(policy):
    owners = [owner(policy, number) for number in range(800)]
    assert owners == [owner(policy, number) for number in range(800)]
    assert min(np.bincount(owners, minlength=8)) >= 60


@RINGS
def test_only_the_keys_of_a_removed_worker_move(policy):
    for number in range(300):
        before = owner(policy, number)
        after = owner(policy, number, [0, 1, 2, 4, 5, 6, 7])
        assert after == before if before != 3 else after != 3


@RINGS
def test_blocks_after_the_prefix_do_not_change_the_owner(policy):
    long, short = request_with_key(5), request_with_key(5)
    long.chain = np.concatenate((long.chain[:16], long.chain[16:] + np.uint64(7)))
    short.chain = short.chain[:16]
    fleet = fleet_of(worker_id=list(range(8)), hit_tokens=[0, 999, 0, 0, 0, 0, 0, 0])
    rows = {int(policy.costs(r, fleet, None).argmin()) for r in (request_with_key(5), long, short)}
    assert len(rows) == 1
    owners = set()
    for number in range(50):
        long.chain[15] = number  # the last block of the prefix
        owners.add(int(policy.costs(long, fleet, None).argmin()))
    assert len(owners) == 8


@RINGS
def test_a_prompt_without_a_full_block_goes_to_the_least_loaded_worker(policy):
    assert costs_of(policy, request_of(prompt_tokens=9), running=[3, 1, 2]) == [3.0, 1.0, 2.0]


def node(worker_id, number):
    """Return the place of a worker's node on the ring: the upper half of SplitMix64 of both
    numbers.
    """
    mixed = (number + (worker_id << 20) + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) >> 32


def test_distances_equal_those_of_a_walk_around_the_ring():
    """Distances on the ring equal those of a plain walk, which sorts the nodes of 12 workers and
    goes on from the key.
    """
    ids = [7 * number for number in range(12)]
    ring = sorted((node(worker_id, number), worker_id) for worker_id in ids for number in range(5))
    for number in range(100):
        request = request_with_key(number)
        key = (int(request.chain[15]) * 0x9E3779B97F4A7C15 >> 32) % 2**32
        start = next((at for at, (position, _) in enumerate(ring) if position >= key), 0)
        walk = ring[start:] + ring[:start]
        met = list(dict.fromkeys(worker_id for _, worker_id in walk))
        way = distances(request, fleet_of(worker_id=ids), 256, 5)
        assert [ids[row] for row in np.argsort(way)] == met
        assert way.min() * 2**32 == (walk[0][0] - key) % 2**32


def test_prefix_hash_leaves_an_owner_above_the_bound_for_the_least_loaded():
    policy = PrefixHash()
    request, ids = request_with_key(1), [0, 1, 2, 3]
    row = owner(policy, 1, ids)
    requests = np.array([20, 20, 20, 20])
    # Others have 20: the owner may have 1.25 * (60 + A + 1) / 4, which is 27 for A = 27.
    for more, stays in ((7, True), (8, False)):
        requests[row] = 20 + more
        costs = costs_of(policy, request, worker_id=ids, running=requests)
        assert costs == [-1.0 if stays and at == row else float(n) for at, n in enumerate(requests)]


def test_chwbl_walks_to_the_next_worker_with_room():
    policy = Chwbl()
    request, ids = request_with_key(1), [0, 1, 2, 3]
    way = distances(request, fleet_of(worker_id=ids), 256, 256)
    first, second, third, last = np.argsort(way)
    # Room up to ceil(1.25 * 85 / 4) = 27 of 84 requests.
    for on_first, on_second, takes in ((26, 20, first), (27, 20, second), (27, 27, third)):
        requests = np.zeros(4, dtype=np.int64)
        requests[[first, second, third, last]] = on_first, on_second, 10, 74 - on_first - on_second
        costs = np.array(costs_of(policy, request, worker_id=ids, running=requests))
        assert costs.tolist() == (way + (requests + 1 > 27)).tolist()
        assert costs.argmin() == takes


def test_chwbl_always_finds_a_worker_with_room():
    random = np.random.default_rng(0)
    for _ in range(200):
        workers = int(random.integers(1, 9))
        running = random.integers(0, 4, workers)
        costs = costs_of(Chwbl(load_factor=1.0), request_with_key(3), running=running)
        assert min(costs) < 1.0


@pytest.mark.parametrize(("policy", "depth"), [(PrefixHash(), 1), (Chwbl(), 1)])
def test_rings_leave_the_owner_at_their_spill_depth_among_idle_workers(policy, depth):
    """A ring sends a request to another worker if one request runs at the first one, because 1.25 x
    the mean of eight workers, one of which is busy, is less than one request.
    """
    number = next(n for n in range(100) if owner(policy, n) == 0)
    assert leaves_holder_at(policy, 7, request_with_key(number)) == depth


@pytest.mark.parametrize(
    "bad", [{"prefix_tokens": 0}, {"load_factor": 0.9}, {"load_factor": np.nan}, {"nodes": 0}]
)
def test_invalid_ring_parameters_are_rejected(bad):
    for policy in (PrefixHash, Chwbl):
        with pytest.raises(ValueError, match=next(iter(bad))):
            policy(**bad)


def test_session_sticky_places_by_queue_length_and_then_stays():
    policy = SessionSticky()
    state = sent(policy, (1, 10, "a"), (2, 10, None), (0, 10, "b"))
    loads = {"running": [4, 90, 2], "hit_tokens": [0, 0, 999]}
    assert costs_of(policy, request_of(session="a"), state, **loads) == [4.0, -1.0, 2.0]
    for session in (None, "never seen"):
        assert costs_of(policy, request_of(session=session), state, **loads) == [4.0, 90.0, 2.0]
    # Its worker is not eligible; it then stays at the worker that it gets instead.
    without = {"worker_id": [0, 2], "running": [4, 2]}
    assert costs_of(policy, request_of(session="a"), state, **without) == [4.0, 2.0]
    sent(policy, (2, 10, "a"), state=state)
    assert costs_of(policy, request_of(session="a"), state, **loads) == [4.0, 90.0, -1.0]


def test_session_sticky_never_moves_a_session_and_ignores_prefixes():
    state = sent(SessionSticky(), (0, 10, "a"))
    assert leaves_holder_at(SessionSticky(), 7, request_of(session="a"), state=state) is None
    assert leaves_holder_at(SessionSticky(), 7, request_of(session="b"), state=state) == 1


@pytest.mark.parametrize("policy", [SessionSticky(max_sessions=3), TrtLlmConversation(0.5, 0, 3)])
def test_the_least_recently_used_sessions_are_dropped(policy):
    state = sent(policy, *((number % 2, 10, f"s{number}") for number in range(3)))
    sent(policy, (1, 10, "s0"), (1, 10, "s3"), state=state)
    policy.observe(Finish(9.0, 0), state)
    assert len(state) == 3
    kept = [
        session
        for session in ("s0", "s1", "s2", "s3")
        if state.rows(request_of(session=session), fleet_of(worker_id=[0, 1])) is not None
    ]
    assert kept == ["s0", "s2", "s3"]


def test_trt_llm_conversation_prefers_session_then_prefix_then_fewest_tokens():
    policy = TrtLlmConversation()
    state = sent(policy, (1, 10, "a"))
    columns = {
        "hit_tokens": [0, 0, 752],
        "queued_prefill_tokens": [100.0, 0.0, 0.0],
        "context_tokens": [100.0, 5_000.0, 900.0],
    }
    assert costs_of(policy, request_of(session="a"), state, **columns) == [1.0, 0.0, 2.0]
    # For a session that no worker has served, the prefix is not searched.
    assert costs_of(policy, request_of(session="b"), state, **columns) == [200.0, 5_000.0, 900.0]
    assert costs_of(policy, None, state, **columns) == [1.0, 2.0, 0.0]
    strict = TrtLlmConversation(match_threshold=0.76)
    assert costs_of(strict, None, state, **columns) == [200.0, 5_000.0, 900.0]


def test_trt_llm_conversation_does_not_count_the_skipped_head():
    policy = TrtLlmConversation(skip_tokens=600)
    light = {"context_tokens": [900.0, 0.0]}
    # (848 - 600) / 400 = 0.62, (912 - 600) / 400 = 0.78
    assert costs_of(policy, hit_tokens=[848, 0], **light) == [900.0, 0.0]
    assert costs_of(policy, hit_tokens=[912, 0], **light) == [0.0, 1.0]
    assert costs_of(policy, request_of(prompt_tokens=600), hit_tokens=[590, 0], **light) == [
        900.0,
        0.0,
    ]


def test_trt_llm_conversation_leaves_the_cached_worker_as_documented():
    state = sent(TrtLlmConversation(), (0, 10, "a"))
    held = {"state": state, "idle_workers": 7}
    assert leaves_holder_at(TrtLlmConversation(), request=request_of(session="a"), **held) is None
    assert leaves_holder_at(TrtLlmConversation(), **held) is None, "no session: by its prefix"

    def row(policy, **changes):
        columns = {"hit_tokens": [850, 0], "context_tokens": [1.0, 0.0]}
        return pick(np.array(costs_of(policy, request_of(**changes), **columns)), 0.0)

    assert row(TrtLlmConversation(), session="b") == 1
    assert row(TrtLlmConversation(skip_tokens=850)) == 1


@pytest.mark.parametrize(
    "bad", [{"match_threshold": 0.0}, {"skip_tokens": -1}, {"max_sessions": 0}]
)
def test_invalid_conversation_parameters_are_rejected(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TrtLlmConversation(**bad)
    if "max_sessions" in bad:
        with pytest.raises(ValueError, match="max_sessions"):
            SessionSticky(**bad)
