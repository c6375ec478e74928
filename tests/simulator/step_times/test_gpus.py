"""Tests of derived step times against tables of measured kernels: no error exceeds what the command
states.
"""

from __future__ import annotations

from functools import cache

import pytest

from simulator.step_times.gpus import GPUS
from tests.simulator.step_times.fit_shares import fitted, numbers_of
from tests.simulator.step_times.table_rows import UNSEEN, Case, errors_by_kind, read_cases, summary

MOST_MEDIAN, MOST_P90 = 20.0, 45.0  # of one model on one deployment


@cache
def cases() -> tuple[Case, ...]:
    return tuple(read_cases())


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_errors_are_within_the_stated_errors(gpu: str) -> None:
    found = errors_by_kind(cases(), GPUS[gpu])
    assert found.keys() == GPUS[gpu].errors.keys()
    for kind, errors in found.items():
        middle, most, _ = summary(errors)
        assert middle <= GPUS[gpu].errors[kind][0]
        assert most <= 1.1 * GPUS[gpu].errors[kind][1]


def test_no_model_has_large_errors() -> None:
    for case in cases():
        errors = [100 * abs(error) for error in case.errors(GPUS[case.gpu])]
        middle, most, _ = summary(errors)
        assert middle <= MOST_MEDIAN, case.name
        assert most <= MOST_P90, case.name


def test_models_without_fitted_rows_have_small_errors() -> None:
    """Computed times are near the tables for models with no fitted row, too, among them models with
    linear attention, with Mamba layers, and with heads of 256.
    """
    unseen = read_cases(UNSEEN)
    assert not {case.model for case in unseen} & {case.model for case in cases()}
    errors = [100 * abs(one) for case in unseen for one in case.errors(GPUS[case.gpu])]
    middle, most, worst = summary(errors)
    assert middle < 8.0
    assert most < 23.0
    assert worst < 50.0


def test_every_kind_of_model_and_every_gpu_was_compared() -> None:
    assert {case.gpu for case in cases()} == GPUS.keys()
    assert len({case.model for case in cases()}) == 9
    assert {case.gpus for case in cases()} == {1, 2, 4, 8}


def test_efficiency_shares_are_the_best_fit() -> None:
    gpu = GPUS["a100"]
    found = fitted(gpu, [case for case in cases() if case.gpu == "a100"])
    written = numbers_of(gpu.shares)
    for name, value in numbers_of(found.shares).items():
        assert written[name] == pytest.approx(value, rel=0.05), name


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_efficiency_shares_are_between_0_and_1(gpu: str) -> None:
    for name, value in numbers_of(GPUS[gpu].shares).items():
        if name not in ("p", "experts_p"):
            assert 0 < value < 1, name
    assert GPUS[gpu].flops.keys() == GPUS[gpu].shares.gemm.keys()
    assert GPUS[gpu].flops.keys() == GPUS[gpu].shares.experts.keys()
    assert GPUS[gpu].unmeasured <= numbers_of(GPUS[gpu].shares).keys()


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_more_gpus_than_measured_are_as_fast_as_the_largest_measured_number(gpu: str) -> None:
    record = GPUS[gpu]
    assert record.all_reduce_bytes_s(3) == record.all_reduce[4]
    assert record.all_reduce_bytes_s(16) == record.all_reduce[8]
