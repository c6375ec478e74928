"""Tests of ThunderAgent: programs are paused and resumed as computed by hand, and its sums are
right.
"""

from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import (
    Arrival,
    Dispatched,
    Failure,
    Finish,
    Identity,
    Progress,
    Tick,
    WorkerChange,
    WorkerFacts,
)
from policies.pick import HOLD, pick
from policies.published.programs import MAX_CHAINS, Programs
from policies.published.thunder_agent import ThunderAgent
from tests.effort import examples
from tests.policies.fleet import fleet_of, request_of

CHAIN = np.zeros(0, dtype=np.uint64)


class World:
    """Workers of 10,000 tokens each, and a rule that receives the facts a router would give it."""

    def __init__(self, policy: ThunderAgent, workers: int = 2) -> None:
        self.policy = policy
        self.state: Programs = policy.initial_state()
        self.now_s = 0.0
        self.ids = list(range(workers))
        self.number = 0
        for worker_id in self.ids:
            spec = WorkerFacts(f"w{worker_id}", ("m",), 16, kv_capacity_tokens=10_000.0)
            self.tell(WorkerChange(0.0, worker_id, "ready", spec))

    def tell(self, fact):
        self.state = self.policy.observe(fact, self.state)

    def costs(self, session, tokens=1_000, group=None):
        request = request_of(session=session, group=group, prompt_tokens=tokens)
        fleet = fleet_of(worker_id=self.ids, kv_capacity_tokens=10_000.0)
        return self.policy.costs(request, fleet, self.state).tolist()

    def arrive(self, session, tokens, group=None, final=False):
        """Let a request arrive; return its number and the worker to which it goes, or -1 if it goes
        to none.
        """
        self.number += 1
        identity = Identity(group=group, final=final)
        arrival = Arrival(
            self.now_s, self.number, "m", tokens, {}, session=session, identity=identity
        )
        self.tell(arrival)
        return self.number, self.ask(self.number, session, tokens, group)

    def ask(self, number, session, tokens, group=None):
        row = pick(np.array(self.costs(session, tokens, group)), 0.0)
        if row == HOLD:
            return HOLD
        worker_id = self.ids[row]
        self.tell(
            Dispatched(
                *(self.now_s, number, worker_id, 0, tokens, CHAIN), session=session, group=group
            )
        )
        return worker_id

    def finish(self, number, tokens, output=0):
        self.tell(Finish(self.now_s, number, tokens, 0, output))

    def serve(self, session, tokens, output=0, **who):
        number, worker_id = self.arrive(session, tokens, **who)
        self.finish(number, tokens, output)
        return worker_id

    def check(self, after_s=5.0):
        self.now_s += after_s
        self.tell(Tick(self.now_s))


def paused(world):
    return sorted(name for _, _, name in world.state.paused)


def test_new_programs_go_to_the_worker_with_fewest_tokens_and_stay():
    world = World(ThunderAgent())
    assert world.serve("a", 3_000, 500) == 0
    assert world.serve("b", 1_000) == 1
    assert world.costs("c") == [3_600.0, 1_100.0]
    assert world.serve("c", 4_000) == 1
    assert world.costs("a") == [-1.0, 5_200.0]
    assert world.costs(None) == [3_600.0, 5_200.0], "it has no program: where there is room"
    assert world.costs(None, 6_000) == [3_600.0, inf]


def test_a_new_program_without_room_and_later_programs_wait():
    world = World(ThunderAgent())
    world.serve("a", 6_000)
    world.serve("b", 5_000)
    number, worker_id = world.arrive("c", 5_000)
    assert worker_id == HOLD
    _, behind = world.arrive("d", 10)
    assert behind == HOLD, "one waits already"
    assert world.arrive("a", 6_000)[1] == 0, "it has its worker"
    world.check()
    # 8,500 - 6,100 and 8,500 - 5,100 are free: "d" is resumed where more is; "c" is too large.
    assert world.costs("d", 10) == [6_100.0, -1.0]
    assert world.costs("c", 5_000) == [inf, inf]
    world.tell(Failure(world.now_s, number, "client"))
    assert paused(world) == []


