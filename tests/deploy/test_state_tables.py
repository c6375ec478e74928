"""Tests that the page of states shows the current tables, and that no other code sets a state."""

from __future__ import annotations

import ast
from pathlib import Path

from router.fleet.member_states import MEMBER_STATES
from tests.deploy.state_tables import FILE, TABLES, diagram_of, page_text

ROOT = Path(__file__).parents[2]
# The attributes that hold a state, where they may be set, and from which table.
HOLDERS = {
    "router/core": ("state", ("HEALTH_STATES", "WORKER_STATES")),
    "router/fleet": ("state", ("MEMBER_STATES",)),
    "router/request": ("phase", ("REQUEST_STATES",)),
}


def test_the_page_shows_the_current_state_tables() -> None:
    told = "run: python -m tests.deploy.state_tables"
    assert FILE.read_text(encoding="utf-8") == page_text(), told


def test_each_state_of_a_table_can_be_reached_from_its_first_state() -> None:
    for table, where, _ in TABLES:
        reached = {next(iter(table))[0]}
        for _ in table:
            reached |= {after for (state, _), after in table.items() if state in reached}
        assert reached == {state for state, _ in table} | set(table.values()), where


def test_a_diagram_has_one_arrow_per_pair_of_states_with_all_events() -> None:
    text = diagram_of({("a", "x"): "b", ("a", "y"): "b", ("b", "w"): "b", ("b", "z"): "c"})
    assert "    [*] --> a\n    a --> b: x<br/>y\n    b --> c: z\n    c --> [*]" in text
    assert text.endswith('These events do not change the state: in `b` "w".')
    assert "serving --> silent: a probe gets no answer" in diagram_of(MEMBER_STATES)


def test_every_state_change_goes_through_its_table() -> None:
    wrong = []
    for folder, (attribute, tables) in HOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Assign):
                    continue
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and target.attr == attribute:
                        value = node.value
                        looked_up = isinstance(value, ast.Subscript) and (
                            ast.unparse(value.value) in tables
                        )
                        if not looked_up:
                            wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []
