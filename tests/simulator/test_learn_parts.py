"""What learning is made of: the objective by hand, the search, the journal that may be torn."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.load import load
from policies.published.choice_features import FEATURES
from simulator.runs.learn import (
    LMETRIC,
    LOST_S,
    PINNED,
    Figures,
    Generation,
    Journal,
    Search,
    figures,
    score,
    spec_of,
)
from simulator.runs.task import SweepError
from tests.effort import examples
from tests.simulator import synthetic

# --- the objective ------------------------------------------------------------------------------


def test_a_lost_request_counts_as_ten_minutes() -> None:
    row = synthetic.evaluate(synthetic.setup())
    times = msgspec.structs.replace(row.ttft_ms, mean=2_000.0)
    row = msgspec.structs.replace(row, requests=4, completed=3, ttft_ms=times, e2e_ms=times)
    assert figures(row) == Figures((3 * 2.0 + LOST_S) / 4, (3 * 2.0 + LOST_S) / 4, 1)
    none = msgspec.structs.replace(times, mean=None)
    lost = msgspec.structs.replace(row, completed=0, ttft_ms=none, e2e_ms=none)
    assert figures(lost) == Figures(LOST_S, LOST_S, 4)
    assert figures(None) == Figures(LOST_S, LOST_S, 0)


def test_the_score_is_a_mean_over_lessons_of_means_over_seeds() -> None:
    start = [[Figures(1.0, 10.0, 0), Figures(2.0, 10.0, 0)], [Figures(4.0, 8.0, 0)]]
    found = [[Figures(0.5, 10.0, 0), Figures(2.0, 5.0, 0)], [Figures(8.0, 4.0, 0)]]
    assert score(start, start) == 0.0
    assert score(found, start) == pytest.approx((-math.log(2.0) + 0.0) / 2)


# --- the search ---------------------------------------------------------------------------------


def test_it_begins_as_lmetric_and_holds_the_scale() -> None:
    assert dict(zip(FEATURES, LMETRIC, strict=True))["log_batch"] == -1.0
    search = Search(0.05, 1, None)
    assert search.population == 13
    assert search.mean == LMETRIC
    for theta in search.ask():
        assert theta[PINNED] == -1.0
        assert len(theta) == len(FEATURES)
        loaded = load(spec_of(theta))
        assert [float(text) for text in str(loaded.params["theta"]).split(",")] == list(theta)


def test_what_is_worse_than_the_start_is_not_taken() -> None:
    search = Search(0.05, 1, 4)
    thetas = search.ask()
    search.tell(thetas, [1.0, 2.0, 0.0, 3.0])
    assert (search.best, search.best_score) == (LMETRIC, 0.0)
    thetas = search.ask()
    search.tell(thetas, [1.0, -0.5, -0.2, 3.0])
    assert (search.best, search.best_score) == (thetas[1], -0.5)


# --- the journal --------------------------------------------------------------------------------

START = [[Figures(1.0, 2.0, 0)]]


@settings(max_examples=examples(30), deadline=None)
@given(count=st.integers(0, 4), data=st.data())
def test_a_torn_journal_has_the_generations_that_were_whole(
    count: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal"
    ends = []
    with Journal(path, "run") as journal:
        journal.begin(START)
        ends.append(path.stat().st_size)
        for number in range(count):
            journal.add(Generation([LMETRIC], [float(number)]))
            ends.append(path.stat().st_size)
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(end <= cut for end in ends)  # lines, the head included
    with Journal(path, "run") as journal:
        assert journal.start == (START if whole else None)
        assert [g.scores for g in journal.generations] == [[float(n)] for n in range(whole - 1)]
        if journal.start is None:
            journal.begin(START)
        journal.add(Generation([LMETRIC], [9.0]))
    with Journal(path, "run") as journal:
        assert journal.generations[-1].scores == [9.0]


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "one") as journal:
        journal.begin(START)
        with pytest.raises(SweepError, match="another run writes to it"):
            Journal(path, "one")
    with pytest.raises(SweepError, match="of other lessons, traces or settings"):
        Journal(path, "another")
    path.write_text("name,age\n")
    with pytest.raises(SweepError, match=r"journal:1: no line of a learning run"):
        Journal(path, "one")
