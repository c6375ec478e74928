"""Tests of generated coding agents: the requested shapes, layers of prompts, sub-agents, side
requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from policies.contract import Hashes
from simulator.traces.generators.coding_agents import BLOCK
from simulator.traces.job import Job, TraceError
from simulator.workloads.open import sessions
from tests.simulator.traces.generators.generated import jobs_of, opened

NS = 1_000_000_000


def main_agents(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Return the turns of each main agent by its session."""
    told = sessions(job for job in jobs if job.parent is None and not job.side)
    return {name: turns for name, turns in told if name is not None}


def shared_blocks(one: Hashes, other: Hashes) -> int:
    """Return the number of equal blocks with which two prompts begin."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def percentiles(values: Iterable[float]) -> list[float]:
    return np.percentile(list(values), (10, 50, 90, 99)).tolist()


# The figures of the specification's own draws. Sessions differ much, so p99 of 500 is loose.
SHAPES = {
    "file": {
        "turns": ((11, 44, 169, 505), 0.2),
        "input": ((28e3, 89e3, 304e3, 589e3), 0.12),
        "output": ((59, 318, 1_700, 6_600), 0.06),
        "gap": ((0.5, 2.1, 20, 718), 0.1),
    },
    "heavy": {
        "turns": ((32, 107, 354, 952), 0.2),
        "input": ((33e3, 155e3, 551e3, 817e3), 0.12),
        "output": ((59, 318, 1_700, 6_600), 0.06),
        "gap": ((0.5, 2.1, 20, 718), 0.1),
        "growth": ((115, 632, 3_900, 134e3), 0.12),
    },
}


@pytest.mark.parametrize(("preset", "reuse"), [("file", 0.947), ("heavy", 0.944)])
def test_main_agents_have_the_sizes_of_their_preset(preset: str, reuse: float) -> None:
    jobs = jobs_of(f"gen:coding_agents?preset={preset}&sessions=500&spawn=0&limit=900000", seed=3)
    told = main_agents(jobs)
    own = list(itertools.chain.from_iterable(told.values()))
    found: dict[str, list[float]] = {
        "turns": percentiles(len(turns) for turns in told.values()),
        "input": percentiles(job.prompt_tokens for job in own),
        "output": percentiles(job.output_tokens for job in own),
        "gap": percentiles(
            (job.think_ns or 0) / NS for turns in told.values() for job in turns[1:]
        ),
    }
    growths, reused = [], []
    for turns in told.values():
        for before, after in itertools.pairwise(turns):
            kept = shared_blocks(before.ids, after.ids)
            reused.append(kept * BLOCK >= 0.9 * after.prompt_tokens)
            if kept == len(before.ids):
                growths.append(after.prompt_tokens - before.prompt_tokens)
    found["growth"] = percentiles(growths)
    for name, (expected, tolerance) in SHAPES[preset].items():
        assert found[name] == pytest.approx(expected, rel=tolerance), name
    assert np.mean(reused) == pytest.approx(reuse, abs=0.01)


def test_half_of_the_heavy_requests_are_sub_agents() -> None:
    jobs = jobs_of("gen:coding_agents?sessions=300&turns=107*0.5", seed=5)
    children = [job for job in jobs if job.parent is not None]
    assert 0.4 < len(children) / len(jobs) < 0.5
    sides = [job for job in jobs if job.side]
    assert len(sides) / (len(jobs) - len(children)) == pytest.approx(0.015, rel=0.15)
    spawned: dict[tuple[str | None, int], int] = {}  # requests by parent and start
    started = {name: turns[0].at_ns for name, turns in sessions(iter(children))}
    for job in children:
        spawn = (job.parent, started[job.session])
        spawned[spawn] = spawned.get(spawn, 0) + 1
    sizes = np.array(list(spawned.values()))
    assert sizes.mean() == pytest.approx(17.5, rel=0.12)
    assert percentiles(sizes) == pytest.approx([2, 8, 46, 119], rel=0.25)


def test_prompts_share_only_their_layers() -> None:
    source = "gen:coding_agents?sessions=60&turns=20&spawn=0.1&versions=2&projects=2&side=0.1"
    jobs = jobs_of(source, seed=2)
    before: dict[int, int] = {}  # an id stands for the whole prefix up to it
    for job in jobs:
        for last, one in itertools.pairwise([-1, *job.ids.tolist(), *job.answer_ids.tolist()]):
            assert before.setdefault(one, last) == last
        assert len(job.ids) == job.prompt_tokens // BLOCK
        assert (
            len(job.ids) + len(job.answer_ids) <= (job.prompt_tokens + job.output_tokens) // BLOCK
        )
    firsts = [turns[0] for turns in main_agents(jobs).values()]
    tools, project = 15_000 // BLOCK, 22_000 // BLOCK
    assert len({job.ids.item(0) for job in firsts}) == 2
    assert len({job.ids.item(tools - 1) for job in firsts}) == 2
    long = [job for job in firsts if job.prompt_tokens > 22_500]
    assert len({job.ids.item(tools) for job in long}) == 4
    assert len({job.ids.item(project - 1) for job in long}) == 4
    assert len({job.ids.item(project) for job in long}) == len(long)
    for one, other in itertools.combinations(firsts, 2):
        assert shared_blocks(one.ids, other.ids) <= project
    children = [turns[0] for _, turns in sessions(iter(jobs)) if turns[0].parent is not None]
    assert {job.prompt_tokens for job in children} == {10_000}
    assert len({job.ids.item(0) for job in children}) == 2
    own = 8_700 // BLOCK
    assert {
        shared_blocks(one.ids, other.ids) for one, other in itertools.combinations(children, 2)
    } == {
        0,
        own,
    }
    main = {one for job in jobs if job.parent is None for one in job.ids.tolist()}
    assert not main & {one for job in jobs if job.parent is not None for one in job.ids.tolist()}
    sides = [job for job in jobs if job.side]
    alone = [one for job in sides for one in job.ids.tolist()]
    assert sides
    assert len(set(alone)) == len(alone)
    assert all(1_000 <= job.prompt_tokens <= 5_000 for job in sides)


def test_a_turn_begins_with_the_previous_turn_and_its_answer() -> None:
    turns = list(main_agents(jobs_of("gen:coding_agents?sessions=30&spawn=0&reset=0")).values())
    whole = 0
    for before, after in itertools.pairwise(itertools.chain.from_iterable(turns)):
        if before.session != after.session or after.prompt_tokens == 25_000:
            continue
        known = np.concatenate((before.ids, before.answer_ids))
        assert np.array_equal(after.ids[: len(known)], known)
        told = min(before.prompt_tokens + before.output_tokens, after.prompt_tokens)
        assert len(known) == told // BLOCK
        whole += told < after.prompt_tokens
    assert whole


def test_agents_wait_for_all_of_their_sub_agents_or_continue() -> None:
    jobs = jobs_of("gen:coding_agents?sessions=100&turns=30&spawn=0.2&token_ms=10")
    ends: dict[str | None, int] = {}
    begins: dict[str | None, int] = {}
    parents: dict[str | None, str | None] = {}
    for job in jobs:
        begins.setdefault(job.session, job.at_ns)
        ends[job.session] = job.at_ns + round(job.output_tokens * 10e6)
        parents[job.session] = job.parent
        assert job.group == (job.session or "").partition("/")[0]
        assert job.parent in (None, job.group)
    waits = 0
    spawned = {(parents[name], begins[name]) for name in parents if parents[name] is not None}
    for turns in main_agents(jobs).values():
        assert turns[0].think_ns == 0
        assert not turns[0].waits_for
        for before, after in itertools.pairwise(turns):
            answered_ns = before.at_ns + round(before.output_tokens * 10e6)
            waits += bool(after.waits_for)
            awaited_ns = max((ends[name] for name in after.waits_for), default=0)
            assert after.think_ns is not None
            assert after.at_ns == max(answered_ns + after.think_ns, awaited_ns)
            for name in after.waits_for:
                assert parents[name] == after.session
                assert begins[name] == answered_ns
    last = sum(
        (turns[-1].session, turns[-1].at_ns) in spawned for turns in main_agents(jobs).values()
    )
    assert waits / (len(spawned) - last) == pytest.approx(0.8, abs=0.05)


def test_prompts_are_compacted_at_the_limit() -> None:
    jobs = jobs_of("gen:coding_agents?sessions=60&limit=60000&spawn=0.1&agent_turns=30")
    assert 50_000 < max(job.prompt_tokens for job in jobs) <= 60_000
    compacted = 0
    for _, turns in sessions(iter(jobs)):
        for before, after in itertools.pairwise(turns):
            head = 15_000 if after.parent is None else 8_700
            if after.prompt_tokens == head + 10_000 < before.prompt_tokens:
                compacted += 1
                assert shared_blocks(before.ids, after.ids) == head // BLOCK
    assert compacted > 100


def test_another_rate_only_moves_sessions() -> None:
    def shapes(rate: str) -> list[tuple[object, ...]]:
        jobs = jobs_of(f"gen:coding_agents?sessions=8&rate={rate}&turns=12&spawn=0.2")
        starts = {name: turns[0].at_ns for name, turns in main_agents(jobs).items()}
        return sorted(
            (job.session, job.at_ns - starts[job.group or ""], job.prompt_tokens, job.think_ns)
            for job in jobs
        )

    assert shapes("0.01") == shapes("5")
    assert jobs_of("gen:coding_agents?sessions=3", seed=1)[50].at_ns != (
        jobs_of("gen:coding_agents?sessions=3", seed=2)[50].at_ns
    )


def test_a_burst_begins_at_once_and_wrong_numbers_are_refused() -> None:
    told = main_agents(jobs_of("gen:coding_agents?sessions=20&burst=5&turns=2"))
    starts = [turns[0].at_ns for turns in told.values()]
    assert starts[:5] == [0] * 5
    assert min(starts[5:]) > 0
    for wrong in ("burst=21&sessions=20", "preset=light", "limit=1000", "wait=1.5", "turns=x"):
        with pytest.raises(TraceError, match=wrong.partition("=")[0]):
            opened(f"gen:coding_agents?{wrong}")
