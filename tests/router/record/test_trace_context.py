"""Tests of W3C trace context: which headers are read, which are passed on, and which requests are
sampled.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.record.trace import Tracer, below_of, headers_of, read_context
from router.record.trace_export import check_endpoint, traces_url
from tests.effort import examples

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def context(parent: str | None, *states: str) -> Any:
    headers = [(b"Host", b"x"), *((b"TraceState", state.encode("latin-1")) for state in states)]
    if parent is not None:
        headers.append((b"Traceparent", parent.encode("latin-1")))
    return read_context(headers)


@pytest.mark.parametrize(
    ("parent", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" {GOOD}\t", True),
        (f"01-{TRACE}-{SPAN}-01-what-will-be", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
    ],
)
def test_valid_traceparents_are_read(parent: str, sampled: bool) -> None:
    found = context(parent)
    assert (found.trace_id, found.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert (found.sampled, found.state) == (sampled, "")


@pytest.mark.parametrize(
    "parent",
    [
        *(None, "", "00", "-", GOOD[:-1], GOOD + "1", f"{GOOD}-more", GOOD.upper()),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01.more",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 500}",
        f"00-{TRACE}-{SPAN}-01,{GOOD}",
        "\xff" * 55,
    ],
)
def test_invalid_traceparents_are_ignored(parent: str | None) -> None:
    assert context(parent) is None


def test_two_traceparents_are_ignored() -> None:
    assert read_context([(b"traceparent", GOOD.encode())] * 2) is None


@pytest.mark.parametrize(
    ("states", "read"),
    [
        (("a=1",), "a=1"),
        (("a=1, b=2\t,c@v=3 4",), "a=1,b=2,c@v=3 4"),
        (("a=1", "b=2"), "a=1,b=2"),
        ((" ,a=1,,",), "a=1"),
        (("",), ""),
        (("a",), ""),
        (("A=1",), ""),
        (("a=1,a=2",), ""),
        (("a=1=2",), ""),
        (("a=\x7f",), ""),
        ((",".join(f"k{n}=v" for n in range(32)),), ",".join(f"k{n}=v" for n in range(32))),
        ((",".join(f"k{n}=v" for n in range(33)),), ""),
        (("a=" + "x" * 256, "b=" + "x" * 251), f"a={'x' * 256},b={'x' * 251}"),
        (("a=" + "x" * 256, "b=" + "x" * 256), ""),
        (("a=" + "x" * 257,), ""),
    ],
)
def test_tracestate_is_kept_completely_or_not_at_all(states: tuple[str, ...], read: str) -> None:
    assert context(GOOD, *states).state == read


@settings(max_examples=examples(200))
@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
def test_written_headers_are_read_back(trace: int, span: int, sampled: bool) -> None:
    found = read_context(headers_of(trace, span, sampled, "a=1,b=2"))
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled, found.state) == (
        *(trace, span, sampled),
        "a=1,b=2",
    )


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate"]), st.binary())))
def test_any_headers_are_read_without_an_exception(headers: list[tuple[bytes, bytes]]) -> None:
    found = read_context(headers)
    assert found is None or len(found.state) <= 512


class Request:
    """The attributes of a client's request that a tracer reads."""

    def __init__(self, **headers: str) -> None:
        self.headers = headers
        self.fields = tuple((k.encode(), v.encode()) for k, v in headers.items())


def tracer(share: float, seed: int = 1) -> Any:
    return Tracer(below_of(share), random.Random(seed))


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(0, 1), st.integers())
def test_the_sampled_share_is_met_and_follows_only_from_the_trace_id(
    share: float, seed: int
) -> None:
    begin, traced = tracer(share, seed).begin, 0
    for _ in range(1_000):
        one = begin(Request())
        below = (one.trace_id & ((1 << 64) - 1)) / (1 << 64) < share
        assert one.sampled == below
        traced += below
        (parent,) = (value for name, value in one.to_worker() if name == b"traceparent")
        assert parent.startswith(b"00-%032x-" % one.trace_id)
        assert parent.endswith(b"-01" if below else b"-00")
    assert abs(traced - 1_000 * share) < 6 * (1_000 * share * (1 - share)) ** 0.5 + 1


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_sampling_decision_of_the_caller_is_followed(share: float) -> None:
    begin = tracer(share).begin
    followed = begin(Request(traceparent=GOOD, tracestate="a=1"))
    assert followed.sampled
    assert (followed.trace_id, followed.parent_id) == (int(TRACE, 16), int(SPAN, 16))
    (_, parent), (_, state) = followed.to_worker()
    assert (parent[3:35].decode(), parent[-2:], state) == (TRACE, b"01", b"a=1")
    assert parent[36:52].decode() != SPAN
    unsampled = GOOD[:-1] + "0"
    assert begin(Request(traceparent=unsampled, tracestate="a=1")) is None, "goes on as it is"
    mended = begin(Request(traceparent=unsampled, tracestate="A B"))
    assert mended.to_worker() == ((b"traceparent", unsampled.encode()),)


def test_an_invalid_traceparent_is_replaced() -> None:
    for headers in ({"traceparent": "00-no-no-01"}, {"tracestate": "a=1"}):
        one = tracer(0.0).begin(Request(**headers))
        assert not one.sampled
        assert len(one.to_worker()) == 1


@pytest.mark.parametrize(
    ("endpoint", "posted"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c:4318/own", "http://c:4318/own"),
    ],
)
def test_spans_are_posted_to_the_collectors_traces_url(endpoint: str, posted: str) -> None:
    check_endpoint(endpoint)
    assert traces_url(endpoint) == posted


@pytest.mark.parametrize("endpoint", ["", "c:4318", "grpc://c:4317", "http://", "http:///v1"])
def test_an_invalid_collector_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is no http"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("found", [None, ModuleNotFoundError("opentelemetry")])
def test_the_error_for_a_missing_extra_contains_the_install_command(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    def find(name: str) -> Any:
        if found is not None:
            raise found

    monkeypatch.setattr("router.record.trace_export.find_spec", find)
    with pytest.raises(ValueError, match=r"or '\.\[otel\]' in the checkout"):
        check_endpoint("http://c:4318")
