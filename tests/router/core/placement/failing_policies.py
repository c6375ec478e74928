"""Policies for tests that raise errors or return wrong costs."""

from __future__ import annotations

from typing import Any


def fails(*_: object) -> Any:
    raise RuntimeError("broken policy")
