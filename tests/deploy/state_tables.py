"""Draws the tables of states as diagrams; run as a program it writes their page.

python -m tests.deploy.state_tables docs/reference/states.md
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from router.core.workers.states import HEALTH_STATES, WORKER_STATES
from router.fleet.member_states import MEMBER_STATES
from router.request.dispatcher import REQUEST_STATES

FILE = Path(__file__).parents[2] / "docs" / "reference" / "states.md"
Table = Mapping[tuple[str, str], str]

HEAD = """# States

This page shows the states of requests and workers. `python -m tests.deploy.state_tables` draws
the page from tables in the code: edit the tables, not this page. A table maps (state, event) to
the next state. The code looks up every change of a state in its table; an event that the table
does not have for a state is an error.
"""
# A table, its file and name in the code, and the thing whose states it has.
TABLES: tuple[tuple[Table, str, str], ...] = (
    (
        REQUEST_STATES,
        "`REQUEST_STATES` in `router/request/dispatcher.py`",
        "A request has these states from its arrival to its end. `waiting`: the core has not "
        "chosen a worker yet. `sent`: a worker has the request. `over`: the core knows how the "
        "request ended.",
    ),
    (
        MEMBER_STATES,
        "`MEMBER_STATES` in `router/fleet/member_states.py`",
        "The router's probes find these states of a worker. For the core, a worker that is "
        "`serving` or `silent` is `ready` (or `draining` if an operator drains the worker); a "
        "worker in another state is `down`.",
    ),
    (
        WORKER_STATES,
        "`WORKER_STATES` in `router/core/workers/states.py`",
        "A worker has these states in the core. Only a `ready` worker gets requests; a `draining` "
        "worker finishes its present requests.",
    ),
    (
        HEALTH_STATES,
        "`HEALTH_STATES` in `router/core/workers/states.py`",
        "The core derives a worker's health from answers and failures of requests. An `ejected` "
        "or `probed` worker gets no requests; a worker on `trial` gets one request at a time.",
    ),
)


def diagram_of(table: Table) -> str:
    """Return a table as a Mermaid state diagram with one arrow for each pair of states.

    Events that do not change a state are listed below the diagram.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    unmoved: dict[str, list[str]] = {}
    for (state, event), after in table.items():
        if state == after:
            unmoved.setdefault(state, []).append(event)
        else:
            arrows.setdefault((state, after), []).append(event)
    left = {state for state, _ in arrows}
    ends = dict.fromkeys(after for _, after in arrows if after not in left)
    lines = [f"    [*] --> {next(iter(table))[0]}"]
    for (state, after), events in arrows.items():
        lines.append(f"    {state} --> {after}: {'<br/>'.join(events)}")
    lines += [f"    {end} --> [*]" for end in ends]
    text = "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])
    if unmoved:
        stays = "; ".join(
            f'in `{state}` "{", ".join(events)}"' for state, events in unmoved.items()
        )
        text += f"\n\nThese events do not change the state: {stays}."
    return text


def page_text() -> str:
    """Return the text of the page for the current tables."""
    parts = [HEAD]
    for table, where, what in TABLES:
        name = where.split("`")[1].removesuffix("_STATES").capitalize()
        parts.append(f"## {name}\n\n{what} {where}.\n\n{diagram_of(table)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(page_text(), encoding="utf-8")
