"""Steps that are scheduled and not yet complete: what their requests may do meanwhile."""

from __future__ import annotations

from collections import deque
from math import inf

from engine.request import Request
from engine.scheduler_blocks import RequestBlocks
from engine.scheduler_types import Step

MAX_STEPS_IN_FLIGHT = 16


class Flight:
    """The steps in flight, oldest first; they end in that order. Lifetime: worker.

    `steps`: how many there may be. `runs_ahead`: a request decodes again while the token that it
    got from a step in flight is not known here; else it waits for that token, and those that
    decode are spread over the steps. Raises ValueError for a number of steps out of range.
    """

    def __init__(self, blocks: RequestBlocks, steps: int = 1, *, runs_ahead: bool = False) -> None:
        if not 1 <= steps <= MAX_STEPS_IN_FLIGHT:
            raise ValueError(f"steps in flight must be 1..{MAX_STEPS_IN_FLIGHT}, got {steps}")
        self.steps = steps
        self._runs_ahead = runs_ahead
        self._blocks = blocks
        self._flying: deque[tuple[Step, float]] = deque()  # each with when it was scheduled
        self._leaving: list[Request] = []  # ended, and still in a step in flight
        self._landed_s = -inf

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def is_full(self) -> bool:
        """No further step may start before the oldest has ended."""
        return len(self._flying) >= self.steps

    def most_decodes(self, running: list[Request]) -> int:
        """How many of `running` may decode in one step, so that every step has its share."""
        if self._runs_ahead or self.steps == 1:
            return len(running)
        decoding = sum(one.scheduled_tokens >= one.prefill_target for one in running)
        return -(-decoding // self.steps)

    def may_decode(self, request: Request) -> bool:
        """May `request`, past its prefill, compute one token more beside the steps in flight?"""
        after = request.scheduled_tokens + 1  # its tokens, those in flight included
        if after == request.total_tokens:
            return True
        # One that is to have its longest output from the steps in flight is known to end.
        return self._runs_ahead and after < request.token_limit

    def launch(self, step: Step, now_s: float) -> None:
        """`step` starts: its requests are so much further, when it has ended."""
        number = step.number
        for request in step.decodes:
            request.scheduled_tokens += 1
            request.last_step = number
        for request, start, tokens in step.chunks:
            request.scheduled_tokens = start + tokens
            request.last_step = number
        self._flying.append((step, now_s))

    def land(self, step: Step, now_s: float) -> float:
        """The oldest step has ended; how long it took, in seconds, after the one before it.

        Blocks that only ended requests wrote in it are free now. ValueError for another step.
        """
        if not self._flying or self._flying[0][0] is not step:
            raise ValueError(f"step {step.number} is not the oldest one in flight")
        _, begun_s = self._flying.popleft()
        begun_s, self._landed_s = max(begun_s, self._landed_s), now_s
        if self._leaving:
            for request in self._leaving:
                if request.last_step <= step.number:
                    self._blocks.leave(request)
            self._leaving = [one for one in self._leaving if one.last_step > step.number]
        return now_s - begun_s

    def leave(self, request: Request) -> None:
        """`request` runs no longer: its blocks are free when no step in flight writes them.

        Where one step flies at a time that is at once: nobody gets blocks before it has ended.
        """
        if self.steps > 1 and self._flying and request.last_step >= self._flying[0][0].number:
            self._leaving.append(request)
        else:
            self._blocks.leave(request)
