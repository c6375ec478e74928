"""Tests of the figures of the last minutes on the page `/ui`: which are kept, counted and read."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admin.ui.samples import COLUMNS, KEPT, History, quantile
from tests.effort import examples
from tests.router.crowded import crowd

NUMBER = st.one_of(st.floats(width=32), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(NUMBER, max_size=40), st.integers(0, 900), st.integers(0, 2_000))
def test_the_history_keeps_the_latest_rows_and_returns_those_after_a_number(
    seen: list[float], before: int, asked: int
) -> None:
    history, all_rows = History(), []
    for value in [float(n) for n in range(before)] + seen:
        history.add((value,) * len(COLUMNS))
        all_rows.append(value)
    assert history.taken == len(all_rows)
    kept = list(enumerate(all_rows, 1))[-KEPT:]
    expected = [value for number, value in kept if number > asked]
    found = history.after(asked)
    assert len(found) == len(expected)
    for row, value in zip(found, expected, strict=True):
        assert len(row) == len(COLUMNS)
        if math.isfinite(value):
            assert row[0] == pytest.approx(value, rel=1e-4)
        else:
            assert row[0] is None


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, math.nan),
        ([10, 0, 0], 0.5, 0.5),  # half way through the first bucket, 0..1
        ([0, 10, 0], 0.5, 1.5),
        ([5, 5, 0], 0.95, 1.9),
        ([0, 0, 3], 0.5, 2.0),  # beyond the last bound nobody knows how far
        ([9, 0, 1], 0.95, 2.0),
    ],
)
def test_a_quantile_is_interpolated_from_buckets(
    counts: list[int], share: float, expected: float
) -> None:
    assert quantile((1.0, 2.0), counts, share) == pytest.approx(expected, nan_ok=True)


async def test_a_sample_counts_the_requests_and_errors_of_its_second() -> None:
    async with crowd(4, policy="least_requests") as one:
        sampler = one.router.admin.ui.sampler
        one.router.admin.ui.sample()
        for _ in range(12):
            await one.send()
        one.answer(0.5)
        for status in (400, 404, 413, 500):
            one.router.metrics.requests.faulty(status)
        counters = one.router.dispatcher.core.counters
        counters.rejected("model_not_found")
        for code in ("hold_queue_full", "hold_timeout", "router_full", "displaced"):
            counters.rejected(code)
        counters.rejected("no_worker_available")
        one.router.metrics.requests.worker_errors += 2
        one.router.metrics.requests.busy_replies += 3
        sampler.sample()
        row = dict(zip(COLUMNS, sampler.history.after(1)[0], strict=True))
        second_s = 12 / row["requests_per_s"]
        assert row["client_errors_per_s"] * second_s == pytest.approx(4, rel=1e-3)
        assert row["worker_errors_per_s"] * second_s == pytest.approx(2, rel=1e-3)
        assert row["router_errors_per_s"] * second_s == pytest.approx(2, rel=1e-3)
        assert row["refused_per_s"] * second_s == pytest.approx(4, rel=1e-3)
        assert row["busy_per_s"] * second_s == pytest.approx(3, rel=1e-3)
        assert (row["inflight"], row["held"]) == (6, 0)
        busiest = max(one.router.dispatcher.core.columns.requests)
        assert row["imbalance"] == pytest.approx(busiest * 4 / 6, rel=1e-3)
        assert 0 <= row["hit_share"] < 1
        assert row["ttft_mean_s"] > 0
        sampler.sample()
        quiet = dict(zip(COLUMNS, sampler.history.after(2)[0], strict=True))
        assert quiet["requests_per_s"] == 0
        assert quiet["ttft_mean_s"] is quiet["ttft_p95_s"] is quiet["hit_share"] is None


async def test_the_hit_rate_is_per_worker_and_decays() -> None:
    async with crowd(2, policy="round_robin") as one:
        ui, core = one.router.admin.ui, one.router.dispatcher.core
        for _ in range(20):
            await one.send()
        ui.sample()
        worker = core.workers.get(0)
        assert worker is not None
        records = [r for r in one.router.service.latest.latest(99) if r.worker_id == 0]
        expected = sum(r.decision.hit_tokens for r in records)
        expected /= sum(r.decision.prompt_tokens for r in records)
        assert 0 < expected < 1
        frame = (await one.ui_state())["frame"]
        assert frame["workers"]["hits"][0] == pytest.approx(1e3 * expected, abs=1)
        one.answer()
        for _ in range(1_000):  # of which nobody sent anything
            ui.sample()
        assert (await one.ui_state())["frame"]["workers"]["hits"] == [-1, -1]
