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
def test_the_nearest_known_name_is_found_if_any(given, near):
    assert nearest(given, ("hybrid", "warmset", "random")) == near


def test_of_two_equally_near_names_the_one_with_the_longer_common_part_wins():
    names = ("balance_abs", "balance_rel", "match_threshold")
    for given in ("balance_abs_threshold", "balance_abs_treshold", "balance-abs-threshold"):
        assert nearest(given, names) == "balance_abs"
        assert nearest(given, reversed(names)) == "balance_abs"
    assert nearest("balance_rel_treshold", names) == "balance_rel"


def test_the_hint_is_appended_to_the_message():
    assert did_you_mean("hybird", ["hybrid"]) == " (did you mean hybrid?)"
    assert did_you_mean("hybird", []) == ""
