"""What was wrong with a trace, where people see it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from simulator.wording import counted


def say_trace_errors(console: Console, total: int, first: Iterable[str]) -> None:
    """How many lines were left out, and what was wrong with the first of them."""
    if not total:
        return
    console.print(
        f"[bold red]{counted(total, 'wrong line')} left out[/] (--strict stops at the first):"
    )
    for message in first:
        console.print(f"  {message}", highlight=False, markup=False, soft_wrap=True)
