"""Tests of tasks (groups of sessions): how long they took, and how evenly they waited."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.replay.result import NEVER
from simulator.report.figures import figure
from simulator.report.row import ReplayRow, jain_index, summarize, tasks_row
from tests.effort import examples
from tests.simulator.replayed import rejected, table
from tests.simulator.replays import job, run, setup_of


def test_a_task_lasts_from_its_first_arrival_to_its_last_answer() -> None:
    rows = [
        {"arrival": 0, "first": 10, "finish": 100, "session": 0, "group": 0},
        {"arrival": 50, "first": 30, "finish": 400, "session": 1, "group": 0},  # a sub-agent
        {"arrival": 70, "first": 20, "finish": 60, "session": 0, "group": 0},
        {"arrival": 80, "first": 40, "finish": 100, "session": 2},
        {"arrival": 200, "first": 40, "finish": 100, "session": 2},
        {"arrival": 300, "first": 5, "finish": 10},
        {"arrival": 310, "first": 20, "finish": 30, "session": 3, "group": 1},
        rejected(arrival=320, session=4, group=1),
    ]
    found = tasks_row(table(rows))
    assert (found.begun, found.completed, found.grouped) == (4, 3, True)
    # 0 to 450; 80 to 300; 300 to 310. The last group had a request turned away.
    assert found.time_ms.max == 450
    assert found.time_ms.p50 == 220
    assert found.time_ms.mean == round((450 + 220 + 10) / 3, 3)
    waited = [20, 40, 5, 20]
    assert found.fairness == round(sum(waited) ** 2 / (4 * sum(x * x for x in waited)), 5)


def test_jains_index_is_as_published() -> None:
    assert jain_index([3.0] * 7) == 1.0
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0] * 20 + [0.0] * 80) == 0.2  # the paper's example: a fifth has a share
    assert jain_index([]) is None
    assert jain_index([0.0, 0.0]) is None


@example([(0, 1, 0, 0, False), (0, 1, 2, NEVER, False)])  # numbers beyond that of requests
@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(1, 50),
            st.integers(NEVER, 3),
            st.integers(NEVER, 2),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_tasks_agree_with_a_plain_count(requests: list[tuple[int, int, int, int, bool]]) -> None:
    rows, tasks = [], {}
    for number, (arrival, lasts, session, group, done) in enumerate(requests):
        own = {"arrival": arrival, "session": session, "group": group}
        rows.append(own | {"first": lasts, "finish": lasts} if done else rejected(**own))
        named = ("s", session) if session != NEVER else ("r", number)
        tasks.setdefault(("g", group) if group != NEVER else named, []).append(requests[number])
    found = tasks_row(table(rows))
    whole = [own for own in tasks.values() if all(one[4] for one in own)]
    assert (found.begun, found.completed) == (len(tasks), len(whole))
    times = [max(one[0] + one[1] for one in own) - min(one[0] for one in own) for own in whole]
    assert found.time_ms.max == (max(times) if times else None)
    if times:
        assert found.time_ms.mean == pytest.approx(sum(times) / len(times), abs=0.001)
    waited = [
        np.mean([one[1] for one in own if one[4]])
        for own in tasks.values()
        if any(o[4] for o in own)
    ]
    expected = sum(waited) ** 2 / (len(waited) * sum(x * x for x in waited)) if waited else None
    assert found.fairness == (None if expected is None else pytest.approx(expected, abs=1e-5))


def test_tables_show_tasks_if_requests_have_groups() -> None:
    turns = [job(n * 10, 320, 4, session=f"s{n % 2}") for n in range(6)]
    plain = summarize(run(turns))
    grouped = summarize(run([msgspec.structs.replace(one, group="a") for one in turns]))
    assert plain.tasks.time_ms != grouped.tasks.time_ms
    for name in ("tasks.time_ms.mean", "tasks.fairness"):
        assert figure(name).of(plain) is None
        assert figure(name).of(grouped) is not None
    assert plain.report_hash != grouped.report_hash
    told = msgspec.to_builtins(plain)
    del told["tasks"]  # as stored before there were any
    assert msgspec.convert(told, ReplayRow).ttft_ms == plain.ttft_ms
    assert any(
        "open loop" in note for note in run([msgspec.structs.replace(turns[0], group="a")]).notes
    )
    assert not any("open loop" in note for note in run(turns, setup_of()).notes)
