"""Tests of the conversation sample that ships: its command makes it, and it has the shape of
conversations.
"""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

from simulator.live.demo import SAMPLE_PATH
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs, sessions
from tests.simulator.sample import conversation_sample, write_sample


def test_the_shipped_sample_is_that_of_its_command(tmp_path: Path) -> None:
    made = tmp_path / "sample.jsonl.gz"
    write_sample(made, conversation_sample())
    assert gzip.decompress(made.read_bytes()) == gzip.decompress(SAMPLE_PATH.read_bytes())
    assert SAMPLE_PATH.stat().st_size <= 100_000


def test_the_sample_has_sessions_whose_prefixes_grow() -> None:
    jobs = list(open_jobs(WorkloadSpec(str(SAMPLE_PATH), strict=True)).jobs)
    assert len(jobs) > 600
    assert {int(job.ids[0]) for job in jobs} == {0}
    told = sessions(iter(jobs))
    assert max(len(turns) for _, turns in told) >= 5
    for name, turns in told:
        assert name is not None
        for before, after in pairwise(turns):
            full = before.prompt_tokens // 512
            assert after.prompt_tokens > before.prompt_tokens
            assert after.ids.tolist()[:full] == before.ids.tolist()[:full]
