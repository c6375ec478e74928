"""Sums by key over the last minutes, kept in slices of time so that old values can be dropped."""

from __future__ import annotations

import math
from collections import deque

SLICES = 6  # of a window; the oldest slice is dropped as a whole
MAX_KEYS = 2_048  # of a slice; further keys are left out


class WindowSums:
    """Keeps two sums for each key, such as seconds and requests, over the last `window_s` seconds.

    The window is divided into six equal slices of time. The oldest slice is dropped when a new
    slice begins, so the sums cover 5/6 of the window or more. Lifetime: the policy's.
    """

    def __init__(self, window_s: float) -> None:
        self.totals: dict[int, list[float]] = {}  # key -> its two sums
        self._slice_s = window_s / SLICES
        self._newest = -1  # slices are numbered from time 0 on
        self._slices: deque[dict[int, list[float]]] = deque(({} for _ in range(SLICES)), SLICES)

    def advance(self, now_s: float) -> None:
        """Drop all values older than the window; this takes O(1) unless a new time slice begins."""
        now = math.floor(now_s / self._slice_s)
        if now <= self._newest:
            return
        for _ in range(min(now - self._newest, SLICES)):
            self._slices.appendleft({})
        self._newest = now
        self.totals = {}
        for part in self._slices:
            for key, (first, second) in part.items():
                _add(self.totals, key, first, second)

    def add(self, now_s: float, key: int, first: float, second: float) -> None:
        """Add to both sums of a key."""
        self.advance(now_s)
        newest = self._slices[0]
        if key in newest or len(newest) < MAX_KEYS:
            _add(newest, key, first, second)
            _add(self.totals, key, first, second)

    def halves(self, key: int) -> tuple[float, float]:
        """Return a key's first sum divided by its second, in the older and in the newer half.

        The halves are those of the window. A half without data gives NaN.
        """
        parts = list(self._slices)
        return _mean(parts[SLICES // 2 :], key), _mean(parts[: SLICES // 2], key)


def _mean(parts: list[dict[int, list[float]]], key: int) -> float:
    found = [part[key] for part in parts if key in part]
    count = sum(second for _, second in found)
    return sum(first for first, _ in found) / count if count else float("nan")


def _add(sums: dict[int, list[float]], key: int, first: float, second: float) -> None:
    entry = sums.get(key)
    if entry is None:
        sums[key] = [first, second]
    else:
        entry[0] += first
        entry[1] += second
