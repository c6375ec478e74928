"""Tests of random draws of sessions from a recorded trace: what a session keeps, what a copy
shares, and what is refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.contract import Hashes
from simulator.traces.chain import Chainer
from simulator.traces.job import Job
from simulator.traces.sessions import FORK, JITTER_SESSIONS, Draw, sessions
from simulator.traces.spec import WorkloadSpec
from simulator.traces.timing import count_and_rate
from simulator.workloads.open import TraceError, open_jobs
from tests.effort import examples
from tests.simulator.trace_lines import read, session, turn, write

BLOCK = 16
TRUNK = (1, 2, 3)  # of all sessions: more than go on behind a prefix that is one session's own
OWN = 1000  # the ids of session n start at n times this


@dataclass(frozen=True)
class Talk:
    start_ns: int
    gaps_ns: tuple[int, ...]  # before each turn but the first
    blocks: int  # that each turn adds


def chain(*ids: int) -> Hashes:
    return np.array(ids, dtype=np.uint64)


def recorded(talks: Sequence[Talk], *, named: bool) -> list[Job]:
    jobs = []
    for number, talk in enumerate(talks, 1):
        at_ns, own = talk.start_ns, 0
        for gap_ns in (0, *talk.gaps_ns):
            at_ns, own = at_ns + gap_ns, own + talk.blocks
            ids = chain(*TRUNK, *(OWN * number + block for block in range(own)))
            tokens = BLOCK * len(ids)
            answer = chain(OWN * number + own)
            name = f"s{number}" if named else None
            job = Job(at_ns, tokens, BLOCK, ids, answer, name, think_ns=gap_ns)
            jobs.append(job)
    return sorted(jobs, key=lambda job: job.at_ns)


TALKS = st.lists(
    st.builds(
        Talk,
        st.integers(0, 10**6),
        st.lists(st.integers(1, 10**5), max_size=4).map(tuple),
        st.integers(1, 3),
    ),
    min_size=FORK,
    max_size=2 * FORK,
)
SEEDS = st.integers(0, 2**32)


def by_talk(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the requests in groups that share the first block after the common prefix."""
    found: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.ids.item(len(TRUNK))].append(job)
    return list(found.values())


def shape(turns: Sequence[Job]) -> tuple[tuple[int, ...], ...]:
    """Return what no draw may change in a session: times, sizes and pauses of its turns."""
    start_ns = turns[0].at_ns
    return tuple(
        (
            job.at_ns - start_ns,
            job.prompt_tokens,
            job.output_tokens,
            job.think_ns or 0,
            len(job.ids),
        )
        for job in turns
    )


@settings(max_examples=examples(100), deadline=None)
@given(talks=TALKS, seed=SEEDS, named=st.booleans())
def test_a_resample_has_as_many_sessions_and_each_is_a_recorded_one(
    talks: list[Talk], seed: int, *, named: bool
) -> None:
    jobs = recorded(talks, named=named)
    known = {shape(turns) for turns in by_talk(jobs)}
    drawn = list(Draw(jobs, seed).jobs())
    told = by_talk(drawn)
    assert len(told) == len(talks)
    assert {shape(turns) for turns in told} <= known, "order, gaps, sizes and pauses are kept"
    if named:
        assert len({job.session for job in drawn}) == len(talks), "a copy has a name of its own"
        assert all(len({job.session for job in turns}) == 1 for turns in told)
    else:
        assert {job.session for job in drawn} == {None}, "the router learns no more than recorded"
    times = [job.at_ns for job in drawn]
    assert times == sorted(times)
    assert jobs[0].at_ns <= times[0] <= times[-1] <= jobs[-1].at_ns, "the span is the recorded one"


