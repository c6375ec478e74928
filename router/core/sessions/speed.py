"""Learns how fast each worker really computes and loads KV, from the times of answers.

A prefill rate is learned over a period in which a worker always had prompts to compute: the work of
all prompts divided by the time that passed (the utilization law of operational analysis, Denning
and Buzen, 1978). This holds whatever the engine batches together. The rate of one worker is at
first the median of its samples, which one absurd sample does not move, and later an exponentially
weighted mean of logarithms, because ratios, not differences, matter between a fast and a slow GPU.

Workers mostly run on equal machines, and if noise were believed, all requests of an idle pool would
go to the worker that looks fastest. So a worker has the pool's rate, relative to the rate in its
description, until its own samples differ clearly from that (shrinkage by a pre-test). New workers
begin with the pool's rate, too. The extra work of attention for a token late in a long context is
the same for all workers of a model except for their speed, so it is learned from all of them
together (`PairCost` of the columns).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from types import MappingProxyType

import numpy as np

from policies.contract import Floats
from policies.pricing import DISK_SPEED, HOST_SPEED
from router.core.workers.columns import Cells, WorkerColumns
from router.core.workers.ledger import Charge

_WEIGHT = 0.1  # of a new sample, once there are as many as a median takes
_MEDIAN_SAMPLES = 9
_OUTLIER = 4.0  # a later one counts as at most this many times faster or slower than the estimate
_OWN_SAMPLES = _MEDIAN_SAMPLES  # before a worker may differ from the pool
_OWN_RATIO = 1.25  # by which it then must
_TOLD_RATIO = 1.01  # a smaller change of the pool's rate is not written to all workers
_CALIBRATION_TOKENS_MIN = 256  # shorter prefills measure overheads, not speed
# Prefills of at most a few steps do not count either: they measure the decodes in the same steps.
_CALIBRATION_STEPS_MIN = 4.0
# Tokens. The router cannot see how much of a waiting prompt is computed; beside this much other
# work the error is small.
_WORK_BESIDE_WAITING = 32_768.0
_LOADED_SHARE = 0.1  # of tokens computed: where more were loaded, the time is not prefill's
_DECODE_SHARE = 0.25  # of an answer without a first token that may be decode
_GAP_TOKENS_MIN = 8  # of a whole answer: how fewer came tells of the network
_RATE_RANGE = (1.0, 1e9)  # tokens a second: no run of absurd samples leads out of these
_STEP_RANGE_S = (1e-6, 10.0)


def _moved(estimate: float, sample: float, bounds: tuple[float, float]) -> float:
    ratio = _within(sample / estimate, 1 / _OUTLIER, _OUTLIER)
    return _within(estimate * math.exp(_WEIGHT * math.log(ratio)), *bounds)


def _within(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


class PoolSpeed:
    """Averages over the whole pool how much faster workers prefill than their descriptions say. The
    average is that of the logarithms of learned rate / described rate. A worker with more samples
    weighs more, up to a limit. Lifetime: process.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # weight and logarithm, by slot
        self._weight = self._sum = 0.0

    @property
    def log_ratio(self) -> float:
        """The mean logarithm of learned prefill rate / described prefill rate in the pool."""
        return self._sum / self._weight if self._weight else 0.0

    def learned(self, slot: int, samples: int, log_ratio: float) -> None:
        """Set how much faster a worker prefills than its description says. `samples` is the number
        of samples from which this was learned, and `log_ratio` the logarithm of learned rate /
        described rate. The value of a worker that left stays in the mean until another worker takes
        its slot.
        """
        old_weight, old = self._known.get(slot, (0.0, 0.0))
        weight = float(min(samples, _MEDIAN_SAMPLES))
        self._known[slot] = weight, log_ratio
        self._weight += weight - old_weight
        self._sum += weight * log_ratio - old_weight * old