@pytest.mark.parametrize(("output", "names"), [(500, []), (501, ["a", "b"])])
def test_acting_programs_are_paused_small_ones_first_down_to_the_target(output, names):
    world = World(ThunderAgent(), workers=1)
    for session, tokens in (("a", 900), ("b", 1_900), ("c", 2_900)):
        world.serve(session, tokens)
    number, _ = world.arrive("d", 2_900)
    world.tell(Progress(world.now_s, number, output))
    world.check()
    # 1,000 + 2,000 + 3,000 + 3,500 = 9,500 is not above 0.95; of 9,501 the first two leave 6,501.
    assert paused(world) == names
    assert world.costs("a") == [inf if names else -1.0]
    assert world.costs("c") == [-1.0]


def test_reasoning_programs_are_marked_and_paused_when_they_act():
    world = World(ThunderAgent(), workers=1)
    numbers = {s: world.arrive(s, t)[0] for s, t in (("a", 1_000), ("b", 3_000), ("c", 4_000))}
    world.tell(Progress(world.now_s, numbers["c"], 1_500))
    world.check()
    # 9,800 are used: without "a" 8,700, without "b", too, 5,600.
    assert [one.marked for one in world.state.programs.values()] == [True, True, False]
    assert paused(world) == []
    world.check()
    assert not world.state.programs[None, "session", "c"].marked, "marks count as freed"
    world.finish(numbers["b"], 3_000)
    assert paused(world) == ["b"]
    world.finish(numbers["c"], 4_000, 1_500)
    assert paused(world) == ["b"]


def test_programs_with_a_request_resume_first_and_large_ones_are_placed_first():
    world = World(ThunderAgent())
    for session, tokens in (("a", 4_000), ("b", 3_000), ("c", 2_000)):
        world.serve(session, tokens)
    assert world.serve("d", 5_700, 2_300) == 0
    for program in list(world.state.programs.values()):
        world.state._take_worker(program)
    number, worker_id = world.arrive("b", 3_000)
    assert worker_id == HOLD
    world.check()
    # 17,000 are free. "b" has a request, the others by size: 3,100 + 2,100 + 4,100; 8,100 no more.
    # The largest, "a", goes to 0; "b" to 1, and so does "c", for 8,500 - 3,100 is more there.
    homes = {name: one.worker_id for (_, _, name), one in world.state.programs.items()}
    assert homes == {"a": 0, "b": 1, "c": 1, "d": None}
    assert world.policy.asks_held(world.state), "held requests are to be asked now"
    assert world.ask(number, "b", 3_000) == 1
    assert not world.policy.asks_held(world.state)


def test_a_request_that_waits_for_half_an_hour_is_placed_without_room():
    world = World(ThunderAgent(hold_s=4_000.0))
    world.serve("a", 9_000)
    world.serve("b", 8_000)
    number, worker_id = world.arrive("c", 9_900)
    assert worker_id == HOLD
    for _ in range(361):
        world.check(4.99)
        world.serve("a", 9_000)
        world.serve("b", 8_000)
    assert world.ask(number, "c", 9_900) == HOLD
    world.check(5.0)
    assert world.ask(number, "c", 9_900) == 1


def test_a_finished_program_frees_its_room():
    world = World(ThunderAgent(), workers=1)
    world.serve("a", 9_000)
    assert world.costs("b") == [inf]
    world.serve("a", 9_000, final=True)
    assert world.costs("b") == [0.0]
    world.serve("c", 9_000)
    world.check(1_799.0)
    assert world.costs("b") == [inf]
    world.check(6.0)
    assert world.costs("b") == [0.0], "no request came for half an hour"


def test_acting_programs_lose_weight_with_acting_decay():
    fading = World(ThunderAgent(acting_decay=True), workers=1)
    full = World(ThunderAgent(), workers=1)
    for world in (fading, full):
        world.serve("a", 9_000)
        assert world.arrive("b", 5_000)[1] == HOLD
        world.check(20.0)
    assert fading.costs("b", 5_000) == [-1.0]
    assert full.costs("b", 5_000) == [inf]


