"""Tests of sub-agents in a closed loop: when they start, and which requests wait for them."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.replay.arrivals import ClosedLoop, TimedTurn
from simulator.replay.setup import ClientIds, World
from simulator.traces.job import Job
from tests.effort import examples
from tests.simulator.replays import job, run, setup_of

MS = 1_000_000


def played(jobs: list[Job], lasts_ns: dict[int, int]) -> list[tuple[int, int, Job]]:
    """Play a closed loop whose requests last `lasts_ns`; return (arrival, end, job) in the order of
    `jobs`.
    """
    loop, place = ClosedLoop(iter(jobs)), {id(one): number for number, one in enumerate(jobs)}
    assert loop.total == len(jobs)
    due: list[tuple[int, int, TimedTurn]] = []
    serial = 0
    while (turn := loop.pull()) is not None:
        heappush(due, (turn.at_ns, serial := serial + 1, turn))
    told: list[tuple[int, int, Job]] = []
    ends: list[tuple[int, int, TimedTurn]] = []
    while due or ends:
        if due and (not ends or due[0][0] < ends[0][0]):
            at_ns, _, turn = heappop(due)
            end_ns = at_ns + lasts_ns[place[id(turn.job)]]
            told.append((at_ns, end_ns, turn.job))
            heappush(ends, (end_ns, serial := serial + 1, turn))
            continue
        now_ns, _, turn = heappop(ends)
        for freed in loop.after(turn, now_ns):
            assert freed.at_ns >= now_ns
            heappush(due, (freed.at_ns, serial := serial + 1, freed))
    return told


def family() -> list[Job]:
    """Return a main agent of three turns; its first turn starts two sub-agents, for which its
    second turn waits.
    """

    def agent(name: str, at_ms: float) -> Job:
        return job(at_ms, 320, 20, session=name, group="a", parent="a", think_ns=3 * MS)

    return [
        job(0, 320, 20, session="a", group="a"),
        agent("a/1", 10),
        agent("a/2", 10),
        job(12, 160, 4, session="a/t", group="a", side=True, think_ns=0),
        agent("a/1", 20),
        msgspec.structs.replace(
            job(60, 640, 20, session="a", group="a", think_ns=5 * MS), waits_for=("a/1", "a/2")
        ),
        job(90, 960, 20, session="a", group="a", think_ns=5 * MS),
    ]


def test_sub_agents_start_after_the_answer_and_their_parent_waits() -> None:
    lasts = {0: 100 * MS, 1: 50 * MS, 2: 10 * MS, 3: 500 * MS, 4: 70 * MS, 5: 1, 6: 1}
    told = [(one.session, at_ns // MS) for at_ns, _, one in played(family(), lasts)]
    assert told == [
        ("a", 0),
        ("a/t", 100),
        ("a/1", 103),
        ("a/2", 103),
        ("a/1", 156),
        ("a", 226),
        ("a", 231),
    ]
    lasts |= {1: 0, 2: 0, 4: 0}  # now the pause is the longer one
    assert [at_ns // MS for at_ns, _, one in played(family(), lasts) if one.session == "a"] == [
        0,
        106,
        111,
    ]


def test_a_closed_loop_waits_for_sub_agents_and_an_open_loop_does_not() -> None:
    table = run(family(), setup_of(closed_loop=True)).table
    assert len(table) == 7
    first, (last, *_) = (
        table.finish_ns[0],
        [row for row in range(7) if table.prompt_tokens[row] == 640],
    )
    others = [row for row in range(1, 7) if table.prompt_tokens[row] in (160, 320)]
    assert min(table.arrival_ns[others]) == first
    ends = [table.finish_ns[row] for row in others if table.prompt_tokens[row] == 320]
    assert table.arrival_ns[last] == max(ends)
    opened = run(family(), setup_of()).table
    assert opened.arrival_ns.tolist() == [one.at_ns for one in family()]


def test_missing_agents_and_parents_delay_no_request() -> None:
    whole = family()
    without_agents = [one for one in whole if one.parent is None]
    assert len(played(without_agents, dict.fromkeys(range(7), MS))) == 4
    orphans = [one for one in whole if one.session != "a"]  # they begin at their own times
    told = played(orphans, dict.fromkeys(range(7), 0))
    assert [at_ns // MS for at_ns, _, _ in told] == [10, 10, 12, 13]


def test_clients_can_send_one_key_for_their_group_or_none() -> None:
    tables = {
        ids: run(family(), setup_of("hybrid", world=World(client_ids=ids))).table
        for ids in get_args(ClientIds)
    }
    # Ids from clients change no request, so the sessions are the same.
    assert len({tuple(table.session.tolist()) for table in tables.values()}) == 1


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 8), most=st.integers(1, 4))
def test_every_request_of_an_agent_family_comes_once_and_in_order(
    seed: int, count: int, most: int
) -> None:
    """In random families of agents, every request comes exactly once, at its time. Some parents are
    missing or come later, and some names belong to no session.
    """
    random = Random(seed)
    names = [f"s{number}" for number in range(count)]
    jobs: list[Job] = []
    for name in names:
        at_ns, parent = random.randrange(20), random.choice([None, "nobody", *names])
        side = random.random() < 0.2
        for _ in range(random.randint(1, most)):
            pause = random.choice([None, random.randrange(5)])
            one = job(0, 16, 1, session=name, group="s0", parent=parent, side=side, think_ns=pause)
            awaited = tuple(random.choices(["nobody", *names], k=random.randint(0, count)))
            jobs.append(msgspec.structs.replace(one, at_ns=at_ns, waits_for=awaited))
            at_ns += random.randrange(6)
    jobs.sort(key=lambda one: one.at_ns)
    told = played(jobs, {number: random.randrange(10) for number in range(len(jobs))})
    assert sorted(id(one) for _, _, one in told) == sorted(map(id, jobs))
    ends_ns = {id(one): end_ns for _, end_ns, one in told}
    turns: dict[str | None, list[Job]] = {}
    for one in jobs:
        turns.setdefault(one.session, []).append(one)
    for at_ns, _, one in told:
        assert at_ns == expected_ns(one, turns, ends_ns)


def opener(first: Job, turns: dict[str | None, list[Job]]) -> Job | None:
    """Return the turn that starts the session of `first`, or None if it starts by itself."""
    order, name = list(turns), first.group if first.side else first.parent
    if name not in turns or order.index(name) >= order.index(first.session):
        return None
    before = [one for one in turns[name] if one.at_ns <= first.at_ns]
    return before[-1] if before else None


def expected_ns(one: Job, turns: dict[str | None, list[Job]], ends_ns: dict[int, int]) -> int:
    """Return the time at which a request must come, given the ends of all other requests."""
    own = turns[one.session]
    number = next(number for number, each in enumerate(own) if each is one)
    before = own[number - 1] if number else opener(one, turns)
    if before is None:
        return one.at_ns
    pause_ns = one.at_ns - before.at_ns if one.think_ns is None else one.think_ns
    times = [ends_ns[id(before)] + pause_ns]
    if number:
        for name in set(one.waits_for) & set(turns):
            starter = opener(turns[name][0], turns)
            if any(starter is each for each in own[:number]):
                times.append(ends_ns[id(turns[name][-1])])
    return max(times)
