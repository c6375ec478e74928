"""Tests of all 39 causes of the doctor: each is named first with its numbers, and the same pool
without it has no findings.
"""

from __future__ import annotations

import pytest

from router.doctor.evidence import Evidence
from router.doctor.judge import CAUSES, judge
from tests.router.doctor.catalogue import CASES, Case, other_engines

OTHERS = other_engines()


def test_the_catalogue_has_all_causes_and_each_has_a_test_case() -> None:
    assert sorted(cause.number for cause in CAUSES) == list(range(1, 40))
    assert sorted(case.number for case in CASES) == list(range(1, 40))
    for cause in CAUSES:
        assert cause.source
        assert sum(one is not None for one in cause[3:]) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
def test_each_cause_is_the_first_finding_with_its_evidence_and_change(case: Case) -> None:
    found = judge(case.sick)
    assert [one.number for one in found][:1] == [case.number], found
    first = found[0]
    for part in case.says:
        assert part in first.found.evidence, first.found.evidence
    if case.change is None:
        assert first.harmless
    else:
        change = first.found.changes[0]
        assert change.name.startswith(case.change), change
        assert change.now
        assert change.to not in ("", change.now)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
def test_the_same_pool_without_the_cause_has_no_findings(case: Case) -> None:
    assert case.well.loaded
    assert judge(case.well) == ()


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_than_triton_have_the_same_causes(name: str) -> None:
    number, sick, well = OTHERS[name]
    assert judge(sick)[0].number == number
    assert judge(well) == ()


def test_an_idle_pool_has_no_findings() -> None:
    assert judge(Evidence(())) == ()
