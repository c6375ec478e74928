"""Tests of finding the known name that an unknown name probably means."""

from __future__ import annotations

import pytest

from policies.near import did_you_mean, nearest


@pytest.mark.parametrize(
    ("given", "near"),
    [
        *(
            ("hybird", "hybrid"),
            ("HYBRID", "hybrid"),
            ("hybrid", "hybrid"),
            ("warm_set", "warmset"),
        ),
        *(("", None), ("zzz", None), ("h", None), ("x" * 10_000, None)),
    ],
)
def test_the_nearest_name_is_found_or_none(given, near):
    assert nearest(given, ("hybrid", "warmset", "random")) == near


def test_of_two_names_as_near_the_one_with_the_longest_piece_in_common_is_meant():
    names = ("balance_abs", "balance_rel", "match_threshold")
    for given in ("balance_abs_threshold", "balance_abs_treshold", "balance-abs-threshold"):
        assert nearest(given, names) == "balance_abs"
        assert nearest(given, reversed(names)) == "balance_abs"
    assert nearest("balance_rel_treshold", names) == "balance_rel"


def test_the_hint_stands_behind_what_is_said():
    assert did_you_mean("hybird", ["hybrid"]) == " (did you mean hybrid?)"
    assert did_you_mean("hybird", []) == ""