def test_a_group_is_one_program_of_all_its_sessions():
    world = World(ThunderAgent())
    assert world.serve("main", 2_000, group="g") == 0
    assert world.serve("child", 1_000, group="g") == 0
    assert world.costs("other") == [3_100.0, 0.0]
    assert world.serve("child", 1_000, group="g", final=True) == 0
    assert world.costs("other") == [2_100.0, 0.0]
    for number in range(3 * MAX_CHAINS):
        world.serve(f"child {number}", 1, group="g")
    assert world.costs("other") == [100.0 + MAX_CHAINS, 0.0], "the oldest counts no more"


def test_the_programs_of_a_lost_worker_move_to_another_worker():
    world = World(ThunderAgent())
    assert world.serve("a", 3_000) == 0
    world.tell(WorkerChange(1.0, 0, "gone"))
    world.ids = [1]
    assert world.costs("a") == [0.0]
    world.check()
    assert world.serve("a", 3_000) == 1


def test_the_numbers_of_programs_and_requests_are_bounded():
    world = World(ThunderAgent(max_programs=3))
    for number in range(50):
        world.serve(f"s{number}", 10)
    assert len(world.state.programs) == 3
    busy = [world.arrive(f"busy {number}", 10)[0] for number in range(5)]
    assert len(world.state.programs) == 3
    assert len(world.state.requests) == 3, "the other two have no program"
    for number in busy:
        world.finish(number, 10)
    assert not world.state.requests


steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from("abcd"), st.integers(1, 9_000), st.booleans()),
        st.tuples(st.just("finish"), st.integers(0, 9), st.integers(0, 2_000), st.booleans()),
        st.tuples(st.just("fail"), st.integers(0, 9), st.booleans(), st.booleans()),
        st.tuples(st.just("check"), st.sampled_from([0.1, 5.0, 400.0, 2_000.0]), st.none()),
        st.tuples(st.just("gone"), st.integers(0, 2), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(steps=steps, grouped=st.booleans())
def test_sums_equal_those_of_a_recount(steps, grouped):
    world = World(ThunderAgent(max_programs=3), workers=3)
    under_way: list[tuple[int, str, int]] = []
    for kind, *step in steps:
        if kind == "arrive":
            session, tokens, final = step
            group = "g" if grouped and session in "ab" else None
            number, _ = world.arrive(session, tokens, group, final)
            under_way.append((number, session, tokens))
        elif kind == "check":
            world.check(step[0])
            for number, session, tokens in under_way:
                one = world.state.requests.get(number)
                if one is not None and not one.sent:
                    world.ask(number, session, tokens, "g" if one.key[1] == "group" else None)
        elif kind == "gone":
            if len(world.ids) > 1 and step[0] in world.ids:
                world.ids.remove(step[0])
                world.tell(WorkerChange(world.now_s, step[0], "gone"))
        elif step[0] < len(under_way):
            number, _, tokens = under_way[step[0]]
            if kind == "finish":
                world.finish(number, tokens, step[1])
            else:
                world.tell(Failure(world.now_s, number, "worker", retry=step[1]))
            if kind == "finish" or not step[1]:
                del under_way[step[0]]
        recount(world.state)


def recount(state: Programs) -> None:
    """Count everything anew in the plainest way, and assert that the state has the same numbers."""
    assert len(state.programs) <= 3
    used: Counter[int] = Counter()
    for key, program in state.programs.items():
        assert program.key == key
        if program.worker_id is not None:
            used[program.worker_id] += sum(t for t, _ in program.chains.values()) + 100
        assert not (program.paused and program.worker_id is not None)
        own = [one for one in state.requests.values() if one.key == key]
        assert program.running == sum(one.sent for one in own)
        assert program.waiting == len(own) - program.running
    assert state.used == dict(used)
    assert state.paused == {key for key, one in state.programs.items() if one.paused}
    assert all(one.key in state.programs for one in state.requests.values())


@pytest.mark.parametrize(
    "bad",
    [
        {"pause_above": 1.1},
        {"pause_target": 0.96},
        {"resume_below": 0.0},
        {"resume_below": 0.96},
        {"interval_s": 0.0},
        {"force_s": inf},
        {"retention_s": np.nan},
        {"hold_s": -1.0},
        {"program_tokens": -1},
        {"max_programs": 0},
    ],
)
def test_invalid_parameters_are_rejected(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ThunderAgent(**bad)
