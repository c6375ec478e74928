"""Tests of plans for numbers of instances, against simulations of single requests and against
formulas.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from simulator.capacity.batches import (
    Batches,
    BatchSize,
    MeasuredBatches,
    MeasurementError,
    fit,
    given,
    knee,
)
from simulator.capacity.instances import (
    ArrivingLoad,
    Memory,
    Planner,
    ServiceTarget,
    load_of,
    row,
    run,
)
from simulator.traces.job import Job
from tests.effort import examples

ARRIVAL, END, TIMER = range(3)
REQUESTS = 30_000
CASES = 10


@dataclass
class Found:
    """The figures that the simulation of single requests gave. Lifetime: test."""

    ends: np.ndarray  # of each request
    latencies: np.ndarray
    batches: list[int]
    busy: float
    span: float


def events(
    arrivals: Sequence[float], seconds: Sequence[float], instances: int, delay: float = 0.0
) -> Found:
    """Simulate every arrival, end and timer as an event; events at the same time precede a
    decision.
    """
    largest = len(seconds) - 1
    agenda = [(at, ARRIVAL, number, 0.0) for number, at in enumerate(arrivals)]
    heapq.heapify(agenda)
    queue: list[int] = []
    idle, busy = instances, 0.0
    ends, batches = np.zeros(len(arrivals)), []
    while agenda:
        now = agenda[0][0]
        while agenda and agenda[0][0] == now:
            _, kind, number, _ = heapq.heappop(agenda)
            if kind == ARRIVAL:
                queue.append(number)
                heapq.heappush(agenda, (now + delay, TIMER, number, 0.0))
            elif kind == END:
                idle += 1
        while idle and queue and (len(queue) >= largest or now >= arrivals[queue[0]] + delay):
            batch, queue = queue[:largest], queue[largest:]
            idle, busy = idle - 1, busy + seconds[len(batch)]
            ends[batch] = now + seconds[len(batch)]
            batches.append(len(batch))
            heapq.heappush(agenda, (now + seconds[len(batch)], END, -1, 0.0))
    latencies = ends - np.array(arrivals)
    return Found(ends, latencies, batches, busy, float(ends.max() - arrivals[0]))


def poisson(rate: float, seed: int, count: int = REQUESTS) -> list[float]:
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count)).tolist()


times = st.integers(0, 40).map(lambda n: n / 8)


@settings(max_examples=examples(300), deadline=None)
@drawn(
    st.lists(times, min_size=1, max_size=40).map(sorted),
    st.lists(st.integers(1, 12).map(lambda n: n / 8), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.125, 0.5, 3.0]),
)
def test_batches_equal_those_of_an_event_simulation(
    arrivals: list[float], each: list[float], instances: int, delay: float
) -> None:
    seconds = [0.0, *sorted(each)]
    starts, ends, sizes = run(arrivals, seconds, instances, delay)
    found = events(arrivals, seconds, instances, delay)
    assert sizes == found.batches
    assert np.repeat(ends, sizes).tolist() == found.ends.tolist()
    assert sum(sizes) == len(arrivals)
    assert (starts[1:] >= starts[:-1]).all()


def chain(rate: float, seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return mean batch, utilisation and mean latency of one instance, computed from the Markov
    chain of the queue that is left at the end of an execution. The result is exact for Poisson
    arrivals.
    """
    largest, room = len(seconds) - 1, 400
    step = np.zeros((room, room))
    for q in range(room):
        b = max(1, min(q, largest))
        mean = rate * seconds[b]
        k = np.arange(room)
        log = k * math.log(mean) - mean - np.array([math.lgamma(one + 1) for one in k])
        base = max(0, q - b)
        step[q, base:] += np.exp(log)[: room - base]
        step[q, -1] += 1.0 - step[q].sum()
    v = np.linalg.matrix_power(step, 4096)[0]
    sizes = np.array([max(1, min(q, largest)) for q in range(room)])
    rests = np.array([max(0, q - largest) for q in range(room)])
    s = np.array([seconds[b] for b in sizes])
    cycle = float(v @ s + v[0] / rate)
    held = float(v @ ((sizes + rests) * s + rate * s**2 / 2))
    return float(v @ sizes), float(v @ s) / cycle, held / cycle / rate