class SpeedEstimator:
    """Learns each worker's prefill rate, decode step time and attention cost from its answers.

    It writes them to the worker columns `prefill_tokens_per_s`, `step_s` and `attention`.
    Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._cells = Cells(columns)
        self._pool = PoolSpeed()
        self._first: dict[int, list[float]] = {}  # samples of who has few, as logarithms, by slot
        self._own: dict[int, float] = {}  # by slot, of who has more
        self._apart = np.zeros(len(columns.worker_id))  # from the pool, as logarithms, by slot

    def first_token(self, charge: Charge, now_s: float) -> None:
        """Learn a worker's prefill rate from a prefill that has ended.

        A worker computes prompts together. So the rate is computed over all prefills that ended
        since the last sample, or since the worker was idle. If other prompts still wait for their
        first token, nothing is learned until the finished work is large.
        """
        period, cells = charge.period, self._cells
        if not period.shown or (
            cells.waiting[charge.slot] and period.work_tokens < _WORK_BESIDE_WAITING
        ):
            return
        work, tokens = period.work_tokens, period.uncached_tokens
        began_s, period.began_s = period.began_s, now_s
        single = period.dispatched == period.first_tokens == 1
        loads = period.loaded_tokens > _LOADED_SHARE * tokens
        period.first_tokens, period.uncached_tokens, period.work_tokens = 0, 0, 0.0
        period.loaded_tokens = 0
        if tokens >= _CALIBRATION_TOKENS_MIN and not loads:
            self._prefilled(charge, work, now_s - began_s, single)

    def answered(self, charge: Charge, output_tokens: int, now_s: float) -> None:
        """Learn a worker's speed from a complete answer.

        If the router did not see the first token, learn the prefill rate, provided that the
        answer's decode took little of the time. If the router saw the first token but no progress
        after it, learn the decode step time.
        """
        cells, slot, period = self._cells, charge.slot, charge.period
        if charge.output_tokens == 1 and output_tokens >= _GAP_TOKENS_MIN:
            gap_s = (now_s - charge.progress_s) / (output_tokens - 1)
            if gap_s > 0:
                self.token_gap(slot, gap_s)
        alone = charge.alone and period.dispatched == 1 and cells.requests[slot] == 1
        if period.shown or not alone or charge.uncached_tokens < _CALIBRATION_TOKENS_MIN:
            return
        if charge.loads.tokens > _LOADED_SHARE * charge.uncached_tokens:
            return
        elapsed_s = now_s - charge.dispatched_s
        decode_s = max(output_tokens - 1, 0) * cells.step_s[slot]  # the first is the prefill's own
        if decode_s <= _DECODE_SHARE * elapsed_s:
            self._prefilled(charge, charge.work_tokens, elapsed_s - decode_s, True)

    def token_gap(self, slot: int, gap_s: float) -> None:
        """Learn a worker's decode step time from an answer that took `gap_s` seconds per token.

        `gap_s` must be above 0.
        """
        step_s = self._cells.step_s
        step_s[slot] = _moved(step_s[slot], gap_s, _STEP_RANGE_S)

    def _prefilled(self, charge: Charge, work: float, elapsed_s: float, single: bool) -> None:
        """Learn a worker's prefill rate from prefills that took `elapsed_s` seconds in all. `work`
        is the work of these prefills; its unit is one token computed without attention. `single` is
        True if only the prompt of `charge` was prefilled.
        """
        cells, slot = self._cells, charge.slot
        known, step_s = cells.prefill_tokens_per_s[slot], cells.step_s[slot]
        if elapsed_s <= 0:
            return
        # On average the first request had to sit out half a step that was already under way.
        prefill_s = elapsed_s - step_s / 2
        if prefill_s < _CALIBRATION_STEPS_MIN * step_s:
            if work / elapsed_s <= known:
                return
            prefill_s = elapsed_s  # the worker is at least that fast, whatever its steps take
        elif single:
            tokens, cached = charge.uncached_tokens, charge.prompt_tokens - charge.uncached_tokens
            attention = self._columns.attention
            attention.prefill(tokens, cached, prefill_s * known)
            work = attention.work(tokens, cached)
        self._learn(slot, _within(work / prefill_s, *_RATE_RANGE))

    def _learn(self, slot: int, rate: float) -> None:
        columns, cells = self._columns, self._cells
        given, samples = cells.given_tokens_per_s[slot], cells.speed_samples[slot]
        own = self._own_after(slot, samples, math.log(rate / given))
        cells.speed_samples[slot] = samples + 1
        self._pool.learned(slot, samples + 1, own)
        pool = self._pool.log_ratio
        apart = own - pool
        differs = samples + 1 >= _OWN_SAMPLES and abs(apart) > math.log(_OWN_RATIO)
        self._apart[slot] = apart if differs else 0.0
        if abs(pool - math.log(columns.learned_speed)) > math.log(_TOLD_RATIO):
            columns.learned_speed = math.exp(pool)
            self._apart[columns.speed_samples == 0] = 0.0  # of who was there before
            rates = columns.given_tokens_per_s * (columns.learned_speed * np.exp(self._apart))
            np.clip(rates, *_RATE_RANGE, out=columns.prefill_tokens_per_s)
        else:
            ratio = columns.learned_speed * math.exp(self._apart[slot])
            cells.prefill_tokens_per_s[slot] = _within(given * ratio, *_RATE_RANGE)

    def _own_after(self, slot: int, samples: int, sample: float) -> float:
        """Add a sample of a worker's prefill rate, and return the worker's new estimate.

        The sample and the estimate are logarithms of learned rate / described rate. `samples` is
        the number of earlier samples.
        """
        if samples < _MEDIAN_SAMPLES:
            if not samples:
                self._first[slot] = [self._pool.log_ratio]  # as one sample: the next may be absurd
            first = self._first[slot]
            first.append(sample)
            own = median(first)
        else:
            self._first.pop(slot, None)
            before, most = self._own[slot], math.log(_OUTLIER)
            own = before + _WEIGHT * _within(sample - before, -most, most)
        self._own[slot] = own
        return own


_SPEEDS: Mapping[str, float] = MappingProxyType({"host": HOST_SPEED, "disk": DISK_SPEED})
_LOADED_TOKENS_MIN = 1024  # shorter loads measure overheads, not speed
_OWN_SHARE = 0.8  # of what was loaded: by so much one tier accounts for the time


class LoadEstimator:
    """Learns how fast each worker loads KV, and writes `host_tokens_per_s` and `disk_tokens_per_s`
    of the worker columns. It learns from prompts that were prefilled alone, and of which more
    tokens were loaded than computed. The time of such a prompt is the prefill at the worker's known
    rate, plus the load, plus half a step of waiting before each of the two if other requests run
    there. The rate is at first the median of samples, one of which is the assumed rate, and later a
    mean of logarithms, as for prefill. If a worker's description changes, its rates are unknown
    again (NaN). Lifetime: process.
    """

    def __init__(self, columns: WorkerColumns) -> None:
        self._columns = columns
        self._first: dict[tuple[int, str], list[float]] = {}  # logarithms, of who has few

    def first_token(self, charge: Charge, now_s: float) -> None:
        """Learn how fast a worker loads KV from host memory or disk, from a prefill that has ended.

        Call this method before `SpeedEstimator.first_token`, which resets the data that it reads.
        """
        period, loaded = charge.period, charge.loads.tokens
        if loaded < max(_LOADED_TOKENS_MIN, charge.uncached_tokens):
            return
        if not (period.shown and period.dispatched == period.first_tokens == 1):
            return
        from_host = charge.loads.host / loaded
        if 1.0 - _OWN_SHARE < from_host < _OWN_SHARE:
            return
        columns, slot = self._columns, charge.slot
        rate = columns.prefill_tokens_per_s[slot].item()
        wait_s = columns.step_s[slot].item() if columns.requests[slot] > 1 else 0.0
        load_s = now_s - charge.dispatched_s - charge.work_tokens / rate - wait_s
        tier = "host" if from_host >= _OWN_SHARE else "disk"
        gpu_tokens = charge.prompt_tokens - charge.uncached_tokens - loaded
        presumed_s = columns.attention.work(loaded, gpu_tokens) / rate / _SPEEDS[tier]
        self._learn(slot, tier, loaded / max(load_s, 1e-9), loaded / presumed_s)

    def _learn(self, slot: int, tier: str, rate: float, presumed: float) -> None:
        column: Floats = getattr(self._columns, f"{tier}_tokens_per_s")
        known, most = column[slot].item(), math.log(_OUTLIER)
        if math.isnan(known):
            known = presumed
            self._first[slot, tier] = [math.log(known)]
        before = math.log(known)
        sample = _within(math.log(rate), before - most, before + most)
        first = self._first.get((slot, tier))
        if first is None:
            own = before + _WEIGHT * (sample - before)
        else:
            first.append(sample)
            own = median(first)
            if len(first) > _MEDIAN_SAMPLES:
                del self._first[slot, tier]
        column[slot] = _within(math.exp(own), *_RATE_RANGE)
