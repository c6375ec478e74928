"""Tests of computed capacities, against a table that other code computed and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.profiles import PROFILES, profile
from engine.step_time import StepTime
from simulator.capacity.pools import PoolTrial, Shapes, climb, match, pareto, split
from simulator.capacity.rates import (
    HIGHEST_LOAD,
    Link,
    Mix,
    MixError,
    Shape,
    WaitTargets,
    aggregated,
    attention_pairs,
    decode,
    load_within,
    measure,
    prefill,
    prefill_s,
    service,
    step_s,
    wait_s,
)
from simulator.traces.job import Job
from tests.bench.rate_match import outcome

FREE = Link(gbps=1e9, setup_s=0.0)  # the table's transfers cost nothing
QWEN = "qwen3-32b-h100-tp2"
LOAD = 0.8  # load of the prefill workers in the table


def ratio_and_gain(
    p: Shape, d: Shape, both: list[Shape], mix: Mix, targets: WaitTargets
) -> tuple[float, float]:
    """Return the ratio of prefill to decode workers, and the requests per GPU of the disaggregated
    pool over those of the best workers that do both.
    """
    prefilling = prefill(p, mix, targets, FREE, load=LOAD).requests_per_s
    decoding = decode(d, mix, targets, FREE).requests_per_s
    halves = 1.0 / (p.gpus / prefilling + d.gpus / decoding)
    whole = max(aggregated(one, mix, targets, load=LOAD).requests_per_s / one.gpus for one in both)
    return decoding / prefilling, halves / whole


# A computed reference table: ratio n_P/n_D, gain with a mean target, gain with one for each step.
TARGETS_MS = (20, 25, 30, 50)
# The constants that it was computed with: older than the profile of Llama-3.1-8B on H100.
REFERENCE = Shape(
    "reference",
    1,
    StepTime(linear_s=22e-6, pair_s=1.18e-9, weights_s=6.2e-3, context_s=54e-9),
    396_000,
    131_072,
)
CELLS = ((2.80, 0.83, 0.99), (3.18, 0.84, 1.00), (3.41, 0.84, 1.00), (3.41, 0.82, 0.98))


def test_the_reference_table_is_reproduced() -> None:
    mix = Mix.of(8192, 8192, 128)
    for tpot_ms, (ratio, mean_gain, step_gain) in zip(TARGETS_MS, CELLS, strict=True):
        for every_step, gain in ((False, mean_gain), (True, step_gain)):
            targets = WaitTargets(tpot_ms / 1e3, every_step=every_step)
            found = ratio_and_gain(REFERENCE, REFERENCE, [REFERENCE], mix, targets)
            # The tolerance is 1 %, or the rounding of the table's digits.
            assert found[0] == pytest.approx(ratio, rel=0.01, abs=0.005), (tpot_ms, every_step)
            assert found[1] == pytest.approx(gain, rel=0.01, abs=0.005), (tpot_ms, every_step)


# --- The same by plain loops ------------------------------------------------------------------


def largest(fits: Callable[[float], bool], top: float) -> float:
    """Return the largest number up to `top` that fits; every smaller number must fit, too."""
    low, high = 0.0, top
    if fits(top):
        return top
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plain_rates(
    shape: Shape, tokens: tuple[int, int, int], tpot_s: float, every_step: bool
) -> tuple[float, float, float]:
    """Return how many requests per second a worker can prefill, can decode, and can do both of."""
    prompt, uncached, output = tokens
    step, context = shape.step_time, prompt + output / 2
    most = 0.95 * shape.kv_tokens / context

    def step_s(prefill: float, decodes: float) -> float:
        pairs = prefill * (prompt - uncached / 2)
        computed: Any = (prefill + decodes, decodes, pairs, decodes * context)  # not whole numbers
        return step._seconds(*computed)

    prefills = LOAD / step.prefill_s(uncached, prompt - uncached)
    batch = largest(lambda decodes: step_s(0, decodes) <= tpot_s, most)
    decodes = batch / ((output - 1) * step_s(0, batch))
    both, floor_s = 0.0, step_s(0, 0)
    for number in range(1, 101):
        length_s = floor_s + (tpot_s - floor_s) * number / 100

        def fits(rate: float, length_s: float = length_s) -> bool:
            running = rate * (output - 1) * length_s
            prefill = rate * length_s * uncached / (LOAD if every_step else 1.0)
            return (
                running <= most
                and prefill + running <= 8192
                and step_s(prefill, running) <= length_s
            )

        both = max(both, largest(fits, 1e4))
    return prefills, decodes, both


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("tokens", [(8192, 8192, 128), (8192, 2048, 128), (4400, 4400, 1200)])
@pytest.mark.parametrize(
    "name", ["qwen3-32b-h100-tp2", "llama-3-70b-h100-tp8", "qwen3-30b-a3b-h100-tp2"]
)
def test_rates_agree_with_plain_loops(
    name: str, tokens: tuple[int, int, int], every_step: bool
) -> None:
    worker, mix = Shape.of(name), Mix.of(*tokens)
    for tpot_ms in TARGETS_MS:
        targets = WaitTargets(tpot_ms / 1e3, every_step=every_step)
        expected = plain_rates(worker, tokens, tpot_ms / 1e3, every_step)
        found = (
            prefill(worker, mix, targets, FREE, load=LOAD).requests_per_s,
            decode(worker, mix, targets, FREE).requests_per_s,
            aggregated(worker, mix, targets, load=LOAD).requests_per_s,
        )
        assert found == pytest.approx(expected, rel=0.01), tpot_ms


class Load:
    """The load of one step, with the attributes that `StepTime.seconds` reads."""

    def __init__(self, prefill: int, chunks: int, decodes: int, context: int) -> None:
        self.prefill_tokens, self.prefill_seqs = prefill, chunks
        self.decode_seqs, self.decode_ctx_tokens = decodes, context
        self.attention_pairs = prefill * 100.5


@given(
    st.sampled_from(sorted(PROFILES)),
    st.integers(0, 8192),
    st.integers(0, 256),
    st.integers(0, 500_000),
)
def test_vectorized_step_times_equal_those_of_single_steps(
    name: str, tokens: int, decodes: int, context: int
) -> None:
    step_time, chunks = profile(name).step_time, min(tokens, 1)
    load = Load(tokens, chunks, decodes, context)
    found = step_s(
        step_time, np.array([tokens + decodes]), chunks + decodes, tokens * 100.5, context
    )
    assert float(found[0]) == pytest.approx(step_time.seconds(load), rel=1e-12)


@given(st.sampled_from(sorted(PROFILES)), st.integers(1, 60_000), st.integers(0, 60_000))
def test_vectorized_prefill_times_equal_those_of_single_prefills(
    name: str, new: int, cached: int
) -> None:
    step_time = profile(name).step_time
    found = prefill_s(step_time, Mix.of(new + cached, new, 1))
    assert float(found[0]) == pytest.approx(step_time.prefill_s(new, cached), rel=1e-12)


def test_the_wait_of_one_worker_is_that_of_m_g_1_and_several_wait_less() -> None:
    step_time = profile(QWEN).step_time
    mix = Mix(np.array([1000.0, 9000.0]), np.array([1000.0, 9000.0]), np.array([10.0, 10.0]))
    each_s = prefill_s(step_time, mix)
    m2_s = float(np.mean(each_s**2) / np.mean(each_s))
    of = service(step_time, mix)
    for load in (0.1, 0.5, 0.9):
        assert float(wait_s(of, load)) == pytest.approx(load * m2_s / (2 * (1 - load)))
        waits = wait_s(of, load, np.arange(1, 9))
        assert np.all(np.diff(waits) < 0)
    for most_s in (0.05, 0.5, 2.0):
        loads = load_within(of, most_s, np.arange(1, 9))
        assert np.all(np.diff(loads) >= 0)
        reached = wait_s(of, loads, np.arange(1, 9))
        assert np.all(
            (reached <= most_s * 1.001) & ((loads == HIGHEST_LOAD) | (reached > most_s * 0.999))
        )
    assert not load_within(of, 0.0)


mixes = st.builds(
    lambda prompt, share, output: Mix.of(prompt, max(1.0, prompt * share), output),
    st.integers(100, 30_000),
    st.floats(0.01, 1.0),
    st.integers(1, 2000),
)


@settings(max_examples=40)
@given(
    mixes,
    st.sampled_from(sorted(PROFILES)),
    st.floats(0.01, 0.1),
    st.integers(2, 64),
    st.floats(0.3, 20.0),
    st.floats(0.5, 400.0),
)
def test_the_split_is_the_best_of_all_whole_numbers_of_workers(
    mix: Mix, name: str, tpot_s: float, gpus: int, ttft_s: float, gbps: float
) -> None:
    worker, targets, link = Shape.of(name), WaitTargets(tpot_s, ttft_s), Link(gbps)
    found = split(mix, worker, worker, targets, link, gpus)
    decoding = decode(worker, mix, targets, link)
    best = 0.0
    for n_p in range(1, gpus // worker.gpus):
        n_d = gpus // worker.gpus - n_p
        each = prefill(worker, mix, targets, link, workers=n_p, decode_step_s=decoding.step_s)
        best = max(best, min(n_p * each.requests_per_s, n_d * decoding.requests_per_s))
    assert (found.requests_per_s if found else 0.0) == pytest.approx(best, rel=1e-6, abs=1e-9)
    if found:
        assert found.gpus <= gpus
        assert found.ttft_s <= ttft_s * 1.001
        assert found.tpot_s <= tpot_s * 1.000001 or mix.steps == 0


@settings(max_examples=30)
@given(mixes, st.floats(0.02, 0.1))
def test_more_work_or_tighter_targets_never_raise_the_rate(mix: Mix, tpot_s: float) -> None:
    worker = Shape.of(QWEN)
    longer = Mix(mix.prompt_tokens + 500, mix.uncached_tokens + 500, mix.output_tokens)
    rates: tuple[tuple[Callable[[Mix, WaitTargets], float], float], ...] = (
        (lambda m, t: prefill(worker, m, t, Link()).requests_per_s, 1.001),
        (lambda m, t: decode(worker, m, t, Link()).requests_per_s, 1.001),
        (lambda m, t: aggregated(worker, m, t).requests_per_s, 1.02),  # a hundred steps are tried
    )
    for one, slack in rates:
        rate = one(mix, WaitTargets(tpot_s, 3.0)) * slack
        assert one(longer, WaitTargets(tpot_s, 3.0)) <= rate
        assert one(mix, WaitTargets(tpot_s * 0.9, 3.0)) <= rate
        assert one(mix, WaitTargets(tpot_s, 2.0)) <= rate


def test_the_limiting_factor_is_named() -> None:
    worker, mix = Shape.of(QWEN), Mix.of(4000, 4000, 400)
    roomy = WaitTargets(0.2, 60.0)
    assert decode(worker, mix, roomy, Link()).limited_by == "KV memory"
    assert decode(worker, mix, WaitTargets(0.02), Link()).limited_by == "decode step"
    assert decode(worker, mix, roomy, Link(gbps=0.5)).limited_by == "link"
    assert decode(worker, mix, WaitTargets(0.001), Link()).limited_by == "floor"
    assert prefill(worker, mix, roomy, Link()).limited_by == "prefill"
    assert prefill(worker, mix, roomy, Link(gbps=0.5)).limited_by == "link"
    assert prefill(worker, mix, WaitTargets(0.2, 0.5), Link()).limited_by == "TTFT"
    assert prefill(worker, mix, WaitTargets(0.2, 0.1), Link()).requests_per_s == 0.0
    with pytest.raises(ValueError, match="more than 0 Gbit/s"):
        Link(gbps=0.0)
    with pytest.raises(ValueError, match="above 0 s"):
        WaitTargets(0.0)


def test_a_mixed_pool_is_never_worse_than_a_uniform_one() -> None:
    shapes = Shapes(*[(Shape.of(QWEN), Shape.of("qwen3-32b-h100-tp4"))] * 3)
    found = match(Mix.of(8192, 2048, 128), shapes, WaitTargets(0.02, 2.0), Link(), 24)
    assert found.split is not None
    assert found.alone is not None
    assert found.best is not None
    assert found.best.requests_per_s >= found.split.requests_per_s
    assert found.best.requests_per_s >= found.alone.requests_per_s
    assert found.best.gpus <= 24
    with pytest.raises(ValueError, match="GPUs must be"):
        match(Mix.of(1, 1, 1), shapes, WaitTargets(0.1), Link(), 0)


def test_no_point_of_a_pareto_front_dominates_another() -> None:
    shapes = Shapes(*[(Shape.of(QWEN), Shape.of("qwen3-32b-h100-tp4"))] * 3)
    targets = WaitTargets(1.0, 3.0)
    for gpus in (None, 16):
        fronts = pareto(
            Mix.of(4400, 4400, 1200),
            shapes,
            list(np.geomspace(0.011, 0.1, 9)),
            targets,
            Link(),
            gpus,
        )
        for points in fronts:
            assert len(points) >= 3
            assert all(np.diff([point.per_user for point in points]) > 0)
            assert all(np.diff([point.per_gpu for point in points]) < 0)


def job(number: int, cached: int | None) -> Job:
    ids = np.array([1, 2, 3, 100 + number], dtype=np.uint64)
    return Job(number * 10**9, 4 * 16, 10, ids, cached_tokens=cached)


def test_the_cached_share_comes_from_the_log_or_from_simulated_caches() -> None:
    told = measure([job(n, 32) for n in range(10)], 16, 1, 10_000)
    assert (told.cached_by, told.cached_share) == ("log", 0.5)
    assert told.rate_per_s == pytest.approx(1.0)
    found = measure([job(n, None) for n in range(10)], 16, 1, 10_000)
    assert found.cached_by == "caches"
    assert found.cached_share == pytest.approx(0.75 * 9 / 10)  # the first request computes it
    two = measure([job(n, None) for n in range(10)], 16, 1, 10_000, "none")
    assert (two.cached_by, two.cached_share) == ("none", 0.0)
    partly = measure([job(n, 32 if n % 2 else None) for n in range(10)], 16, 1, 10_000)
    assert partly.cached_share == pytest.approx(0.5)
    whole = measure([job(n, 64) for n in range(10)], 16, 1, 10_000)
    assert whole.mix.uncached == 1.0
    with pytest.raises(MixError, match="leave out --cached"):
        measure([job(0, None)], 16, 1, 10_000, "log")
    with pytest.raises(MixError, match="no requests"):
        measure([], 16, 1, 10_000)


def test_an_impossible_mix_is_refused() -> None:
    for tokens in ((10, 11, 1), (10, 0, 1), (10, 10, 0)):
        with pytest.raises(MixError):
            Mix.of(*tokens)
    assert attention_pairs(np.array([10.0]), np.array([10.0])) == 50.0
    assert math.isinf(WaitTargets(1.0).ttft_s)
    assert isinstance(Shape.of(QWEN).step_time, StepTime)


def test_worker_numbers_around_a_match_are_tried_until_they_get_worse() -> None:
    def trials_of(good: dict[int, float]) -> tuple[list[PoolTrial], list[int]]:
        tried: list[int] = []

        def of(number: int) -> PoolTrial:
            tried.append(number)
            return PoolTrial(number, 0, 1.0, 1.0, 0.02, good[number], 0.0, 1.0)

        return climb(4, 8, of), sorted(tried)

    rising = {number: number / 10 for number in range(1, 9)}
    trials, tried = trials_of(rising)
    assert [one.prefill_workers for one in trials] == tried == [2, 3, 4, 5, 6, 7, 8]
    assert trials_of(rising | {5: 0.05, 6: 0.7, 7: 0.0, 8: 0.0})[1] == [2, 3, 4, 5, 6, 7, 8]
    assert trials_of(rising | {2: 0.0, 3: 0.0, 5: 0.0, 6: 0.0})[1] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "workload", ["translation", pytest.param("long in, short out", marks=pytest.mark.full)]
)
def test_the_computed_split_is_close_to_the_best_of_replays(workload: str) -> None:
    """The computed number of prefill workers is within one of the best that replays find. Eight
    workers run a small part of tests/bench/rate_match.py.
    """
    found = outcome(workload, QWEN, 8, 200, "always")
    assert found is not None
    assert abs(found.computed - found.best(found.computed)) <= 1
    assert found.share(found.climbed) >= 0.97
