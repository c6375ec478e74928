"""Tests of how far a source of workers is trusted when it loses all workers, flaps, or fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.discovery.source import bounded
from router.engines.spec import WorkerSpec
from router.engines.worker_spec import parse_worker_spec
from router.fleet.sources import LINGER_MAX_S, Report, ReportedWorker, SourceTrust, union

GRACE_S = 30.0


def reported(*names: str) -> tuple[ReportedWorker, ...]:
    """Return reported workers with these names; `x!` is a worker that is stopping."""
    return tuple(
        ReportedWorker(WorkerSpec(f"http://{name.removesuffix('!')}"), name.endswith("!"))
        for name in names
    )


def present_names(believed: SourceTrust, now_s: float, up: str = "") -> list[str]:
    """Return the names of workers that count as present; `up` has those that answer probes."""
    found = believed.workers(now_s, GRACE_S, lambda spec: spec.url.removeprefix("http://") in up)
    return sorted(one.spec.url.removeprefix("http://") for one in found)


def test_the_removal_of_some_workers_takes_effect_at_once() -> None:
    one = SourceTrust()
    one.update(Report(reported("a", "b")), 0.0)
    one.update(Report(reported("b", "c")), 1.0)
    assert present_names(one, 1.0) == ["b", "c"]
    assert (one.joined, one.left) == (3, 1)


def test_a_failing_or_empty_source_keeps_workers_that_answer() -> None:
    for report in Report(None, "gone"), Report(()):
        one = SourceTrust()
        one.update(Report(reported("a", "b")), 0.0)
        one.update(report, 10.0)
        one.update(report, 39.0)
        assert present_names(one, 39.9) == ["a", "b"]
        assert one.trouble
        assert one.moves
        assert one.silent_s(39.0) == 29.0
        assert present_names(one, 40.0, up="a") == ["a"]  # the grace is over, and b is down
        assert present_names(one, 1e6, up="a") == ["a"]  # for ever
        assert present_names(one, 1e6) == []
        assert not one.moves


def test_a_recovered_source_counts_as_soon_as_it_reports_a_worker() -> None:
    one = SourceTrust()
    one.update(Report(reported("a", "b")), 0.0)
    one.update(Report(None, "gone"), 1.0)
    one.update(Report(reported("b")), 2.0)
    assert present_names(one, 2.0, up="ab") == ["b"]
    assert (one.trouble, one.silent_s(9.0)) == ("", 0.0)


def test_all_workers_reported_as_stopping_may_be_removed_at_once() -> None:
    one = SourceTrust()
    one.update(Report(reported("a", "b")), 0.0)
    one.update(Report(reported("a!", "b!")), 1.0)
    one.update(Report(()), 2.0)
    assert present_names(one, 2.0, up="ab") == []
    assert not one.trouble


def test_a_source_that_never_had_workers_is_not_in_trouble() -> None:
    one = SourceTrust()
    one.update(Report(()), 0.0)
    assert present_names(one, 0.0) == []
    assert (one.has_reported, one.trouble, one.moves) == (True, "", False)


def test_a_flapping_worker_is_kept_longer_after_each_flap() -> None:
    one = SourceTrust()
    now_s, kept_s = 0.0, []
    for _ in range(9):
        one.update(Report(reported("a", "z")), now_s)
        now_s += 1.0
        one.update(Report(reported("z")), now_s)
        gone_s = now_s
        while "a" in present_names(one, now_s):
            now_s += 0.5
        kept_s.append(now_s - gone_s)
        now_s = gone_s + 1.0
    assert kept_s == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, LINGER_MAX_S, LINGER_MAX_S, LINGER_MAX_S]
    assert one.flaps == 8


def test_a_worker_steady_or_absent_for_long_does_not_count_as_flapping() -> None:
    for absent_s, present_s in (61.0, 1.0), (1.0, 301.0):
        one = SourceTrust()
        one.update(Report(reported("a", "z")), 0.0)
        one.update(Report(reported("z")), 1.0)
        one.update(Report(reported("a", "z")), 1.0 + absent_s)
        one.update(Report(reported("z")), 1.0 + absent_s + present_s)
        assert present_names(one, 1.0 + absent_s + present_s) == ["z"]


def test_a_worker_reported_as_stopping_does_not_count_as_flapping() -> None:
    one = SourceTrust()
    for turn in range(9):
        one.update(Report(reported("a", "z")), turn)
        one.update(Report(reported("a!", "z")), turn + 0.3)
        one.update(Report(reported("z")), turn + 0.6)
        assert present_names(one, turn + 0.6) == ["z"]
    assert one.flaps == 0


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 20.0),
            st.none() | st.sets(st.sampled_from("abcd"), max_size=4),
        ),
        max_size=40,
    )
)
def test_reported_workers_are_present_and_others_are_kept_only_for_a_time(history) -> None:
    one, now_s, latest = SourceTrust(), 0.0, None
    for passed_s, named in history:
        now_s += passed_s
        one.update(Report(None if named is None else reported(*sorted(named))), now_s)
        latest = named if named else latest
        believed = present_names(one, now_s)
        if named:
            assert set(named) <= set(believed)
        assert len(believed) == len(set(believed))
    after = present_names(one, now_s + max(GRACE_S, LINGER_MAX_S) + 1.0)
    silent = history and not history[-1][1]
    assert after == ([] if silent or latest is None else sorted(latest))
    assert one.joined - one.left == len(after)


def test_reported_workers_above_the_limit_are_refused_with_a_reason() -> None:
    report = bounded(
        [ReportedWorker(WorkerSpec(f"http://w:{port}")) for port in range(1, 4_099)], ["bad"]
    )
    assert report.workers is not None
    assert len(report.workers) == 4_096
    assert report.refused == ("2 workers beyond 4096, from http://w:4097", "bad")
    assert len(bounded([], ["x"] * 1_000).refused) == 101


def test_of_two_sources_with_the_same_worker_the_first_one_counts() -> None:
    specs = [parse_worker_spec(t) for t in ("http://a", "http://b#".rstrip("#"), "http://c,rank=1")]
    first = [*reported("a", "d!"), ReportedWorker(parse_worker_spec("http://c"))]
    second = [*reported("d", "e"), ReportedWorker(parse_worker_spec("http://e,rank=0"))]
    wanted, passed_over = union(specs, [("one", first), ("two", second)])
    assert {(w.spec.name, w.by) for w in wanted} == {
        ("http://a", "configuration"),
        ("http://b", "configuration"),
        ("http://c#1", "configuration"),
        ("http://e", "two"),
    }
    assert passed_over == [
        "one names http://c, which configuration names as http://c,rank=1: that counts",
        "two names http://e,rank=0, which two names as http://e: that counts",
    ]


def test_another_weight_in_a_second_source_is_reported() -> None:
    other = [ReportedWorker(parse_worker_spec("http://a,weight=2"))]
    wanted, passed_over = union([], [("one", reported("a")), ("two", other)])
    assert [w.spec.weight for w in wanted] == [1.0]
    assert len(passed_over) == 1
