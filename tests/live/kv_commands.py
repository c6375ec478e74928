"""Runs the command `warmroute kv`."""

from __future__ import annotations

from tests.live.commands import said_by
from tests.live.stack import Stack


async def kv(stack: Stack, *arguments: str) -> tuple[int, str]:
    """Run `warmroute kv` with these arguments; return (exit status, output)."""
    return await said_by("kv", "--admin", stack.admin, *arguments)