@settings(max_examples=examples(100), deadline=None)
@given(talks=TALKS, seed=SEEDS, named=st.booleans(), size=st.sampled_from([8, 16, 32]))
def test_copies_of_sessions_share_only_the_prefix_common_to_all(
    talks: list[Talk], seed: int, *, named: bool, size: int
) -> None:
    """Copies of sessions share the prefix that all sessions share, and nothing else. The test
    compares the hashes of an engine's cache, for several block sizes.
    """
    chainer = Chainer(BLOCK, size)
    trunk = len(TRUNK) * BLOCK // size
    drawn = list(Draw(recorded(talks, named=named), seed).jobs())
    assert all(tuple(job.ids[: len(TRUNK)].tolist()) == TRUNK for job in drawn)
    names = {id(job): chainer.chain(job, n).tolist() for n, job in enumerate(drawn)}
    owners: Counter[int] = Counter()
    for turns in by_talk(drawn):
        seen: set[int] = set()
        for before, job in zip([None, *turns], turns, strict=False):
            full = job.prompt_tokens // size
            if before is not None:
                old = names[id(before)]
                kept = min(len(old), full)
                assert names[id(job)][:kept] == old[:kept], "a later turn hits prompt and answer"
            seen.update(names[id(job)][trunk + bool(size > BLOCK) :])
        owners.update(seen)
    assert not owners or max(owners.values()) == 1, "no copy hits another one's blocks"


@settings(max_examples=examples(50), deadline=None)
@given(talks=TALKS, seed=SEEDS)
def test_the_same_seed_gives_the_same_resample(talks: list[Talk], seed: int) -> None:
    def drawn_jobs(seed: int) -> list[tuple[int, list[int], str | None]]:
        draw = Draw(recorded(talks, named=True), seed)
        return [(job.at_ns, job.ids.tolist(), job.session) for job in draw.jobs()]

    assert drawn_jobs(seed) == drawn_jobs(seed)


def test_other_seeds_give_other_resamples_of_about_as_many_requests() -> None:
    """Draws with other seeds differ, and the mean number of requests over the draws is the recorded
    one. The trace has 400 sessions of 1 to 4 turns.
    """
    talks = [Talk(10**6 * n, (10**5,) * (n % 4), 1) for n in range(400)]
    jobs = recorded(talks, named=True)
    draws = [list(Draw(jobs, seed).jobs()) for seed in range(30)]
    assert len({tuple(job.at_ns for job in draw) for draw in draws}) == 30
    mean = sum(map(len, draws)) / 30
    # A draw's number of requests has a deviation of 1.12 * sqrt(400) = 22: 4 of the mean of 30.
    assert mean == pytest.approx(len(jobs), abs=5 * 4.1)
    halves = sum(sum(job.at_ns < 200 * 10**6 for job in draw) for draw in draws) / 30
    assert halves == pytest.approx(len(jobs) / 2, abs=5 * 4.1), "early traffic stays early"


def test_session_starts_move_by_no_more_than_the_jitter() -> None:
    jobs = recorded([Talk(10**6 * n, (), 1) for n in range(200)], named=True)
    recorded_ns = {job.session: job.at_ns for job in jobs}
    most_ns = JITTER_SESSIONS * (jobs[-1].at_ns - jobs[0].at_ns) / 200
    moved = [
        job.at_ns - recorded_ns[(job.session or "").partition("~")[0]]
        for seed in range(10)
        for job in Draw(jobs, seed).jobs()
    ]
    assert max(map(abs, moved)) <= most_ns
    assert max(moved) > most_ns / 2
    assert min(moved) < -most_ns / 2
    assert 0 not in moved


def test_sub_agents_are_drawn_with_their_parent(tmp_path: Path) -> None:
    """Sub-agents are drawn together with their parent. They share its prefix, so drawn alone they
    would hit what another copy computed.
    """
    lines = []
    for number in range(FORK):
        first = 100 * number
        lines.append(session(f"p{number}", turn(0, 640, [first, 10]), turn(9, 1280, [first, 20])))
        lines.append(
            session(f"p{number}/agent_1", turn(0, 960, [first, 10], [first + 50, 5]), t0=1.0)
        )
    spec = write(tmp_path, *lines)
    stream = open_jobs(WorkloadSpec(spec.source, resample=True), 5)
    drawn = dict(sessions(stream.jobs))
    assert len(drawn) == 2 * FORK
    assert any("~" in (name or "") for name in drawn), "one was drawn twice"
    for name, turns in drawn.items():
        assert name is not None
        parent, agent, copy = name.partition("/agent_1")
        if agent:
            own = drawn[f"{parent}{copy}"]
            assert turns[0].ids[:10].tolist() == own[0].ids[:10].tolist()


