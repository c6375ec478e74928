"""The value of the header x-warmroute-explain: a sentence for people, then JSON."""

from __future__ import annotations

import json
from typing import Any

EXPLAIN = "x-warmroute-explain"


def decision_in(value: str) -> dict[str, Any]:
    """The decision in a header's value, as clients read it: JSON from the first brace on."""
    sentence, brace, rest = value.partition("{")
    assert sentence.endswith("; "), value
    decision: dict[str, Any] = json.loads(brace + rest)
    return decision
