"""Tests of generated conversations: chats, agents, customers of tenants, one prompt before all
requests.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from simulator.traces.job import TraceError
from simulator.workloads.open import sessions
from tests.simulator.traces.generators.generated import ideal_hit_share, jobs_of, opened


def test_sessions_know_their_answers_and_pauses() -> None:
    stream = opened("gen:sessions?sessions=200&rate=5")
    jobs = list(stream.jobs)
    assert stream.total == len(jobs) == 800
    told = sessions(iter(jobs))
    assert len({int(turns[0].ids[0]) for _, turns in told}) == 1
    pauses = []
    for _, turns in told:
        assert [job.prompt_tokens for job in turns] == [5050, 5400, 5750, 6100]
        assert turns[0].think_ns == 0
        for before, after in itertools.pairwise(turns):
            known = [*before.ids.tolist(), *before.answer_ids.tolist()]
            assert after.ids.tolist()[: len(known)] == known
            assert after.think_ns is not None
            assert after.at_ns - before.at_ns == after.think_ns + 300 * 20_000_000
            pauses.append(after.think_ns / 1e9)
    assert sum(pauses) / len(pauses) == pytest.approx(45, rel=0.1)
    code = jobs_of("gen:sessions?case=code&sessions=3&context=1000&turns=2..5&max_prompt=9000")
    assert max(job.prompt_tokens for job in code) <= 9000


def test_agents_share_one_prompt_and_pause_as_configured() -> None:
    jobs = jobs_of("gen:agentic?sessions=400")
    told = sessions(iter(jobs))
    assert {int(job.ids[624]) for job in jobs} == {int(jobs[0].ids[624])}  # 625 blocks of 16
    assert len({int(turns[0].ids[625]) for _, turns in told}) == 400
    counts = [len(turns) for _, turns in told]
    assert (min(counts), max(counts)) == (2, 20)
    assert sum(counts) / 400 == pytest.approx(11, rel=0.08)
    later = [job for _, turns in told for job in turns[1:]]
    pauses = [job.think_ns / 1e9 for job in later if job.think_ns is not None]
    assert min(pauses) > 1.0
    assert sum(pauses) / len(pauses) == pytest.approx(1 + 3 * math.exp(0.18), rel=0.05)
    outputs = sorted(job.output_tokens for job in jobs)
    assert outputs[len(outputs) // 2] == pytest.approx(90, rel=0.05)  # the median
    # First prompts find the shared 10,000 tokens; later ones all but the question.
    assert ideal_hit_share(jobs, 16) == pytest.approx(0.925, abs=0.015)


def test_a_burst_begins_at_once_and_other_sessions_at_their_rate() -> None:
    told = sessions(iter(jobs_of("gen:agentic?sessions=300&burst=24&rate=0.5")))
    starts = [turns[0].at_ns for _, turns in told]
    assert len(starts) == 300
    assert starts[:24] == [0] * 24
    assert min(starts[24:]) > 0
    assert starts[-1] / 1e9 == pytest.approx(276 / 0.5, rel=0.2)
    plain = jobs_of("gen:agentic?sessions=30")
    one = jobs_of("gen:agentic?sessions=30&burst=1")
    assert [(j.at_ns, j.prompt_tokens) for j in one] == [(j.at_ns, j.prompt_tokens) for j in plain]
    everybody = sessions(iter(jobs_of("gen:agentic?sessions=30&burst=30")))
    assert {turns[0].at_ns for _, turns in everybody} == {0}
    with pytest.raises(TraceError, match="burst 31: expected at most the 30 sessions"):
        opened("gen:agentic?sessions=30&burst=31")


def test_tenants_have_their_own_shares_and_prompts() -> None:
    jobs = jobs_of("gen:tenants?sessions=4000")
    told = sessions(iter(jobs))
    shares = Counter(turns[0].tenant for _, turns in told)
    harmonic = sum(rank**-1.1 for rank in range(1, 21))
    assert shares["tenant-0"] / 4000 == pytest.approx(1 / harmonic, rel=0.1)
    assert len(shares) == 20
    heads = {(job.tenant, int(job.ids[159])) for job in jobs}  # 160 blocks of 16
    assert len(heads) == len({head for _, head in heads}) == 20
    assert all({job.tenant for job in turns} == {turns[0].tenant} for _, turns in told)
    assert ideal_hit_share(jobs, 16) == pytest.approx(0.893, abs=0.01)


def test_the_shared_generator_has_one_prompt_prefix() -> None:
    stream = opened("gen:shared")
    jobs = list(stream.jobs)
    assert stream.total == len(jobs) == 4000
    assert len({int(job.ids[375]) for job in jobs}) == 1  # 376 blocks of 16
    assert ideal_hit_share(jobs, 16) == pytest.approx(0.877, abs=0.005)
    assert jobs[-1].at_ns / 1e9 == pytest.approx(80, rel=0.1)
