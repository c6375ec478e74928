"""Runs the steps of a real model: it schedules a step, lays out its batch, computes, samples, and
takes the tokens.

Steps compute in a thread of their own, so that the event loop can take requests and write answers.
If the scheduler has two steps in flight, the next one is scheduled and laid out while one computes,
and begins when that ends. All code that reads the scheduler's requests runs on the event loop. If a
request ends while its step computes, that step is wasted; it writes to blocks that nobody reads,
and that no other request gets before the step has ended. Blocks that a schedule evicts into host
memory are copied there in the model's thread, before the next step is computed. Blocks of a prompt
in host memory are copied back in a thread of their own, during steps of other requests, and the
prompt continues after them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from engine.model.kv_cache import Moves
from engine.runner.compute import Chosen
from engine.runner.torch_sampler import TokenLogprobs
from engine.runner.work import LaidOut
from engine.scheduler.request import Request, State
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Output, Read, Step, StepSplit
from engine.timed import DEADLINE_PASSED, Clock, no_reads, rest

MAX_FAILED_STEPS = 3  # in a row: the fault is then not in one batch

log = logging.getLogger(__name__)


class EngineFailed(Exception):  # noqa: N818 - the end of a worker, seen by its exit code
    """Raised if steps fail one after another, or the device is lost, because this worker cannot
    answer any more.
    """


class Ends(Protocol):
    """A step that is being computed and will end."""

    def wait(self) -> list[Chosen]:
        """Wait for the step, and return the token of each sampled request."""


class Computes(Protocol):
    """The interface of what computes steps: `compute.Compute` or `compute.StagedCompute`."""

    @property
    def is_later(self) -> bool:
        """True if steps are launched in one thread and awaited in another."""

    def enter(self) -> None:
        """Prepare a thread for computing; call this first in each thread that computes."""

    def lay_out(self, step: Step) -> LaidOut:
        """Return `step`, which was just scheduled, in the form that the model takes; the event loop
        calls this.
        """

    def launch(self, step: LaidOut) -> Ends:
        """Start a step after the steps that were launched before; the model's thread calls this."""

    def lost(self) -> str:
        """After a failed step, return the reason why no step can be computed any more; "" if steps
        still can be. The method waits for launched work.
        """

    def move(self, moves: Moves) -> None:
        """Copy blocks as `HostKv.move` does; any thread may call this."""


@dataclass(frozen=True, slots=True)
class Flying:
    """A step in flight. Lifetime: from its schedule to its end."""

    step: Step
    chosen: asyncio.Future[list[Chosen]]
    begun_s: float
    scheduled_s: float  # laid out and handed over
    laid_out: LaidOut | None  # None where that failed


