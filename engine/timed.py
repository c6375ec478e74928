"""The timed runner: it runs the real scheduler and cache, and waits where a GPU would compute. Each
step lasts as long as `step_time` says, divided by `speed`. Each token is a pure function of all
tokens before it, so any stream can be checked against its prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from engine.scheduler.request import Request, State
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Output, Read, Step, StepSplit
from engine.step_time import StepLoad
from kvkernels import chain_hashes

DEADLINE_PASSED = "the request's deadline passed before its answer was whole"
OVERRUN_SHARE = 0.25  # a step is an overrun if it ends later than this share of its length
OVERRUN_LEAST_S = (
    0.002  # and by at least this much: event loops wake with a jitter of a millisecond
)


class Clock(Protocol):
    """The clock of a runner."""

    def now_s(self) -> float:
        """Return the seconds of a clock that never goes back."""

    async def sleep_until(self, when_s: float) -> None:
        """Sleep until `when_s` or a little longer; let other tasks run even if that time
        is past.
        """


class StepTimes(Protocol):
    """Computes how long a step takes; `engine.step_time.StepTime` does this."""

    def seconds(self, step: StepLoad) -> float:
        """Return the seconds that `step` takes."""


class LoopClock:
    """The machine's monotonic clock; sleeping lets the event loop run other tasks. Holds
    no state.
    """

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep_until(self, when_s: float) -> None:
        await asyncio.sleep(max(0.0, when_s - time.monotonic()))


async def rest(wake: asyncio.Event, until_s: float | None, clock: Clock) -> None:
    """Wait until `wake` is set again, or until the time `until_s`, at which a scheduler wants to be
    called again; None waits for `wake` only.
    """
    wake.clear()
    if until_s is None:
        await wake.wait()
        return
    naps = [asyncio.ensure_future(nap) for nap in (wake.wait(), clock.sleep_until(until_s))]
    try:
        await asyncio.wait(naps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for nap in naps:
            nap.cancel()


def no_reads(read: Read) -> None:
    """Raise AssertionError, in a worker that reads no other worker's KV and so must never get a
    read.
    """
    raise AssertionError(f"nobody reads the KV of request {read.request.request_id}")


class TokenChain:
    """The deterministic output of one sequence. Lifetime: request. The next token is
    chain_hashes(all tokens so far, block_size=1)[-1] mod vocab. Hence a prompt made of another
    request's prompt and output continues as that request would have.
    """

    __slots__ = ("_hash", "_vocab")

    def __init__(self, tokens: npt.ArrayLike, vocab: int) -> None:
        chain = chain_hashes(np.ascontiguousarray(tokens, dtype=np.int32).data, 1)
        self._hash = int(chain[-1]) if len(chain) else 0
        self._vocab = vocab

    def next_token(self) -> int:
        """Return the next token, 0..vocab-1, and add it to the sequence."""
        token = self._hash % self._vocab
        self._hash = xxhash.xxh3_64_intdigest(
            self._hash.to_bytes(8, "little") + token.to_bytes(4, "little")
        )
        return token


def continuation(tokens: Sequence[int], count: int, vocab: int) -> list[int]:
    """Return the `count` tokens with which a worker that computes nothing, and whose vocabulary has
    `vocab` tokens, answers the prompt `tokens`.
    """
    chain = TokenChain(tokens, vocab)
    return [chain.next_token() for _ in range(count)]


class TimedRunner:
    """Drives the scheduler in modelled time.

    Lifetime: worker. `on_step(step, outputs, now_s)` is called when a step ends, and
    `on_failed(requests, why)` when requests end without an answer because their deadline has
    passed. The next step starts at the modelled end of a step, not when the event loop woke, so
    delays do not add up; only a step that is late by its whole length makes the next step start
    from the present time. KV in host memory is loaded meanwhile, in `load_token_s` seconds per
    token, one prompt after another.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTimes,
        vocab: int,
        speed: float,
        on_step: Callable[[Step, list[Output], float], None],
        clock: Clock,
        on_failed: Callable[[Sequence[Request], str], None] = lambda requests, why: None,
        load_token_s: float = 0.0,
    ) -> None:
        if not 0.0 < speed < float("inf"):
            raise ValueError(f"speed must be above 0, got {speed}")
        self.scheduler = scheduler
        self.clock = clock
        self.overrun_steps_total = 0
        self.busy_s_total = 0.0  # modelled, after `speed`
        self.step_s = 0.0  # the last step as the clock saw it, times `speed`
        self.split = StepSplit()  # of the last step, not times `speed`
        self.logprobs: Mapping[int, NoReturn] = MappingProxyType({})  # there are none
        self.on_read: Callable[[Read], None] = no_reads
        self._step_time = step_time
        self._vocab = vocab
        self._speed = speed
        self._on_step = on_step
        self._on_failed = on_failed
        self._load_token_s = load_token_s
        self._loaded_s = 0.0  # when all running loads will have arrived
        self._loads: set[asyncio.Task[None]] = set()
        self._chains: dict[int, TokenChain] = {}  # unfinished requests, by id
        self._wake = asyncio.Event()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Refused."""
        self.scheduler.add(request, self.clock.now_s())
        self._chains[request.request_id] = TokenChain(request.prompt, self._vocab)
        self._wake.set()

    def cancel(self, request_id: int) -> bool:
        """Drop a request at once. Return False if it has finished already."""
        self._chains.pop(request_id, None)
        return self.scheduler.cancel(request_id)

    def wake(self) -> None:
        """Wake a resting engine, because blocks became free or KV arrived."""
        self._wake.set()

    async def run(self) -> None:
        """Run steps until cancelled; rest while there is no request."""
        try:
            await self._run()
        finally:
            for load in self._loads:
                load.cancel()

    async def _run(self) -> None:
        timeline_s = self.clock.now_s()
        while True:
            begun_s = self.clock.now_s()
            self._expire(begun_s)
            step = self.scheduler.schedule(begun_s)
            for read in self.scheduler.take_reads():
                if read.source == "host":
                    self._start_load(read)
                else:
                    self.on_read(read)
            if step is None:
                await rest(self._wake, self.scheduler.wake_s, self.clock)
                timeline_s = self.clock.now_s()
                continue
            length_s = self._step_time.seconds(step) / self._speed
            end_s = timeline_s + length_s
            scheduled_s = self.clock.now_s()
            await self.clock.sleep_until(end_s)
            now_s = self.clock.now_s()
            self.step_s = (now_s - timeline_s) * self._speed
            timeline_s = self._account(end_s, length_s, now_s)
            outputs = self.scheduler.complete(step, self._tokens(step), now_s)
            for output in outputs:
                if output.finished:
                    del self._chains[output.request.request_id]
            self.split = StepSplit(
                schedule_s=scheduled_s - begun_s,
                compute_s=now_s - scheduled_s,
                complete_s=self.clock.now_s() - now_s,
                modelled_s=length_s,
            )
            self._on_step(step, outputs, now_s)

    def _start_load(self, read: Read) -> None:
        length_s = self._load_token_s * (read.stop - read.start) / self._speed
        self._loaded_s = max(self._loaded_s, self.clock.now_s()) + length_s
        load = asyncio.ensure_future(self._load(read.request.request_id, self._loaded_s))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)

    async def _load(self, request_id: int, end_s: float) -> None:
        await self.clock.sleep_until(end_s)
        self.scheduler.end_read(request_id, self.clock.now_s(), arrived=True)
        self._wake.set()

    def _expire(self, now_s: float) -> None:
        late = self.scheduler.expire(now_s)
        for request in late:
            self._chains.pop(request.request_id, None)
        if late:
            self._on_failed(late, DEADLINE_PASSED)

    def _account(self, end_s: float, length_s: float, now_s: float) -> float:
        """Count the step, and return the time at which the next one starts."""
        self.busy_s_total += length_s
        late_s = now_s - end_s
        if late_s > max(OVERRUN_SHARE * length_s, OVERRUN_LEAST_S):
            self.overrun_steps_total += 1
        return now_s if late_s > length_s else end_s

    def _tokens(self, step: Step) -> dict[int, int]:
        """Return the new token of each sampled request that was not cancelled meanwhile, by request
        id.
        """
        chains = self._chains
        return {
            request.request_id: chains[request.request_id].next_token()
            for request in step.sampled
            if request.state is State.RUNNING
        }
