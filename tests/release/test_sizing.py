"""Tests of the sizing page: its plan equals a calculation by hand, and it has all its tables."""

from __future__ import annotations

import pytest

from release.wheels import ROOT
from tests.bench.sizing import memory, plan, pools, requests, turns
from tests.bench.sizing.__main__ import BEGIN, END
from tests.bench.sizing.table import two_digits

COST = requests.Cost(all_s=1e-3, loop_s=5e-4)
EVENT = requests.Cost(all_s=4e-5, loop_s=1e-5)
COSTS = requests.Costs(
    {(kind.name, tokens): COST for kind in requests.KINDS for tokens in requests.SIZES}, EVENT
)
POOLS = {
    workers: pools.Pool(1e-3 if workers < 1_000 else 3e-3, 0.01, 100.0) for workers in pools.WORKERS
}
TURN = turns.Turn(cpu_s=0.02, loop_s=0.01, added_s=0.02)
TURNS = {tokens: turns.Turns(TURN, TURN, 1e6) for tokens in turns.CONTEXTS}


def test_cores_and_routers_equal_the_formula() -> None:
    rows = plan.section(plan.Measured(COSTS, POOLS, TURNS)).rows
    # (0.01 + 20 x (1 ms + 300 x 40 us)) / 0.6; (0.01 + 20 x (0.5 ms + 300 x 10 us)) / 0.6 < 1
    assert list(rows[0][-2:]) == ["0.45", "1"]
    # (0.01 + 2,000 x (1 + 2 ms more at 1,000 workers + 12 ms)) / 0.6; 2,000 x 5.5 ms / 0.6 = 18.3
    assert list(rows[2][-2:]) == ["50", "19"]


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0341, "0.034"), (1.26, "1.3"), (141, "140"), (12_340, "12,000")]
)
def test_values_have_two_significant_digits(value: float, shown: str) -> None:
    assert two_digits(value) == shown


def test_the_page_has_every_table() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    tables = page.partition(BEGIN)[2].partition(END)[0]
    sections = [
        requests.section(COSTS),
        turns.section(TURNS),
        pools.section(POOLS),
        memory.section(memory.Memory(20, 40, 2_000, 30_000)),
        plan.section(plan.Measured(COSTS, POOLS, TURNS)),
    ]
    for section in sections:
        assert f"### {section.title}\n" in tables
        head = "| " + " | ".join(section.head) + " |"
        assert head in tables
        assert all(f"| {row[0]} |" in tables for row in section.rows)
