"""Two counts over the last seconds, by steps of a tenth of these: exact to a step."""

from __future__ import annotations

from collections import deque

_STEPS = 10


class Window:
    """What was counted within `span_s`. Lifetime: its owner's."""

    __slots__ = ("_both", "_step_s", "_steps")

    def __init__(self, span_s: float) -> None:
        self._step_s = span_s / _STEPS
        self._steps: deque[list[int]] = deque()  # [number of the step, first, second]
        self._both = [0, 0]

    def add(self, now_s: float, first: int, second: int) -> None:
        """Count; times must not go backwards."""
        step = int(now_s // self._step_s)
        if not self._steps or self._steps[-1][0] != step:
            self._forget(step)
            self._steps.append([step, 0, 0])
        last, both = self._steps[-1], self._both
        last[1] += first
        last[2] += second
        both[0] += first
        both[1] += second

    def sums(self, now_s: float) -> tuple[int, int]:
        """Both counts of the present step and the nine before it."""
        self._forget(int(now_s // self._step_s))
        return self._both[0], self._both[1]

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
        self._both = [0, 0]

    def _forget(self, step: int) -> None:
        steps, both = self._steps, self._both
        while steps and steps[0][0] <= step - _STEPS:
            _, first, second = steps.popleft()
            both[0] -= first
            both[1] -= second
