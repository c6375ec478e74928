"""Tests that metrics without locks are scraped like Prometheus' own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.metrics.requests import PlainHistogram
from tests.router.property_support import patient

BOUNDS = (0.005, 0.01, 1, 2.5, 250)


def lines(registry: CollectorRegistry) -> list[str]:
    """Return the lines of a scrape without the times at which metrics were created."""
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


@patient
@given(st.lists(st.floats(0, 1e6) | st.sampled_from(BOUNDS), max_size=40))
def test_a_plain_histogram_is_scraped_like_prometheus_own(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("seconds", "Some seconds", BOUNDS)
    ours.register(plain)
    usual = Histogram("seconds", "Some seconds", buckets=BOUNDS, registry=theirs)
    for value in values:
        plain.observe(value)
        usual.observe(value)
    assert lines(ours) == lines(theirs)