@pytest.mark.parametrize("rate", [50.0, 100.0, 200.0, 270.0])
def test_one_instance_agrees_with_the_markov_chain_of_its_queue(rate: float) -> None:
    seconds = given(0.010, 0.002, 8).seconds
    found = row(ArrivingLoad(rate), seconds, 1)
    batch, busy, latency = chain(rate, seconds)
    assert found.batch == pytest.approx(batch, rel=0.03)
    assert found.utilisation == pytest.approx(busy, abs=0.02)
    assert found.mean_s == pytest.approx(latency, rel=0.05)


@pytest.mark.parametrize("instances", [2, 4, 8])
@pytest.mark.parametrize("load", [0.6, 0.85])
def test_the_wait_without_batches_is_that_of_allen_and_cunneen(instances: int, load: float) -> None:
    """Without batching, the mean wait is that of Allen and Cunneen: W = (1 + 0) / 2 x Erlang C / (n
    mu - l). The 0 is there because all executions take the same time.
    """
    service = 0.02
    offered = load * instances
    terms = [offered**k / math.factorial(k) for k in range(instances)]
    last = offered**instances / math.factorial(instances) / (1 - load)
    wait = 0.5 * last / (sum(terms) + last) * service / (instances * (1 - load))
    found = row(ArrivingLoad(offered / service), [0.0, service], instances)
    assert found.wait_s == pytest.approx(wait, rel=0.2, abs=0.01 * service)
    assert found.utilisation == pytest.approx(load, abs=0.02)


def test_many_instances_are_simulated_for_long_enough() -> None:
    """The simulation of many instances runs until each has executed often, so that the beginning,
    when all are free, does not show in the figures.
    """
    seconds = given(0.010, 0.002, 8).seconds
    few, many = (row(ArrivingLoad(0.9 * n * 8 / 0.026), seconds, n) for n in (40, 1000))
    assert many.batch == pytest.approx(few.batch, rel=0.05)
    assert many.utilisation == pytest.approx(few.utilisation, abs=0.02)


def measured(base: float, each: float, sizes: Sequence[int], seed: int, top: int) -> Batches:
    """Return a fit to measurements of a known execution time a + c b; each measurement is a mean of
    noisy executions.
    """
    draw = np.random.default_rng(seed)
    seen = [
        BatchSize(b, 50, float(np.mean((base + each * b) * (1 + 0.1 * draw.standard_normal(50)))))
        for b in sizes
    ]
    return fit(MeasuredBatches("hidden", top, 1, seen))


def hidden(seed: int) -> tuple[float, float, int, int, float]:
    """Draw a random model of executions: a, c, the largest batch, the number of instances, and a
    rate that they can serve.
    """
    draw = np.random.default_rng(seed)
    base, each = draw.uniform(0.002, 0.04), draw.uniform(0.0005, 0.006)
    top, instances = int(draw.integers(4, 17)), int(draw.integers(1, 7))
    rate = draw.uniform(0.2, 0.85) * instances * top / (base + each * top)
    return base, each, top, instances, rate


