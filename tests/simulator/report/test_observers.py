"""Tests of what observes a replay, on real replays: the CSV of requests, and the most frequent
prefixes.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from io import StringIO
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.contract import Hashes
from simulator.replay.result import NEVER, ReplayResult, Verdict
from simulator.report.files import CANDIDATES, COLUMNS, RequestsCsv
from simulator.report.row import summarize
from simulator.report.view import HotPrefixes
from tests.effort import examples
from tests.simulator.replays import job, pool, run, setup_of, steady


def written(jobs: list[Any], hindsight: bool = True, **more: Any) -> tuple[Any, ReplayResult]:
    """Replay `jobs` with the CSV observer; return its lines by serial, and the result."""
    stream = StringIO(newline="")
    result = run(jobs, observers=[RequestsCsv(stream, hindsight)], **more)
    stream.seek(0)
    lines = list(csv.DictReader(stream))
    assert len(lines) == len({line["serial"] for line in lines}) == len(result.table)
    return {int(line["serial"]): line for line in lines}, result


def test_every_request_has_a_line_that_agrees_with_the_table() -> None:
    lines, result = written(steady(60, 20.0), setup=setup_of("hybrid", pool(3)))
    table = result.table
    assert tuple(lines[0]) == COLUMNS
    for serial, line in lines.items():
        assert int(line["worker"]) == table.worker[serial]
        assert int(line["hit_tokens"]) == table.hit_tokens[serial]
        assert int(line["expected_hit_tokens"]) == table.expected_hit_tokens[serial]
        assert float(line["arrival_s"]) == pytest.approx(table.arrival_ns[serial] / 1e9, abs=1e-6)
        ttft_ns = table.first_token_ns[serial] - table.arrival_ns[serial]
        assert float(line["ttft_ms"]) == pytest.approx(ttft_ns / 1e6, abs=1e-3)
        e2e_ms = float(line["ttft_ms"]) + 19 * float(line["tpot_ms"])
        assert float(line["e2e_ms"]) == pytest.approx(e2e_ms, abs=0.02)
        chosen = [line[name].split(":") for name in ("chosen", "second", "third")]
        assert int(chosen[0][0]) == table.worker[serial]
        assert int(chosen[0][2]) == table.expected_hit_tokens[serial]
        assert len({worker for worker, _, _ in chosen}) == CANDIDATES
        costs = [float(cost) for _, cost, _ in chosen]
        assert costs == sorted(costs)
        assert (line["verdict"], line["code"], line["attempts"]) == ("completed", "", "1")


def test_hindsight_names_the_worker_that_would_have_been_faster() -> None:
    # A big prompt fills worker 0, and round robin still sends the third request there.
    jobs = [job(0, 8_000, 5, own=1), job(1, 64, 5, own=2), job(2, 64, 5, own=3)]
    lines, _ = written(jobs, setup=setup_of("round_robin", pool(2)))
    chosen = [lines[serial]["worker"] for serial in range(3)]
    assert chosen[0] == chosen[2] != chosen[1]
    assert lines[2]["best_worker"] == chosen[1]
    assert float(lines[2]["loss_ms"]) > 50
    # With no other request both workers are equally good, so the choice has no regret.
    assert (lines[0]["best_worker"], lines[0]["loss_ms"]) == (chosen[0], "0.000")
    without, _ = written(jobs, False, setup=setup_of("round_robin", pool(2)))
    assert {line["loss_ms"] + line["best_worker"] for line in without.values()} == {""}


def test_a_line_has_the_cost_terms_of_its_decision_and_its_regret() -> None:
    lines, result = written(steady(60, 20.0), setup=setup_of("hybrid", pool(3)))
    table = result.table
    for serial, line in lines.items():
        for which in ("chosen", "second"):
            terms = pairs(line[f"{which}_terms"])
            assert terms.keys() == {"missing_s", "queued_s", "requests_s"}
            _, cost, hits = line[which].split(":")
            assert sum(terms.values()) == pytest.approx(float(cost), rel=1e-4)
            columns = pairs(line[f"{which}_columns"])
            assert columns["hit_tokens"] == float(hits)
            assert "max_requests" not in columns  # no worker has this limit
        assert (line["policy"], line["reason"]) == ("hybrid", "policy")
        sent_ns, first_ns = table.dispatched_ns[serial], table.first_token_ns[serial]
        assert float(line["sent_ms"]) == 0.0
        regret_ms = (first_ns - sent_ns) / 1e6 - 1e3 * float(line["second"].split(":")[1])
        assert float(line["regret_ms"]) == pytest.approx(regret_ms, abs=0.01)
        beyond = int(line["second"].split(":")[2]) - table.hit_tokens[serial]
        assert int(line["regret_hit_tokens"]) == max(beyond, 0)


def pairs(cell: str) -> dict[str, float]:
    return {name: float(value) for name, _, value in (p.partition("=") for p in cell.split(";"))}


def test_rejected_requests_have_a_code_and_no_times() -> None:
    jobs = [job(0, 64, 5), job(1, 4_000, 5, own=1, session='a,"b"'), job(2, 64, 1)]
    lines, result = written(jobs, setup=setup_of("hybrid", pool(2, kv_tokens=1_024)))
    assert result.table.verdict[1] == Verdict.REJECTED
    line = lines[1]
    assert (line["verdict"], line["code"]) == ("rejected", next(iter(result.rejections)))
    assert line["ttft_ms"] == line["tpot_ms"] == line["e2e_ms"] == line["hit_tokens"] == ""
    assert line["regret_ms"] == line["regret_hit_tokens"] == ""
    assert line["session"] == 'a,"b"'
    # An answer of one token has no time per token.
    assert (lines[2]["output_tokens"], lines[2]["tpot_ms"]) == ("1", "")


@pytest.mark.parametrize("name", ["=1+2", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_a_session_that_looks_like_a_formula_stays_text(name: str) -> None:
    jobs = [job(0, 64, 5, session=name), job(1, 64, 5, own=1, session="a=1")]
    lines, _ = written(jobs, setup=setup_of("round_robin", pool(2)))
    assert [lines[serial]["session"] for serial in range(2)] == [f"'{name}", "a=1"]


def test_observers_change_no_result() -> None:
    setup = setup_of("hybrid", pool(3))
    alone = summarize(run(steady(80, 15.0), setup))
    hot = HotPrefixes()
    watched = run(steady(80, 15.0), setup, observers=[RequestsCsv(StringIO()), hot])
    assert summarize(watched).report_hash == alone.report_hash


def test_trunks_are_found_with_their_length_and_copies() -> None:
    # Four trunks of 20 blocks; what follows is each request's own.
    hot = HotPrefixes()
    result = run(steady(120, 50.0), setup_of("round_robin", pool(3)), observers=[hot])
    found = hot.found(result.samples.time_ns)
    assert [(prefix.blocks, prefix.requests) for prefix in found] == [(20, 30)] * 4
    for prefix in found:
        assert len(prefix.copies) == len(result.samples.time_ns)
        # Round robin brings every trunk to every worker.
        assert prefix.copies[-1] == 3
    assert hot.found(result.samples.time_ns, most=1)[0].blocks == 20
    assert summarize(replace(result, hot=found)) == summarize(result)


def test_a_prefix_without_tracked_blocks_has_no_copies() -> None:
    hot = HotPrefixes()
    for _ in range(5):
        hot.count(np.arange(1, 4, dtype=np.uint64))
    (prefix,) = hot.found(np.array([1, 2], dtype=np.int64))
    assert prefix.copies.tolist() == [NEVER, NEVER]
    assert (prefix.blocks, prefix.requests) == (3, 5)
    assert HotPrefixes().found(np.zeros(0, dtype=np.int64)) == ()


def test_nested_trunks_are_both_found_if_both_are_shared() -> None:
    hot = HotPrefixes()
    for serial in range(90):
        own = np.arange(40, dtype=np.uint64) + np.uint64(10_000 + serial * 100)
        chain = np.arange(1, 61, dtype=np.uint64)
        chain = chain[:50] if serial % 3 == 0 else chain[:6]
        hot.count(np.concatenate([chain, own]))
    found = hot.found(np.zeros(0, dtype=np.int64))
    assert [(prefix.blocks, prefix.requests) for prefix in found[:2]] == [(50, 30), (6, 90)]


def test_a_prefix_shared_by_two_of_thousands_is_not_hot() -> None:
    hot = HotPrefixes()
    for serial in range(2_000):
        first = 1 if serial % 2 else 7_000 + serial // 4
        hot.count(np.array([first, *range(serial + 10**6, serial + 10**6 + 3)], dtype=np.uint64))
    assert [prefix.requests for prefix in hot.found(np.zeros(0, dtype=np.int64))] == [1_000]


def skewed(seed: int, requests: int, prefixes: int) -> list[Hashes]:
    """Return chains of one block each; low numbers are much more frequent than high ones."""
    random = Random(seed)
    picks = (int(prefixes * random.random() ** 3) for _ in range(requests))
    return [np.array([pick + 1], dtype=np.uint64) for pick in picks]


@given(st.integers(0, 10**6), st.integers(5, 60), st.integers(2, 100))
@settings(max_examples=examples(50))
def test_the_sketch_of_frequent_prefixes_keeps_its_error_bounds(
    seed: int, counters: int, prefixes: int
) -> None:
    """The sketch of frequent prefixes keeps the bounds of Space-Saving, checked against exact
    counts: no prefix with more than 1/m of all requests is missing, no count is too low, and none
    is too high by more than that share.
    """
    chains = skewed(seed, 400, prefixes)
    hot = HotPrefixes(counters=counters)
    for chain in chains:
        hot.count(chain)
    exact = Counter(int(chain[0]) for chain in chains)
    kept = hot._counters
    assert len(kept) <= counters
    for key, counter in kept.items():
        assert counter.count - counter.missed <= exact[key] <= counter.count
        assert counter.missed <= len(chains) / counters
    often = {key for key, count in exact.items() if count > len(chains) / counters}
    assert often <= set(kept)


def test_memory_is_bounded_for_any_number_of_prefixes() -> None:
    hot = HotPrefixes(counters=64)
    for serial in range(5_000):
        own = np.arange(30, dtype=np.uint64) + np.uint64(1_000 + serial * 50)
        hot.count(np.concatenate([np.arange(1, 11, dtype=np.uint64), own]))
    assert len(hot._counters) == len(hot._heap) == 64
    assert hot.found(np.zeros(0, dtype=np.int64))[0].blocks == 10
    assert sum(len(counter.witnesses) for counter in hot._counters.values()) < 64 * 14