class RealRunner:
    """Drives the scheduler with a model; it has the interface of `engine.timed.TimedRunner`.

    Lifetime: worker. `on_step(step, outputs, now_s)` is called as each step ends, and
    `on_failed(requests, why)` if requests end without an answer, after they have left the
    scheduler. `run` raises EngineFailed after MAX_FAILED_STEPS failures in a row, and after a step
    that broke the device.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compute: Computes,
        on_step: Callable[[Step, list[Output], float], None],
        on_failed: Callable[[Sequence[Request], str], None],
        clock: Clock,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.overrun_steps_total = 0  # always 0: only timed workers count steps that take too long
        self.busy_s_total = 0.0
        self.step_s = 0.0
        self.split = StepSplit()
        self.logprobs: Mapping[int, TokenLogprobs] = {}  # of the last step, by request id
        self.on_read: Callable[[Read], None] = no_reads
        self._compute = compute
        self._on_step = on_step
        self._on_failed = on_failed
        self._flying: deque[Flying] = deque()  # oldest first
        self._landed_s = 0.0  # when the last step ended
        self._failed_in_a_row = 0
        self._saved: Future[None] = Future()  # the latest copy to the host
        self._saved.set_result(None)
        self._loads: dict[Future[None], int] = {}  # under way, with the pool's epoch
        self._watchers: set[asyncio.Task[None]] = set()  # of all copies
        self._wake = asyncio.Event()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `Refused` if the scheduler refuses it."""
        self.scheduler.add(request, self.clock.now_s())
        self._wake.set()

    def cancel(self, request_id: int) -> bool:
        """Drop a request at once; return False if it has finished already."""
        return self.scheduler.cancel(request_id)

    def wake(self) -> None:
        """Wake an engine that rests, because blocks became free or KV arrived."""
        self._wake.set()

    def wait_saved(self) -> None:
        """Wait until all blocks that were evicted so far are copied to host memory; do not call
        this in the event loop's thread.
        """
        wait((self._saved,))

    async def run(self) -> None:
        """Run steps until cancelled; rest while there is no request."""
        threads = [
            ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._compute.enter)
            for name in ("model", "tokens", "loads")
        ]
        try:
            while True:
                late = self.scheduler.expire(self.clock.now_s())
                if late:
                    self._on_failed(late, DEADLINE_PASSED)
                self._launch(*threads)
                if not self._flying:
                    await rest(self._wake, self.scheduler.wake_s, self.clock)
                elif await self._has_ended(self._flying[0]):
                    self._land(self._flying.popleft())
                    # A step of nothing but chunks may end before the loop has had a turn.
                    await asyncio.sleep(0)
        finally:
            for flying in self._flying:
                flying.chosen.cancel()
            for watcher in self._watchers:
                watcher.cancel()
            for thread in threads:
                thread.shutdown(wait=False, cancel_futures=True)

    def _launch(
        self, model: ThreadPoolExecutor, tokens: ThreadPoolExecutor, loads: ThreadPoolExecutor
    ) -> None:
        """Start as many steps as may be in flight, and the copies of blocks that they need."""
        while self.scheduler.has_room:
            begun_s = self.clock.now_s()
            step = self.scheduler.schedule(begun_s)
            self._save(model)
            for read in self.scheduler.take_reads():
                if read.source == "host":
                    self._load(read, loads)
                else:
                    self.on_read(read)
            if step is None:
                return
            laid_out: LaidOut | None = None
            try:
                laid_out = self._compute.lay_out(step)
                chosen = self._started(laid_out, model, tokens)
            except Exception as error:  # noqa: BLE001 - whoever waits for the step gets it
                chosen = asyncio.get_running_loop().create_future()
                chosen.set_exception(error)
            self._flying.append(Flying(step, chosen, begun_s, self.clock.now_s(), laid_out))

    def _save(self, model: ThreadPoolExecutor) -> None:
        """Copy evicted blocks to host memory before a step, a load or another worker writes to
        them.
        """
        pool = self.scheduler.pool
        block_ids, host_ids = pool.take_saves()
        if not block_ids:
            return
        # If the host's blocks were cleared, blocks of running loads lie where new ones are written.
        cleared = [load for load, epoch in self._loads.items() if epoch != pool.epoch]
        self._saved = model.submit(self._move, Moves(True, block_ids, host_ids), cleared)
        self._watch(self._watched(self._saved, None))

    def _load(self, read: Read, loads: ThreadPoolExecutor) -> None:
        """Copy the blocks of a prompt from host memory into the blocks that are reserved for it."""
        pool, request = self.scheduler.pool, read.request
        blocks = slice(read.start // pool.block_size, read.stop // pool.block_size)
        moves = Moves(False, request.block_ids[blocks], pool.host.ids(request.chain[blocks]))
        load = loads.submit(self._move, moves, [self._saved])
        self._loads[load] = pool.epoch
        self._watch(self._watched(load, request))

    def _move(self, moves: Moves, after: Sequence[Future[None]]) -> None:
        for copy in after:
            copy.result()
        self._compute.move(moves)

    def _watch(self, copy: Coroutine[None, None, None]) -> None:
        watcher = asyncio.ensure_future(copy)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watched(self, copy: Future[None], reader: Request | None) -> None:
        """Wait for the end of a copy. The request `reader` then continues after the tokens that
        were loaded, or computes them if the copy failed.
        """
        has_come = True
        try:
            await asyncio.wrap_future(copy)
        except Exception:
            log.exception("KV was not copied to or from the host: the cache is forgotten")
            self.scheduler.pool.clear()  # because the content of host memory is unknown
            has_come = False
        if reader is not None:
            del self._loads[copy]
            now_s = self.clock.now_s()
            self.scheduler.end_read(reader.request_id, now_s, arrived=has_come)
            self._wake.set()

    def _started(
        self, laid_out: LaidOut, model: ThreadPoolExecutor, tokens: ThreadPoolExecutor
    ) -> asyncio.Future[list[Chosen]]:
        launch = self._compute.launch
        if not self._compute.is_later:
            return asyncio.wrap_future(model.submit(lambda: launch(laid_out).wait()))
        launched = model.submit(launch, laid_out)
        return asyncio.wrap_future(tokens.submit(lambda: launched.result().wait()))

    async def _has_ended(self, oldest: Flying) -> bool:
        """Wait for the oldest step, and return True if it has ended. Return False if, before that,
        a request came that may start while the step computes.
        """
        if not self.scheduler.has_room:
            await asyncio.wait((oldest.chosen,))
            return True
        self._wake.clear()
        came = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait((oldest.chosen, came), return_when=asyncio.FIRST_COMPLETED)
        finally:
            came.cancel()
        return oldest.chosen.done()

    def _land(self, flying: Flying) -> None:
        """Process a step that has ended or failed. Raises EngineFailed if the device is lost, or
        too many steps failed in a row.
        """
        error = flying.chosen.exception()
        if error is None:
            self._failed_in_a_row = 0
            self._take(flying, flying.chosen.result())
            return
        failed = self._fail(flying.step, error)
        if why := self._compute.lost():
            raise EngineFailed(f"the device is lost to this process: {why}") from error
        # A step that was launched behind a failed one, for the same requests, does not count again.
        self._failed_in_a_row += 1 if failed else 0
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineFailed(
                f"{self._failed_in_a_row} steps failed in a row, the last one by {error!r}"
            ) from error

    def _take(self, flying: Flying, chosen: list[Chosen]) -> None:
        """Give a computed step to the scheduler, and report it."""
        now_s, before_s = self.clock.now_s(), self._landed_s
        running = [one for one in chosen if one.request.state is State.RUNNING]
        broken = [one.request for one in running if one.token < 0]
        if broken:
            self._give_up(broken, "the model gave no numbers (NaN or infinity) for this request")
        self.logprobs = {
            one.request.request_id: one.logprobs for one in chosen if one.logprobs is not None
        }
        tokens = {one.request.request_id: one.token for one in chosen}
        outputs = self.scheduler.complete(flying.step, tokens, now_s)
        # A step that was scheduled while another one computed begins as that ends.
        self.step_s = now_s - max(flying.begun_s, before_s)
        self.busy_s_total += self.step_s
        self._landed_s = now_s
        self.split = StepSplit(
            schedule_s=flying.scheduled_s - flying.begun_s,
            compute_s=now_s - max(flying.scheduled_s, before_s),
            complete_s=self.clock.now_s() - now_s,
        )
        if (laid_out := flying.laid_out) is not None:
            self.split.graph, self.split.padded_rows = laid_out.graph, laid_out.padded_rows
            self.split.int8 = laid_out.int8_backend
            saving = laid_out.batch.saving
            self.split.shared_prefix_groups = saving.shared_prefix_groups
            self.split.kv_bytes_saved = saving.kv_bytes_saved
        self._on_step(flying.step, outputs, now_s)

    def _fail(self, step: Step, error: BaseException) -> bool:
        """End all requests in `step`, because the contents of their blocks are unknown; return
        whether there were any requests.
        """
        log.error("step %d failed: %s", step.number, error, exc_info=error)
        inside = [*step.decodes, *(chunk.request for chunk in step.chunks)]
        running = [one for one in inside if one.state is State.RUNNING]
        self._give_up(running, f"the engine failed to compute this step: {type(error).__name__}")
        self.scheduler.complete(step, {}, self.clock.now_s())
        return bool(running)

    def _give_up(self, requests: list[Request], why: str) -> None:
        for request in requests:
            self.scheduler.cancel(request.request_id)
        self._on_failed(requests, why)