@pytest.mark.parametrize("seed", range(12))
def test_figures_agree_with_simulated_arrivals(seed: int) -> None:
    base, each, top, instances, rate = hidden(seed)
    batches = measured(base, each, sorted({1, 2, top // 2, top}), seed, top)
    planned = row(ArrivingLoad(rate), batches.seconds, instances)
    true = [0.0, *(base + each * b for b in range(1, top + 1))]
    found = events(poisson(rate, seed + 100), true, instances)
    assert planned.batch == pytest.approx(float(np.mean(found.batches)), rel=0.10)
    assert rate == pytest.approx(len(found.ends) / found.span, rel=0.10)
    assert planned.utilisation == pytest.approx(found.busy / found.span / instances, abs=0.05)
    assert planned.p50_s == pytest.approx(float(np.median(found.latencies)), rel=0.15)
    # At ten times its capacity the pool completes the rate that the plan gives as its limit.
    most = rate / planned.capacity_share
    found = events(poisson(10 * most, seed, 5000), true, instances)
    assert most == pytest.approx(len(found.ends) / found.span, rel=0.10)


def test_the_planned_count_keeps_the_target_and_one_fewer_does_not() -> None:
    good = 0
    for seed in range(CASES):
        base, each, top, _, rate = hidden(1000 + seed)
        batches = measured(base, each, sorted({1, 2, top // 2, top}), seed, top)
        true = [0.0, *(base + each * b for b in range(1, top + 1))]
        draw = np.random.default_rng(seed)
        bound = float(draw.uniform(1.3, 3.0)) * true[-1]
        plan = Planner([batches], ArrivingLoad(rate), ServiceTarget(p99_s=bound)).plan()
        assert plan.needed is not None

        def p99(count: int, rate: float = rate / 0.8, seed: int = seed) -> float:
            if rate >= count * top / true[-1]:  # noqa: B023
                return math.inf
            arrivals = poisson(rate, seed + 500, 25_000)
            return float(np.percentile(events(arrivals, true, count).latencies, 99))  # noqa: B023

        fewer = plan.needed == 1 or p99(plan.needed - 1) > bound
        good += p99(plan.needed) <= bound and fewer
    assert good >= 8


def test_the_plan_adds_one_instance_for_failures_within_the_allowed_number() -> None:
    line = given(0.010, 0.002, 8)
    target = ServiceTarget(p99_s=0.05)
    plan = Planner([line], ArrivingLoad(230.0), target).plan()
    assert plan.needed is not None
    assert plan.with_failure is not None
    plain = Planner([line], ArrivingLoad(230.0), ServiceTarget(p99_s=0.05, headroom=0.0)).plan()
    assert plan.with_failure == max(plan.needed, plain.needed + 1)
    few = Planner([line], ArrivingLoad(230.0), target, most=plan.with_failure - 1).plan()
    assert few.needed == (plan.needed if plan.needed < plan.with_failure else None)
    assert few.with_failure is None


def test_bursty_arrivals_need_more_instances_and_even_ones_fewer() -> None:
    line = given(0.010, 0.002, 8)

    def needed(variability: float) -> int:
        plan = Planner([line], ArrivingLoad(500.0, variability), ServiceTarget(p99_s=0.05)).plan()
        assert plan.needed is not None
        return plan.needed

    assert needed(0.0) <= needed(1.0) < needed(8.0)


def test_a_count_uses_the_measurement_of_at_most_as_many_instances() -> None:
    alone, beside = given(0.010, 0.002, 8), given(0.030, 0.006, 8)
    beside = Batches("given", 3, beside.base_s, beside.per_request_s, 8)
    planner = Planner([beside, alone], ArrivingLoad(100.0), ServiceTarget())
    assert [planner.batches(n).instances for n in (1, 2, 3, 9)] == [1, 1, 3, 3]


def test_a_batching_delay_is_recommended_only_if_it_saves_latency() -> None:
    line = given(0.010, 0.0005, 16)
    assert Planner([line], ArrivingLoad(20.0), ServiceTarget(p99_s=0.05)).plan().delay_s == 0.0
    many = Planner([line], ArrivingLoad(2500.0), ServiceTarget(p99_s=0.05)).plan()
    if many.delayed is not None:
        assert many.reserve is not None
        assert many.delayed.p99_s < 0.95 * many.reserve.p99_s
        assert many.delayed.batch > many.reserve.batch


def test_a_line_is_fitted_with_its_error() -> None:
    found = measured(0.010, 0.002, [1, 2, 4, 8], 3, 8)
    assert found.base_s == pytest.approx(0.010, rel=0.1)
    assert found.per_request_s == pytest.approx(0.002, rel=0.1)
    error = found.error_s(8)
    assert error is not None
    assert abs(found.seconds[8] - 0.026) <= error
    assert found.within(-1)[4] < found.seconds[4] < found.within(1)[4]
    assert not found.is_bent


def test_no_time_is_given_beyond_twice_the_largest_measured_batch() -> None:
    found = measured(0.010, 0.002, [1, 2, 4], 3, 64)
    assert (found.largest, found.unprofiled_max) == (8, 64)
    assert len(found.seconds) == 9
    assert any(
        "none above 4" in note
        for note in Planner([found], ArrivingLoad(9.0), ServiceTarget()).plan().notes
    )


def test_batch_sizes_that_form_no_line_are_interpolated() -> None:
    sizes = [BatchSize(1, 9, 0.010), BatchSize(4, 9, 0.010), BatchSize(8, 9, 0.030)]
    found = fit(MeasuredBatches("m", 16, 1, sizes))
    assert found.is_bent
    assert found.seconds[1:5] == pytest.approx([0.010] * 4)
    assert found.seconds[8] == pytest.approx(0.030)
    assert found.seconds[16] > 0.030


def test_noise_never_makes_a_cost_negative() -> None:
    falling = fit(MeasuredBatches("m", 4, 1, [BatchSize(1, 9, 0.020), BatchSize(4, 9, 0.019)]))
    assert falling.per_request_s == 0.0
    steep = fit(MeasuredBatches("m", 4, 1, [BatchSize(1, 9, 0.001), BatchSize(4, 9, 0.020)]))
    assert steep.base_s == 0.0
    assert fit(MeasuredBatches("m", 0, 1, [BatchSize(1, 9, 0.020)])).seconds == [0.0, 0.020]
    with pytest.raises(MeasurementError, match="a line needs two sizes"):
        fit(MeasuredBatches("m", 8, 1, [BatchSize(1, 9, 0.020), BatchSize(1, 9, 0.021)]))
    with pytest.raises(MeasurementError, match="no batch was seen"):
        fit(MeasuredBatches("m", 8, 1, []))


sizes = st.builds(
    BatchSize,
    st.integers(1, 64),
    st.integers(1, 1 << 53),
    st.floats(1e-12, 86_400, allow_subnormal=False),
)


@settings(max_examples=examples(300), deadline=None)
@drawn(st.lists(sizes, max_size=8), st.integers(0, 4096), st.sampled_from([None, 1, 16]))
def test_any_measurement_is_refused_or_gives_valid_times(
    seen: list[BatchSize], top: int, asked: int | None
) -> None:
    try:
        found = fit(MeasuredBatches("m", top, 1, seen), asked)
    except MeasurementError:
        assert len({one.batch for one in seen}) < 2
        return
    largest = max(one.batch for one in seen)
    for sign in (-1, 0, 1):
        each = found.within(sign) if sign else found.seconds
        assert len(each) - 1 == found.largest <= 2 * largest
        assert all(0 < low <= high < math.inf for low, high in pairwise(each[1:]))
        assert 0 < each[1] < math.inf
    assert 1 <= knee(found, 0.01).requests <= found.largest
    assert row(ArrivingLoad(0.5 * found.most_per_s), found.seconds, 1).batch >= 1


def test_the_knee_is_the_minimum_of_its_rules() -> None:
    line = given(0.010, 0.001, 32)
    most = line.rate_per_s(32)
    assert knee(line).requests == math.ceil(most * line.seconds[1])
    assert knee(line, 0.0131).requests == 3
    assert knee(line, 0.0131).rule == "the latency bound"
    flat = given(0.0, 0.01, 8)
    assert knee(flat).requests == 1


def test_memory_leaves_its_headroom() -> None:
    memory = Memory(16.0, 3.0, 0.05, devices=2)
    assert memory.most(8, 0.2) == 6
    assert Memory(16.0, 3.0, 1.5).most(8, 0.2) == 0


def test_a_plan_from_a_log_uses_the_peak_rate() -> None:
    draw = np.random.default_rng(5)
    calm = np.cumsum(draw.exponential(1 / 10, 6000))
    busy = calm[-1] + np.cumsum(draw.exponential(1 / 50, 6000))
    jobs = [Job(round(at * 1e9), 1, 1, np.zeros(0, np.uint64)) for at in (*calm, *busy)]
    found = load_of(jobs)
    assert found.rate_per_s == pytest.approx(50, rel=0.1)
    assert found.variability == pytest.approx(1.0, rel=0.15)
    even = [Job(n * 10_000_000, 1, 1, np.zeros(0, np.uint64)) for n in range(1000)]
    assert load_of(even) == ArrivingLoad(pytest.approx(100.0), pytest.approx(0.0, abs=1e-9))
    with pytest.raises(ValueError, match="give --rate"):
        load_of(even[:1])