def test_a_group_is_drawn_together_and_each_copy_has_its_own_names(tmp_path: Path) -> None:
    lines = []
    for number in range(6):  # sub-agents share nothing with their parents
        lines.append(session(f"p{number}", turn(0, 640, [1, 10])))
        lines.append(session(f"p{number}/agent_1", turn(0, 640, [90, 10]), t0=1.0))
    held = [
        msgspec.structs.replace(job, waits_for=(f"{job.group}/agent_1",) if not job.parent else ())
        for job in read(write(tmp_path, *lines))
    ]
    twice = 0
    for seed in range(10):
        drawn = dict(sessions(Draw(held, seed).jobs()))
        assert len(drawn) == 12
        for name, turns in drawn.items():
            if turns[0].parent is not None:
                (parent,) = drawn[turns[0].parent]
                assert parent.group == turns[0].group == turns[0].parent
                assert parent.waits_for == (name,)
                assert turns[0].at_ns - parent.at_ns == 1_000_000_000
                twice += "~" in (name or "")
    assert twice


def test_a_copy_gets_an_unused_session_name() -> None:
    jobs = [
        Job(n, BLOCK, 1, chain(10 + n), session=name)
        for n, name in enumerate(("a", "a~1", "a~1~", "a~2"))
    ]
    for seed in range(50):
        drawn = list(Draw(jobs, seed).jobs())
        assert len({job.session for job in drawn}) == len(jobs)


def test_requests_without_own_blocks_are_drawn_one_by_one() -> None:
    jobs = [Job(n, 5, 1, chain()) for n in range(FORK)]
    jobs += [Job(FORK + n, BLOCK * 2, 1, chain(1, 50 + n)) for n in range(FORK)]
    jobs += [Job(2 * FORK + n, BLOCK, 1, chain(1)) for n in range(FORK)]
    drawn = [list(Draw(jobs, seed).jobs()) for seed in range(20)]
    assert {len(one) for one in drawn} == {3 * FORK}


def test_every_resample_has_the_given_rate(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 5, "hash_ids": [n, 500 + n]}
        for n in range(50)
    ]
    spec = write(tmp_path, *lines)
    counts = set()
    for seed in range(5):
        asked = WorkloadSpec(spec.source, rate_per_s=7.0, resample=True)
        stream = open_jobs(asked, seed)
        count, rate = count_and_rate(stream.jobs)
        assert rate == pytest.approx(7.0)
        assert stream.total == count, "both passes see the same draw"
        assert "its sessions drawn anew with each seed" in stream.origin
        assert stream.fraction_read() == 1.0
        counts.add(count)
    assert counts == {50}


def test_traces_that_cannot_be_resampled_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    spec = write(tmp_path, line)
    with pytest.raises(TraceError, match="all 1 requests are of one session"):
        list(open_jobs(WorkloadSpec(spec.source, resample=True)).jobs)
    with pytest.raises(TraceError, match="resample: is for files; gen:sglang makes other"):
        open_jobs(WorkloadSpec("gen:sglang", resample=True))
    jobs = recorded([Talk(n, (), 1) for n in range(FORK)], named=True)
    assert list(Draw([], 1).jobs()) == []
    monkeypatch.setattr("simulator.traces.sessions.MAX_BLOCKS", len(TRUNK) + FORK)
    assert len(Draw(jobs, 1)) == FORK
    monkeypatch.setattr("simulator.traces.sessions.MAX_BLOCKS", len(TRUNK) + FORK - 1)
    with pytest.raises(TraceError, match=r"more than \d+ different blocks"):
        Draw(jobs, 1)
    monkeypatch.setattr("simulator.traces.sessions.MAX_SESSION_JOBS", FORK - 1)
    with pytest.raises(TraceError, match=f"more than {FORK - 1} requests"):
        Draw(jobs, 1)


def test_a_named_session_is_not_split_even_if_its_prompts_diverge() -> None:
    """A session with a name stays whole, although its context may be rewritten between two turns or
    fork in many ways.
    """
    jobs = [
        Job(10 * turn + n, BLOCK, 1, chain(OWN * n + turn), session=f"s{n}")
        for turn in range(3)
        for n in range(FORK)
    ]
    for seed in range(10):
        told = sessions(Draw(jobs, seed).jobs())
        assert [len(turns) for _, turns in told] == [3] * FORK
