"""Tests of Dynamo's rules against costs computed by hand, and of the blocks in use against a plain
count.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Failure, Finish, WorkerChange
from policies.published.active_blocks import PIECE, ActiveBlocks
from policies.published.dynamo import Dynamo
from policies.published.dynamo_agentic import DynamoAgentic
from policies.published.jsew import Jsew
from tests.effort import examples
from tests.policies.fleet import request_of
from tests.policies.published.asked import costs_of, sent, spill_depth, state_of

INF, NAN = np.inf, np.nan


def state_by_requests(policy):
    """Return a function that gives the policy's state after a number of requests, which share a
    prefix of 400 blocks and have 40 blocks each of their own. The facts omit what the worker
    lacked; the first request was long ago.
    """

    def after(requests):
        own = [range(10_000 * n, 10_000 * n + 40) for n in range(1, requests + 1)]
        # A prompt shares whole pieces; 400 blocks are 25 of them, its own 40 are 2 and 8 blocks.
        return state_of(
            policy,
            [sent([*range(1, 401), *o], hit_tokens=7_040, request_id=n) for n, o in enumerate(own)],
        )

    return after


# --- dynamo, dynamo_agentic ------------------------------------------------------------------


def test_dynamo_adds_blocks_to_compute_and_blocks_in_use():
    # 40 blocks at worker 0; this prompt shares 32 of them, and 16 of 16 at worker 1.
    facts = [sent([*range(1, 33), *range(900, 908)]), sent(range(1, 17), 1, request_id=1)]
    columns = {"hit_tokens": [512, 256, 0], "queued_prefill_tokens": [0.0, 160.0, 320.0]}
    request = request_of(prompt_tokens=1_000)  # 62.5 blocks
    assert costs_of(Dynamo(), request, facts, **columns) == [
        (62.5 - 32) + (40 + 62.5 - 32),
        (62.5 + 10 - 16) + (16 + 62.5 - 16),
        (62.5 + 20) + 62.5,
    ]


def test_dynamo_weighs_tiers_requests_and_the_backlog_of_a_worker():
    columns = {
        "hit_tokens": [320, 320],
        "hit_tokens_host": [0, 160],
        "hit_tokens_disk": [160, 0],
        "queued_prefill_tokens": [160.0, 960.0],
        "running": [2, 1],
    }
    policy = Dynamo(prefill_scale=2.0, request_tokens=32.0, decay=0.5)
    request = request_of(prompt_tokens=800)  # 50 blocks
    # The second is one prompt behind: its hits count 1 / 1.5.
    first = 2 * (50 + 10 - 20 - 0.25 * 10) + 50 + 2 * 2
    second = 2 * (50 + 60 - 20 / 1.5 - 0.75 * 10) + 50 + 2
    assert costs_of(policy, request, **columns) == pytest.approx([first, second])
    # Credit above the work is lost, not owed.
    assert costs_of(Dynamo(overlap_credit=9.0), request, hit_tokens=[320]) == [50.0]


@pytest.mark.parametrize(
    ("policy", "depth"),
    [
        (Dynamo(), 6_400 / 640),  # S / u
        (Dynamo(request_tokens=160.0), 6_400 / 800),
        (DynamoAgentic(), 4 * 7_040 / (1_024 + 640)),
    ],
)
def test_dynamo_leaves_the_cached_worker_at_its_spill_depth(policy, depth):
    request = request_of(prompt_tokens=7_040)
    assert spill_depth(policy, request, 6_400, state=state_by_requests(policy)) == int(depth) + 1


def test_dynamo_agentic_equals_dynamo_with_its_preset():
    agentic = Dynamo(prefill_scale=4.0, overlap_credit=2.0, request_tokens=64 * 16.0)
    columns = {"hit_tokens": [320, 0], "running": [3, 1], "queued_prefill_tokens": [700.0, 0.0]}
    assert costs_of(DynamoAgentic(), **columns) == costs_of(agentic, **columns)


@pytest.mark.parametrize("name", ["prefill_scale", "overlap_credit", "host_credit", "decay"])
@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_dynamo_rejects_invalid_parameters(name, value):
    with pytest.raises(ValueError, match=name):
        Dynamo(**{name: value})


class PlainActive:
    """A plain version of `ActiveBlocks`, which counts the blocks in use anew each time."""

    def __init__(self):
        self.sent = {}

    def blocks(self, worker_id):
        chains = [chain for worker, chain in self.sent.values() if worker == worker_id]
        whole = {tuple(c[:end]) for c in chains for end in range(PIECE, len(c) + 1, PIECE)}
        return len(whole) * PIECE + sum(len(c) % PIECE for c in chains)

    def shared(self, chain, worker_id):
        blocks = {
            c[i]
            for worker, c in self.sent.values()
            if worker == worker_id
            for i in range(len(c) // PIECE * PIECE)
        }
        depth = 0
        while depth + PIECE <= len(chain) and chain[depth + PIECE - 1] in blocks:
            depth += PIECE
        return depth


@st.composite
def tree_chains(draw):
    """Draw chains of a small tree; they branch off each other after whole and after
    partial pieces.
    """
    branch, length = draw(st.integers(0, 2)), draw(st.integers(0, 70))
    fork = draw(st.sampled_from([0, 7, 16, 40, 48]))
    return [n + 1 if n < fork else 1000 * (branch + 1) + 100 * fork + n for n in range(length)]


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "finish", "fail", "gone"]),
            st.integers(0, 5),
            st.integers(0, 2),
            tree_chains(),
        ),
        max_size=30,
    ),
    tree_chains(),
)
def test_active_blocks_are_the_blocks_of_unfinished_requests(events, chain):
    active, plain = ActiveBlocks(), PlainActive()
    for what, number, worker_id, sent_chain in events:
        if what == "send":
            active.observe(sent(sent_chain, worker_id, request_id=number))
            plain.sent[number] = (worker_id, sent_chain)
        elif what == "gone":
            active.observe(WorkerChange(0.0, worker_id, "gone"))
            plain.sent = {n: s for n, s in plain.sent.items() if s[0] != worker_id}
        else:
            active.observe(
                Finish(0.0, number) if what == "finish" else Failure(0.0, number, "worker")
            )
            plain.sent.pop(number, None)
    found = active.shared(np.array(chain, dtype=np.uint64))
    for worker_id in range(3):
        assert active.blocks.get(worker_id, 0) == plain.blocks(worker_id)
        assert found.get(worker_id, 0) == plain.shared(chain, worker_id)
    for number in range(6):
        active.observe(Finish(0.0, number))
    assert not active.blocks
    assert not len(active)


def test_active_blocks_drop_the_oldest_requests_beyond_their_limit(monkeypatch):
    monkeypatch.setattr("policies.published.active_blocks.MAX_REQUESTS", 2)
    active = ActiveBlocks()
    for number in range(3):
        active.observe(sent([number + 1], worker_id=number, request_id=number))
    assert active.blocks == {1: 1, 2: 1}


# --- jsew ------------------------------------------------------------------------------------


def test_jsew_weighs_blocks_in_use_by_batch_and_distance_from_the_mean():
    # 40 blocks at worker 0; this prompt of 62.5 shares 32 of them. All of them were missing once.
    facts = [sent([*range(1, 33), *range(900, 908)])]
    columns = {
        "hit_tokens": [512, 0],
        "queued_prefill_tokens": [160.0, 0.0],
        "running": [2, 0],
        "waiting": [1, 0],
    }
    work = [(40 + 62.5 - 32) * 4**0.13, 62.5]
    mean = sum(work) / 2
    c = [u * (u / mean) ** 0.2 for u in work]
    weight = 1.526 + 17.6 * 0.01737
    expected = [62.5 + 10 - 32 + weight * c[0], 62.5 + weight * c[1]]
    assert costs_of(Jsew(), facts=facts, **columns) == pytest.approx(expected)
    # Another prompt, of which a quarter was missing, and its end: the share moves, the blocks not.
    facts += [sent(range(4), hit_tokens=48, request_id=1), Finish(0.0, 1)]
    weight = 1.526 + 17.6 * (0.01737 + 0.01737 * (0.25 - 0.01737))
    expected = [62.5 + 10 - 32 + weight * c[0], 62.5 + weight * c[1]]
    assert costs_of(Jsew(), facts=facts, **columns) == pytest.approx(expected)


def test_jsew_scales_prefill_and_charges_requests_as_dynamo_does():
    policy = Jsew(prefill_scale=2.0, overlap_credit=0.5, request_tokens=160.0, context_weight=0.0)
    costs = costs_of(policy, hit_tokens=[512, 0], running=[0, 3])
    assert costs == [2 * (62.5 - 16), 2 * 62.5 + 30]


def test_jsew_leaves_the_cached_worker_at_its_spill_depth():
    assert (
        spill_depth(Jsew(), request_of(prompt_tokens=7_040), 6_400, state=state_by_requests(Jsew()))
        == 3
    )


@pytest.mark.parametrize("bad", [{"context_weight": -1.0}, {"smoothing": 1.1}, {"smoothing": NAN}])
def test_jsew_rejects_invalid_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Jsew(**bad)
