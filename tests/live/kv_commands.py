"""Runs the command `warmroute kv`."""

from __future__ import annotations

from tests.live.commands import output_of
from tests.live.stack import Stack


async def kv(stack: Stack, *arguments: str) -> tuple[int, str]:
    """Run `warmroute kv` with these arguments; return (exit status, output)."""
    return await output_of("kv", "--admin", stack.admin, *arguments)
