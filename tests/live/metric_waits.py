"""Waits until a router's metrics have the values that a test expects."""

from __future__ import annotations

from tests.live.stack import Stack, metric_sum, until


async def until_metric(stack: Stack, name: str, value: float) -> None:
    async def reached() -> bool:
        return await metric_sum(stack.http, stack.admin, f"warmroute_{name}") == value

    await until(reached, f"{name} to be {value:g}")
