"""Tests of the known name that an unknown one is likely to mean."""

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


def test_the_hint_stands_behind_what_is_said():
    assert did_you_mean("hybird", ["hybrid"]) == " (did you mean hybrid?)"
    assert did_you_mean("hybird", []) == ""
