"""Tests that a fleet member follows its table of states whatever its worker and operator do, and
that every row is used.
"""

from __future__ import annotations

import asyncio
import random
from unittest.mock import patch

import aiohttp
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import WorkerChange, WorkerFacts
from router.engines.adapter import UnrecognizedError
from router.engines.spec import WorkerSpec
from router.engines.worker_spec import parse_worker_spec
from router.fleet import member as member_module
from router.fleet.context import End, FleetContext, FleetTerms, WorkerFact
from router.fleet.member import Member
from router.fleet.member_states import MEMBER_STATES
from router.fleet.recognize import Recognized
from router.fleet.wanted import NamedWorker
from router.http.reply import RelayLimits
from tests.effort import examples
from tests.router.state_recorder import StateRecorder

LIVES_MAX = 200


class RandomLife:
    """A random history of one worker and its member of the fleet. Lifetime: test.

    Its clock advances when it is read, and nothing waits: `health_s` is 0.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.told: list[str] = []

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def tell(self, fact: WorkerFact) -> None:
        if isinstance(fact, WorkerChange):
            self.told.append(fact.state)

    def fits(self, member: Member, ranks: tuple[int, ...]) -> bool:
        """Return whether the member's rank fits; in a tenth of the calls, give the member another
        random rank and return False.
        """
        if self.rng.random() < 0.9:
            return True
        rank = self.rng.choice([n for n in range(9) if n != member.spec.rank])
        member.spec = member_module.replace(member.spec, rank=rank)
        return False

    async def recognize(self, http: object, spec: WorkerSpec, *terms: object) -> Recognized:
        await asyncio.sleep(0)
        kind = self.rng.randrange(8)
        if kind == 0:
            raise UnrecognizedError("it is a toaster")
        if kind < 3:
            raise TimeoutError
        facts = WorkerFacts(name=spec.url, models=("m",), block_size=16)
        return Recognized("vllm", facts, None, loads=lambda *_: None)  # type: ignore[arg-type]

    async def complain(self, *_: object) -> str:
        await asyncio.sleep(0)
        kind = self.rng.randrange(8)
        if kind < 3:
            raise TimeoutError
        return "GET /health answered 500" if kind == 3 else ""

    async def trouble(self, *_: object) -> str:
        await asyncio.sleep(0)
        return "no answer"

    async def report(self, *_: object) -> End:
        for _turn in range(self.rng.randrange(30)):
            await asyncio.sleep(0)
        ends: tuple[End, ...] = ("asleep", "paused", "anew", "more", "broken")
        return self.rng.choice(ends)

    async def live(self, member: Member, steps: int) -> None:
        """Follow the worker for `steps` steps, while its operator drains it and changes its
        options.
        """
        task = asyncio.create_task(member.run())
        for _ in range(steps):
            for _turn in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            kind = self.rng.randrange(6)
            if kind == 0:
                member.drain("test")
            elif kind == 1:
                member.undrain("test")
            elif kind == 2 and member.recognized is not None:
                member.amend(member.recognized)
            elif kind == 3:
                task.cancel()
                member.recognize_again_with(member.spec)
                await asyncio.wait([task])
                task = asyncio.create_task(member.run())
            if member.answers:
                assert self.told[-1] == ("draining" if member.draining else "ready")
            else:
                assert self.told[-1:] in ([], ["down"])
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])


async def play(seed: int, steps: int) -> None:
    life, context = RandomLife(seed), zmq.asyncio.Context()
    terms = FleetTerms(0.5, 0.0, 0.0, 100, RelayLimits(), silent_s=6.0)
    async with aiohttp.ClientSession() as http:
        shared = FleetContext(http, context, life.clock, life.tell, terms)
        spec = parse_worker_spec("http://127.0.0.1:9")
        member = Member(0, spec, NamedWorker(spec, "test"), shared, life.fits, lambda *_: False)
        with (
            patch.object(member_module, "recognize", life.recognize),
            patch.object(Member, "_complaint", life.complain),
            patch.object(Member, "_report_loads", life.report),
            patch.object(member_module, "trouble_with", life.trouble),
        ):
            await life.live(member, steps)
        await member.close()
    context.destroy(linger=0)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_no_event_takes_a_member_out_of_its_state_table(seed: int, steps: int) -> None:
    rows = StateRecorder(MEMBER_STATES)
    with patch.object(member_module, "MEMBER_STATES", rows):
        asyncio.run(play(seed, steps))
    assert rows.missed == set()


def test_every_row_of_the_state_table_is_reached() -> None:
    rows = StateRecorder(MEMBER_STATES)
    with patch.object(member_module, "MEMBER_STATES", rows):
        for seed in range(LIVES_MAX):
            asyncio.run(play(seed, 60))
            if not rows.unused:
                break
    assert rows.unused == rows.missed == set()
