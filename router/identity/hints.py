"""Reads a client's hints of priority and answer length, in the forms that other routers defined.

Dynamo has the headers `x-dynamo-request-priority` and `-strict-priority`, and in the body
`nvext.agent_hints` with `priority`, `strict_priority` and `osl`. vllm-router has `agentic_context`
and `agent_hint` with `priority` and `expected_output_length`. In both, a larger priority is served
sooner; here, as in vLLM, a lower one is. OpenAI's `service_tier` "priority" is one class before
others, and "flex" one class after.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from router.identity.body_fields import context_in

PRIORITY_HEADERS = ("x-dynamo-request-priority", "x-dynamo-request-strict-priority")
_MAX_PRIORITY = 2**31 - 1
_NUMBER = re.compile(r"-?[0-9]{1,20}")
_TIERS = {"priority": -1, "fast": -1, "flex": 1}


class Hints(NamedTuple):
    """A client's hints of its request's priority and answer length. Lifetime: request."""

    priority: int | None = None  # lower is served first; None: no hint
    expected_output_tokens: int | None = None


NO_HINTS = Hints()


def hints_in(headers: Mapping[str, str], values: Mapping[str, Any]) -> Hints:
    """Return the hints of a request. Values of a wrong type are ignored, and large numbers are
    limited.
    """
    nvext = values.get("nvext")
    dynamo = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    dynamo = dynamo if isinstance(dynamo, dict) else {}
    context = context_in(values) or {}
    larger_first = (
        *(_number_of(headers.get(name)) for name in PRIORITY_HEADERS),
        *(_whole(dynamo.get(name)) for name in ("priority", "strict_priority")),
        _whole(context.get("priority")),
    )
    priority = next((-value for value in larger_first if value is not None), None)
    tier = values.get("service_tier")
    if priority is None and isinstance(tier, str):
        priority = _TIERS.get(tier)
    lengths = (_whole(dynamo.get("osl")), _whole(context.get("expected_output_length")))
    length = next((value for value in lengths if value is not None and value > 0), None)
    return Hints(priority, length)


def _whole(value: Any) -> int | None:
    """Return `value` limited to 32 bits if it is a whole number; None for anything else."""
    if type(value) is float and (value.is_integer() or math.isinf(value)):
        return int(min(max(value, -_MAX_PRIORITY), _MAX_PRIORITY))
    return min(max(value, -_MAX_PRIORITY), _MAX_PRIORITY) if type(value) is int else None


def _number_of(text: str | None) -> int | None:
    """Return the number that a header's value spells; None if it spells none."""
    if text is None or _NUMBER.fullmatch(text) is None:
        return None
    return _whole(int(text))
