"""One timed worker: scheduler, cache, runner, events and counters, joined.

The face that the HTTP handlers see: `start` an answer, `abandon` it, look at the cache.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.block_pool import BlockPool
from engine.profiles import profile
from engine.request import Request
from engine.scheduler import Scheduler
from engine.scheduler_types import Output, Refused, Step
from engine.server.answers import Answer, Choice
from engine.server.event_log import EventLog
from engine.server.events import KvPublisher
from engine.server.metrics import Exposition, Tallies, WorkerCollector
from engine.server.settings import WorkerSettings
from engine.server.step_log import StepLog
from engine.timed import LoopClock, TimedRunner
from engine.wire import chain_seed
from engine.wire.tokens import Tokenizer

Tokens = npt.NDArray[np.int32]


class Worker:
    """The parts of one worker. Lifetime: process; make it inside a running event loop."""

    def __init__(self, settings: WorkerSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.model = settings.model_name
        self.draining = False
        self._step_log = None if settings.step_log is None else StepLog(settings.step_log)
        self.tallies = Tallies()
        self.pool = BlockPool(settings.blocks, settings.block_size)
        self.runner = TimedRunner(
            Scheduler(settings.scheduler, self.pool),
            profile(settings.profile_name).step_time,
            tokenizer.vocab,
            settings.speed,
            self._on_step,
            LoopClock(),
        )
        self._log = EventLog(self.pool, time.time)
        self.publisher = KvPublisher(
            self._log, settings.host, settings.events_port, settings.replay_port
        )
        self.exposition = Exposition(WorkerCollector(self.tallies, self.runner, self.model))
        self._choices: dict[int, tuple[Answer, Choice]] = {}  # unfinished, by request id
        self._ids = itertools.count()
        self.idle = asyncio.Event()  # set while nothing is unfinished
        self.idle.set()

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus output that can be served."""
        return self.runner.scheduler.max_sequence_tokens

    @property
    def unfinished(self) -> int:
        """Sequences that are not answered yet."""
        return len(self._choices)

    @property
    def kv_seq(self) -> int:
        """Number of the last batch of KV events; -1 before the first."""
        return self._log.next_seq - 1

    def start(
        self,
        answer: Answer,
        prompts: Sequence[Tokens],
        output_tokens: int,
        priority: int,
        salt: str | None,
    ) -> None:
        """Queue one sequence a prompt. Raises Refused, and then none of them is queued."""
        seed = chain_seed(self.model, None, salt)
        now_s = self.runner.clock.now_s()
        try:
            for index, prompt in enumerate(prompts):
                request = Request(next(self._ids), prompt, output_tokens, priority, seed)
                self.runner.submit(request)
                choice = Choice(request, index, self.tokenizer.stream(), now_s)
                answer.choices.append(choice)
                answer.unfinished += 1
                self._choices[request.request_id] = (answer, choice)
                self.idle.clear()
                if salt:
                    self._log.add_salted(request, salt)
        except Refused as refusal:
            self.tallies.refused[refusal.reason] += 1
            self.abandon(answer)
            raise

    def abandon(self, answer: Answer) -> None:
        """Stop whatever of `answer` still runs: its client is gone, or it was cut."""
        for choice in answer.choices:
            request_id = choice.request.request_id
            if self._choices.pop(request_id, None) is not None:
                self.runner.cancel(request_id)
                self._log.forget_salted(request_id)
                self.tallies.finished["abort"] += 1
        if not self._choices:
            self.idle.set()

    def cut_all(self) -> None:
        """Abandon everything and let the waiting handlers go on, at the end of the grace."""
        for answer, _choice in list(self._choices.values()):
            self.abandon(answer)
            answer.cut()

    def close(self) -> None:
        """Free the sockets, and write down what is left of the step log."""
        self.publisher.close()
        if self._step_log is not None:
            self._step_log.close()

    def on_slow_client(self) -> None:
        """Count a client that left too much of its stream unread."""
        self.tallies.slow_clients += 1

    def reset_cache(self) -> None:
        """Forget every cached block, and say so to the subscribers at once."""
        self.pool.clear()
        self._publish()

    def snapshot(self) -> bytes:
        """The visible cache, numbered; changes that are not published yet go out first."""
        self._publish()
        return self._log.snapshot()

    def _on_step(self, step: Step, outputs: list[Output], now_s: float) -> None:
        # Blocks first: whoever reads the answer's end may already ask for what it left behind.
        self._publish()
        if self._step_log is not None:
            self._step_log.note(step, self.runner.step_s)
        tallies = self.tallies
        tallies.generation_tokens += len(outputs)
        for request, token, finished in outputs:
            answer, choice = self._choices[request.request_id]
            if choice.last_token_s:
                tallies.gap_s.observe(now_s - choice.last_token_s)
            else:
                tallies.ttft_s.observe(now_s - choice.submitted_s)
                tallies.prompt_tokens += request.prompt_tokens
            choice.last_token_s = now_s
            if finished:
                del self._choices[request.request_id]
                self._log.forget_salted(request.request_id)
                tallies.finished[finished] += 1
                tallies.e2e_s.observe(now_s - choice.submitted_s)
            answer.on_token(choice, token, finished)
        if not self._choices:
            self.idle.set()

    def _publish(self) -> None:
        batch = self._log.flush()
        if batch is not None:
            self.publisher.publish(batch)
