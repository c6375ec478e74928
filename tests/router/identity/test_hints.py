"""Tests of hints for priority and length, in the forms of other routers."""

from __future__ import annotations

from typing import Any

import pytest

from router.identity.hints import Hints, hints_in
from router.keys.key_file import KeyTerms
from router.request.quotas import priority_within


@pytest.mark.parametrize(
    ("headers", "values", "hints"),
    [
        ({}, {}, Hints()),
        ({"x-dynamo-request-priority": "5"}, {}, Hints(-5)),
        ({"x-dynamo-request-priority": "-5"}, {}, Hints(5)),
        ({"x-dynamo-request-strict-priority": "2"}, {}, Hints(-2)),
        ({"x-dynamo-request-priority": "high"}, {"service_tier": "flex"}, Hints(1)),
        ({"x-dynamo-request-priority": "9" * 30}, {}, Hints()),
        ({}, {"nvext": {"agent_hints": {"priority": 3, "osl": 200}}}, Hints(-3, 200)),
        ({}, {"nvext": {"agent_hints": {"priority": 1e18}}}, Hints(-(2**31 - 1))),
        ({}, {"nvext": {"agent_hints": {"priority": float("inf")}}}, Hints(-(2**31 - 1))),
        ({}, {"nvext": {"agent_hints": {"priority": float("nan"), "osl": 1.5}}}, Hints()),
        ({}, {"nvext": {"agent_hints": {"priority": True, "osl": -1}}}, Hints()),
        (
            {"x-dynamo-request-priority": "1"},
            {"nvext": {"agent_hints": {"priority": 3}}},
            Hints(-1),
        ),
        ({}, {"agent_hint": {"priority": 2, "expected_output_length": 9}}, Hints(-2, 9)),
        ({}, {"vllm_xargs": {"agentic_context": {"priority": -2}}}, Hints(2)),
        ({}, {"service_tier": "priority"}, Hints(-1)),
        ({}, {"service_tier": "default"}, Hints()),
        ({}, {"service_tier": ["flex"]}, Hints()),
    ],
)  # fmt: skip
def test_priority_and_length_hints_are_read_from_headers_and_body(
    headers: dict[str, str], values: dict[str, Any], hints: Hints
) -> None:
    assert hints_in(headers, values) == hints


@pytest.mark.parametrize(
    ("asked", "hint", "got"),
    [(0, None, 0), (0, -9, -2), (0, 9, 3), (0, 1, 1), (1, -2, 1)],
)
def test_a_hint_stays_within_the_keys_range(asked: int, hint: int | None, got: int) -> None:
    assert priority_within(KeyTerms(priority=(-2, 3)), asked, hint) == got


def test_a_key_without_a_range_leaves_only_the_int32_bound() -> None:
    assert priority_within(KeyTerms(), 0, -(2**40)) == -(2**31)
