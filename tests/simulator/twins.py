"""Replays of random requests with native and with plain-Python workers, which must give the same
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from simulator.report.row import summarize
from tests.oracles.virtual_worker import plain_workers
from tests.simulator.replays import job, run


def requests_up_to(longest: int) -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """Draw requests as (pause before it in ms, prompt tokens, answer tokens, shared prefix);
    `longest` is the longest prompt.
    """
    return st.lists(
        st.tuples(
            st.sampled_from((0, 1, 30, 200)),
            st.sampled_from((640, 200, 16, 1, longest)),
            st.sampled_from((2, 1, 30)),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=25,
    )


def assert_twins_agree(requests: Sequence[tuple[int, int, int, int]], setup: Any) -> None:
    at_ms, jobs = 0, []
    for pause_ms, prompt, output, trunk in requests:
        at_ms += pause_ms
        jobs.append(job(at_ms, prompt, output, trunk=trunk))
    native = run(jobs, setup)
    with plain_workers():
        plain = run(jobs, setup)
    assert summarize(native).report_hash == summarize(plain).report_hash
