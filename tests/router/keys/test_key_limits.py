"""Tests of the limits of API keys: rate limits against a simple model, retry times that suffice,
exact counts.
"""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys.key_file import KeyTerms
from router.keys.quota import Allowance, Bucket, duration
from router.keys.tenant_counts import OTHERS, TenantCounts
from tests.router.property_support import patient

RATES = st.floats(0.01, 1e4)
BURSTS = st.floats(1.0, 1e5)
PAUSES = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.1, 1e5)), min_size=1, max_size=60)


@patient
@given(RATES, BURSTS, PAUSES)
def test_no_interval_passes_more_than_rate_burst_and_one_debt(
    rate: float, burst: float, asked: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, burst, 0.0)
    now_s, passed = 0.0, []
    for pause_s, cost in asked:
        now_s += pause_s
        if bucket.wait_s(now_s, cost) == 0.0:
            bucket.take(now_s, cost)
            passed.append((now_s, cost))
    for i, (from_s, _) in enumerate(passed):
        for j in range(i, len(passed)):
            till_s, last = passed[j]
            before = sum(cost for _, cost in passed[i:j])
            # What passed before the last one fitted what had come in; the last may overdraw.
            room = burst + rate * (till_s - from_s) - min(last, burst)
            assert before <= room * (1 + 1e-6) + 1e-3


@patient
@given(RATES, BURSTS, PAUSES)
def test_the_announced_wait_is_sufficient_and_not_too_long(
    rate: float, burst: float, asked: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, burst, 0.0)
    now_s = 0.0
    for pause_s, cost in asked:
        now_s += pause_s
        wait_s = bucket.wait_s(now_s, cost)
        if wait_s > 1e-3:
            assert bucket.wait_s(now_s + wait_s * 0.99, cost) > 0.0
        now_s += wait_s * (1 + 1e-9)
        assert bucket.wait_s(now_s, cost) <= 1e-6 * (1 + wait_s)
        bucket.take(now_s, cost)
        assert bucket.left(now_s) >= 0.0
        assert bucket.full_in_s(now_s) >= 0.0


def limited(**terms: float) -> Allowance:
    return Allowance(KeyTerms("t", **terms), 0.0)  # type: ignore[arg-type]


def test_requests_per_second_are_limited_with_a_burst() -> None:
    allowance = limited(requests_per_s=2.0, requests_burst=3.0)
    assert [allowance.begin(0.0) for _ in range(3)] == [None] * 3
    refused = allowance.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(0.5)
    assert "2 requests a second" in refused.what
    assert allowance.begin(0.5) is None
    assert dict(allowance.headers(0.5)) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1.5s",
    }


def test_prompt_tokens_are_charged_first_and_answer_tokens_at_the_end() -> None:
    allowance = limited(tokens_per_s=100.0, tokens_burst=1_000.0)
    assert allowance.begin(0.0) is None
    assert allowance.spend(0.0, 700) is None
    allowance.settle(0.0, 500)  # an answer of 500: 200 more than there was
    refused = allowance.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(2.01)
    assert allowance.begin(2.01) is None
    second = allowance.spend(2.01, 500)
    assert second is not None
    assert second.retry_after_s == pytest.approx(4.99)
    allowance.settle(2.01, -700)  # its prompt was shorter than we thought
    assert dict(allowance.headers(2.01))["x-ratelimit-remaining-tokens"] == "701"


def test_a_request_above_the_burst_passes_a_full_bucket_and_leaves_a_debt() -> None:
    allowance = limited(tokens_per_s=10.0, tokens_burst=100.0)
    assert allowance.spend(0.0, 1_000) is None
    refused = allowance.spend(0.0, 1)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(90.1)


def test_inflight_is_counted_and_the_retry_time_follows_request_durations() -> None:
    allowance = limited(inflight=2)
    assert allowance.begin(0.0) is None
    assert allowance.begin(0.0) is None
    refused = allowance.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(0.5)
    for _ in range(60):
        allowance.end(8.0)
        assert allowance.begin(0.0) is None
    refused = allowance.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(4.0, rel=0.01)
    allowance.end(1.0)
    allowance.end(1.0)
    assert allowance.inflight == 0
    with pytest.raises(AssertionError, match="ended twice"):
        allowance.end(1.0)


def test_changed_limits_keep_the_use_so_far() -> None:
    allowance = limited(requests_per_s=1.0, requests_burst=10.0)
    for _ in range(9):
        assert allowance.begin(0.0) is None
    allowance.change(KeyTerms("t", requests_per_s=5.0, requests_burst=5.0), 0.0)
    refused = allowance.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(1.0)
    assert allowance.inflight == 9
    allowance.change(KeyTerms("t", inflight=100), 0.0)
    assert allowance.begin(0.0) is None
    assert allowance.headers(0.0) == ()


@given(st.floats(0.0, 1e6, allow_nan=False))
def test_durations_in_headers_are_never_too_short(seconds: float) -> None:
    """Durations in headers are read back and never too short; OpenAI writes them in the form of
    Go's time.Duration.String.
    """
    shown = duration(seconds)
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:([\d.]+)s)?|(\d+)ms", shown)
    assert found is not None, shown
    hours, minutes, secs, ms = found.groups()
    read = int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(secs or 0) + int(ms or 0) / 1e3
    assert seconds - 1e-6 <= read
    assert read <= seconds + 0.1 + 1e-4 * seconds


def test_durations_have_openais_format() -> None:
    known = {0.0: "0ms", 0.0201: "21ms", 1.5: "1.5s", 360.0: "6m0s", 3_661.25: "1h1m1.25s"}
    assert {s: duration(s) for s in known} == known


@patient
@given(st.lists(st.integers(0, 12), max_size=300), st.integers(1, 4), st.integers(1, 6))
def test_tenant_counts_keep_exact_totals_and_a_bounded_number_of_rows(
    names: list[int], places: int, candidates: int
) -> None:
    counts = TenantCounts(places, candidates)
    shown_before: dict[str, int] = {}
    others_before = 0
    for name in names:
        counts.arrived(f"t{name}")
        counts.used(f"t{name}", 10, 1)
        assert len(counts.rows) <= places
        assert len(counts._candidates) <= candidates + 1
        rows = [*counts.rows.values(), counts.others]
        total = sum(row.requests for row in rows)
        shown = {tenant: row.requests for tenant, row in counts.rows.items()}
        # A series never falls while it is there, and the others' never at all.
        assert all(shown[t] >= n for t, n in shown_before.items() if t in shown)
        assert counts.others.requests >= others_before
        shown_before, others_before = shown, counts.others.requests
        assert sum(row.prompt_tokens for row in rows) == 10 * total
    rows = [*counts.rows.values(), counts.others]
    assert sum(row.requests for row in rows) == len(names)
    assert sum(row.answer_tokens for row in rows) == len(names)


def test_the_busiest_tenant_among_many_gets_its_own_row() -> None:
    counts = TenantCounts()
    crowd = [f"t{n}" for n in range(5_000)] + ["busy"] * 2_000
    random.Random(3).shuffle(crowd)
    for tenant in crowd:
        counts.arrived(tenant)
        counts.refused(tenant, "rate_limit_exceeded")
    assert counts.rows["busy"].requests > 1_500
    assert counts.rows["busy"].refused["rate_limit_exceeded"] == counts.rows["busy"].requests
    counts.arrived(OTHERS)  # a tenant of that name does not make a second series of it
    counts.arrived(None)
    assert OTHERS not in counts.rows
    for n in range(100):
        counts.refused("stranger", f"code{n}")
    assert len(counts.others.refused) <= 21
