"""Reads the header x-warmroute-explain, whose value is a sentence for people and then JSON."""

from __future__ import annotations

import json
from typing import Any

EXPLAIN = "x-warmroute-explain"


def decision_in(value: str) -> dict[str, Any]:
    """Return the decision in the header's value as clients read it: the JSON from the first brace
    on.
    """
    sentence, brace, rest = value.partition("{")
    assert sentence.endswith("; "), value
    decision: dict[str, Any] = json.loads(brace + rest)
    return decision
