"""Tests of the use of API keys at several replicas: one limit holds for all, whatever messages are
lost or repeated.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.keys.key_file import KeyTerms
from router.keys.quota import Allowance, SharedUse

KEY = "k"
TERMS = KeyTerms(requests_per_s=1.0, requests_burst=10.0, tokens_per_s=1.0, tokens_burst=1_000.0)


class KeyAtReplica:
    """The share of one key's limit at one replica. Lifetime: test."""

    def __init__(self, terms: KeyTerms = TERMS) -> None:
        self.allowance = Allowance(terms, 0.0)
        self.uses = SharedUse(lambda: {KEY: self.allowance})
        self.allowance.on_use = lambda: self.uses.touched(KEY)

    def receive_uses(self, other: KeyAtReplica, again: bool = False) -> None:
        uses = other.uses.all() if again else other.uses.changed()
        self.uses.on_peer_usage("other", uses, again, 0.0)


def test_requests_at_one_replica_use_up_the_limit_at_the_other() -> None:
    ours, theirs = KeyAtReplica(), KeyAtReplica()
    for _ in range(10):
        assert theirs.allowance.begin(0.0) is None
    assert theirs.allowance.begin(0.0) is not None
    ours.receive_uses(theirs)
    exhausted = ours.allowance.begin(0.0)
    assert exhausted is not None
    assert "1 requests a second" in exhausted.what


def test_the_inflight_limit_counts_requests_at_all_replicas() -> None:
    terms = KeyTerms(inflight=2)
    ours, theirs = KeyAtReplica(terms), KeyAtReplica(terms)
    assert theirs.allowance.begin(0.0) is None
    ours.receive_uses(theirs)
    assert ours.allowance.begin(0.0) is None
    assert ours.allowance.begin(0.0) is not None
    theirs.allowance.end(1.0)
    ours.receive_uses(theirs)
    assert ours.allowance.begin(0.0) is None


def test_requests_of_a_lost_replica_no_longer_count_as_inflight() -> None:
    terms = KeyTerms(inflight=1)
    ours, theirs = KeyAtReplica(terms), KeyAtReplica(terms)
    theirs.allowance.begin(0.0)
    ours.receive_uses(theirs)
    assert ours.allowance.begin(0.0) is not None
    ours.uses.drop_peer("other", 0.0)
    ours.uses.drop_peer("other", 0.0)
    assert ours.allowance.begin(0.0) is None


def test_use_before_a_replica_is_known_is_not_charged_here() -> None:
    ours, theirs = KeyAtReplica(), KeyAtReplica()
    theirs.allowance.begin(0.0)
    theirs.allowance.settle(0.0, 900)
    theirs.allowance.end(0.0)
    ours.receive_uses(theirs, again=True)
    assert ours.allowance.spend(0.0, 1_000) is None


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["lost", "heard", "twice", "again"])),
        max_size=30,
    )
)
def test_totals_correct_lost_and_repeated_messages(steps: list[tuple[int, str]]) -> None:
    ours, theirs = KeyAtReplica(), KeyAtReplica()
    assert theirs.allowance.begin(0.0) is None  # told at once, or the full report would come first
    ours.receive_uses(theirs)
    for tokens, fate in steps:
        theirs.allowance.settle(0.0, tokens)
        uses = theirs.uses.all() if fate == "again" else theirs.uses.changed()
        for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
            ours.uses.on_peer_usage("other", uses, fate == "again", 0.0)
    theirs.allowance.settle(0.0, 0)
    ours.receive_uses(theirs)
    assert ours.allowance.headers(0.0) == theirs.allowance.headers(0.0)
