"""A plan in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from simulator.report.figures import figure
from simulator.sweep.plan import Plan, PlanRow
from simulator.sweep.points import PER_GPU
from simulator.sweep.targets import shown
from simulator.wording import NOTHING, percent

SHOWN = (figure("ttft_ms.p90"), figure("tpot_ms.mean"), figure("hit_rate_tokens"), PER_GPU)


def plan_table(plan: Plan) -> Table:
    """A line for each policy, the best one marked."""
    rate = plan.request.find == "rate"
    table = Table(
        title=f"Targets: {', '.join(shown(plan.request.targets))}",
        title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("policy", overflow="fold")
    table.add_column("requests/s" if rate else "workers", justify="right", no_wrap=True)
    table.add_column("GPUs", justify="right", no_wrap=True)
    for one in SHOWN:
        table.add_column(one.title, justify="right", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(*_cells(row), style="bold" if row.policy == plan.best else "")
    return table


def plan_lines(plan: Plan) -> Iterator[str]:
    """What to do, then for each policy why not less and what to know, as rich markup."""
    yield escape(verdict(plan))
    for row in plan.rows:
        for note in row.notes:
            yield f"[bold]{escape(row.policy)}[/]: {escape(note)}"


def verdict(plan: Plan) -> str:
    """The answer in a sentence."""
    rows = {row.policy: row for row in plan.rows}
    if plan.best is None:
        return "No policy keeps the targets with anything that was tried."
    best = rows[plan.best]
    others = [row for row in plan.rows if row.policy != plan.best]
    told = ", ".join(f"{row.policy} {_amount(plan, row)}" for row in others)
    if plan.request.find == "workers":
        head = f"Take {plan.best} on {_amount(plan, best)} ({best.gpus} GPUs)"
        return f"{head}; the others need: {told}." if told else f"{head}."
    head = f"{plan.best} takes {_amount(plan, best)} on {best.gpus} GPUs"
    return f"{head}; the others take: {told}." if told else f"{head}."


def as_json(plan: Plan) -> bytes:
    """The plan as JSON, every trial in it."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def _amount(plan: Plan, row: PlanRow) -> str:
    if row.answer is None:
        return "(no answer)"
    if plan.request.find == "rate":
        return f"{row.answer:.3g} requests/s"
    return f"{row.answer:g} worker{'' if row.answer == 1 else 's'}"


def _cells(row: PlanRow) -> list[str]:
    if row.answer is None:
        return [escape(row.policy), *[NOTHING] * (len(SHOWN) + 3)]
    means = (row.figures.get(one.name) for one in SHOWN)
    figures = [
        one.show(None if found is None else found.mean)
        for one, found in zip(SHOWN, means, strict=True)
    ]
    return [escape(row.policy), f"{row.answer:.3g}", str(row.gpus), *figures, percent(row.used)]
