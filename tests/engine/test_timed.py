"""Tests of the simulated runner on a virtual clock: when steps begin and end, steps that end late,
and their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Output, SchedulerSettings, Step
from engine.step_time import StepLoad
from engine.timed import TimedRunner, TokenChain, continuation
from kvkernels import chain_hashes
from tests.oracles.block_pool import check_pool

VOCAB = 1000
STEP_S = 0.1


class VirtualClock:
    """A clock whose time passes only by sleeping; each sleep ends later than asked by the next
    value of `late_s`.
    """

    def __init__(self, *late_s: float) -> None:
        self.time_s = 100.0
        self._late_s = list(late_s)

    def now_s(self) -> float:
        return self.time_s

    async def sleep_until(self, when_s: float) -> None:
        self.time_s = max(self.time_s, when_s)
        self.time_s += self._late_s.pop(0) if self._late_s else 0.0
        await asyncio.sleep(0)


class ConstantTime:
    """A step-time formula that gives STEP_S for every step."""

    def seconds(self, step: StepLoad) -> float:
        return STEP_S


class Bench:
    """A simulated runner, with the tokens that it gave and their times."""

    def __init__(
        self, clock: VirtualClock, speed: float = 1.0, blocks: int = 64, **limits: int
    ) -> None:
        self.ends_s: list[float] = []
        self.outputs: list[Output] = []
        self.pool = BlockPool(blocks, 4)
        settings = SchedulerSettings(max_num_tokens=256, **limits)  # type: ignore[arg-type]
        self.runner = TimedRunner(
            Scheduler(settings, self.pool), ConstantTime(), VOCAB, speed, self._on_step, clock
        )

    def _on_step(self, step: Step, outputs: list[Output], now_s: float) -> None:
        self.ends_s.append(now_s)
        self.outputs += outputs
        self.pool.drain_events()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TimedRunner]:
        task = asyncio.create_task(self.runner.run())
        yield self.runner
        await turns_until(lambda: not self.runner.scheduler.requests)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds; virtual time costs no real time."""
    for _turn in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("the condition never held")


def request(number: int, tokens: list[int], output_tokens: int) -> Request:
    return Request(number, np.array(tokens, dtype=np.int32), output_tokens)


async def test_steps_follow_each_other_without_drift() -> None:
    bench = Bench(VirtualClock(0.01, 0.02, 0.015, 0.0, 0.01))
    async with bench.running() as runner:
        runner.submit(request(0, [1, 2, 3], 5))
    ideal_s = [100.0 + STEP_S * number for number in range(1, 6)]
    late_s = [end - ideal for end, ideal in zip(bench.ends_s, ideal_s, strict=True)]
    assert late_s == pytest.approx([0.01, 0.02, 0.015, 0.0, 0.01])
    assert runner.overrun_steps_total == 0
    assert runner.busy_s_total == pytest.approx(0.5)


async def test_a_late_step_counts_as_an_overrun_and_is_caught_up() -> None:
    bench = Bench(VirtualClock(0.0, 0.08, 0.0, 0.0))
    async with bench.running() as runner:
        runner.submit(request(0, [1, 2, 3], 4))
    assert bench.ends_s == pytest.approx([100.1, 100.28, 100.3, 100.4])
    assert runner.overrun_steps_total == 1


async def test_a_step_late_by_its_full_length_restarts_the_timeline() -> None:
    bench = Bench(VirtualClock(0.0, 0.25, 0.0, 0.0))
    async with bench.running() as runner:
        runner.submit(request(0, [1, 2, 3], 4))
    assert bench.ends_s == pytest.approx([100.1, 100.45, 100.55, 100.65])
    assert runner.overrun_steps_total == 1


async def test_speed_shortens_steps_and_a_small_delay_is_no_overrun() -> None:
    bench = Bench(VirtualClock(0.0009, 0.0, 0.0), speed=100.0)
    async with bench.running() as runner:
        runner.submit(request(0, [1], 3))
    assert bench.ends_s[-1] == pytest.approx(100.003)
    assert runner.overrun_steps_total == 0


async def test_an_idle_runner_sleeps_until_a_request_arrives() -> None:
    clock = VirtualClock()
    bench = Bench(clock)
    async with bench.running() as runner:
        runner.submit(request(0, [1], 1))
        await turns_until(lambda: not runner.scheduler.requests)
        await asyncio.sleep(0)
        clock.time_s = 500.0
        runner.submit(request(1, [2], 1))
    assert bench.ends_s == pytest.approx([100.1, 500.1])


async def test_a_request_can_be_cancelled_while_its_step_runs() -> None:
    bench = Bench(VirtualClock())
    async with bench.running() as runner:
        runner.submit(request(0, [1, 2, 3], 50))
        runner.submit(request(1, [4, 5, 6], 3))
        await turns_until(lambda: bool(bench.outputs))
        assert runner.cancel(0)
        assert not runner.cancel(0)
    assert [output.request.request_id for output in bench.outputs].count(1) == 3
    assert bench.pool.used_blocks == 0
    check_pool(bench.pool)


async def test_preempted_requests_give_the_same_tokens() -> None:
    prompts = [[number * 10 + 1, 2, 3, 4, 5] for number in range(4)]
    bench = Bench(VirtualClock(), blocks=8)
    async with bench.running() as runner:
        for number, prompt in enumerate(prompts):
            runner.submit(request(number, prompt, 12))
    assert runner.scheduler.preemptions_total > 0
    for number, prompt in enumerate(prompts):
        said = [out.token for out in bench.outputs if out.request.request_id == number]
        assert said == continuation(prompt, 12, VOCAB)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), st.integers(1, 12))
def test_each_token_depends_only_on_the_tokens_before_it(prompt: list[int], count: int) -> None:
    said = continuation(prompt, count, VOCAB)
    history = np.array(prompt + said[:-1], dtype=np.int32)
    assert said[-1] == int(chain_hashes(history.data, 1)[-1]) % VOCAB
    for cut in range(count):
        assert continuation(prompt + said[:cut], count - cut, VOCAB) == said[cut:]


def test_an_empty_token_chain_works_and_a_bad_speed_is_rejected() -> None:
    assert TokenChain([], VOCAB).next_token() == 0
    with pytest.raises(ValueError, match="speed"):
        Bench(VirtualClock(), speed=0.0)


async def test_an_idle_runner_wakes_to_start_a_delayed_batch():
    clock = VirtualClock()
    bench = Bench(clock, max_queue_delay_microseconds=50_000)
    async with bench.running() as runner:
        runner.submit(request(0, [1], 1))
    assert bench.ends_s == pytest.approx([100.05 + STEP_S])
