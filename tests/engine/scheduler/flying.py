"""A driver that keeps several steps of one scheduler in flight, and checks every token in the
cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from engine.scheduler.scheduler import Output, Request, Scheduler, Step
from kvkernels import chain_hashes
from tests.engine.scheduling import SIZE, Driver


@dataclass
class Flown:
    """A step that is in flight: the parts of its requests, the blocks of their KV, and the tokens
    it will give.
    """

    step: Step
    parts: list[tuple[list[int], int, list[int]]]  # tokens up to the end, first one, blocks
    tokens: dict[int, int]

    @property
    def written(self) -> set[int]:
        """Return the blocks that the step writes."""
        return {
            blocks[at // SIZE]
            for tokens, first, blocks in self.parts
            for at in range(first, len(tokens))
        }


@dataclass
class FlyingDriver(Driver):
    """Keeps as many steps in flight as allowed; each is computed when it ends, in the order of
    their starts.
    """

    flown: deque[Flown] = field(default_factory=deque)
    cache: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # slot: tokens up to it
    most_in_flight: int = 0

    def step(self) -> list[Output]:
        """Start a step if there is one; end the oldest step if none starts or no more are
        allowed.
        """
        for late in self.scheduler.expire(self.now_s):
            self.finished[late.request_id] = "timeout"
        step = self.scheduler.schedule(self.now_s)
        if step is not None:
            self.steps.append(step)
            self.flown.append(self._launched(step))
            self.most_in_flight = max(self.most_in_flight, len(self.flown))
            if self.scheduler.has_room:
                return []
        if not self.flown:
            self.now_s = max(self.now_s, self.scheduler.wake_s or 0.0)
            return []
        return self._land()

    def run(self, limit: int = 100_000) -> None:
        """Run steps until no request and no step in flight is left."""
        super().run(limit)
        while self.flown:
            self._land()

    def _launched(self, step: Step) -> Flown:
        parts, said = [], {}
        for one in step.decodes:
            tokens = self._tokens(one)[: one.scheduled_tokens]
            parts.append((tokens, one.scheduled_tokens - 1, list(one.block_ids)))
            said[one.request_id] = _next(tokens)
        for one, start, count in step.chunks:
            tokens = self._tokens(one)[: start + count]
            parts.append((tokens, start, list(one.block_ids)))
            if one in step.sampled:
                said[one.request_id] = _next(tokens)
        for tokens, _, _ in parts:
            assert tokens
        return Flown(step, parts, said)

    def _tokens(self, one: Request) -> list[int]:
        """Return all tokens of the request, including those of steps in flight."""
        known = one.tokens(0, one.total_tokens).tolist()
        flying = [flown.tokens.get(one.request_id) for flown in self.flown]
        return known + [token for token in flying if token is not None]

    def _land(self) -> list[Output]:
        flown = self.flown.popleft()
        references = self.scheduler.pool._references
        assert all(references[block] == 1 for block in flown.written), "a block went back too early"
        for tokens, first, blocks in flown.parts:
            for at in range(first, len(tokens)):
                self.cache[blocks[at // SIZE], at % SIZE] = tokens[: at + 1]
            for at in range(len(tokens)):
                slot = blocks[at // SIZE], at % SIZE
                assert self.cache[slot] == tokens[: at + 1], "another request's KV"
        self.now_s += self.step_s(flown.step)
        outputs = self.scheduler.complete(flown.step, flown.tokens, self.now_s)
        for output in outputs:
            request_id = output.request.request_id
            assert request_id not in self.finished, f"request {request_id} went on after its end"
            self.outputs.setdefault(request_id, []).append(output.token)
            if output.finished:
                self.finished[request_id] = output.finished
        return outputs


def _next(tokens: list[int]) -> int:
    """Return the token that `scheduling.next_token` would give after `tokens`."""
    return int(chain_hashes(np.array(tokens, dtype=np.int32), 1)[-1] % np.uint64(50))


def flying(scheduler: Scheduler) -> FlyingDriver:
    return FlyingDriver(scheduler)
